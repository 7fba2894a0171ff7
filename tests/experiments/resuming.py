"""Starting a resume check from a test and waiting for its arms, without a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from detrun.experiments.follow import Follower, Pace
from detrun.experiments.resume import ResumeOptions, start_resume
from detrun.launch.cluster import Cluster
from detrun.recipe import load_recipe
from detrun.records.archive import Archive
from detrun.records.jobs import JobFile
from detrun.records.layout import ExperimentFolder
from detrun.records.metrics_reader import read_rank_metrics
from detrun.report.live import ArmView
from tests.running import write_recipe

SAVES: dict[str, Any] = {
    "pattern": "step-{step}",
    "save_every": 3,
    "save_args": ["--save-every", "{save_every}"],
    "resume_args": ["--resume", "{checkpoint}"],
}


def plain_recipe(folder: Path, args: list[str] | None = None, **keys: Any) -> Path:
    """The plain trainer, ten steps, a checkpoint every three."""
    return write_recipe(folder, args=args, **{"steps": 10, "checkpoint": SAVES, **keys})


class Arms:
    """The arms of a resume check that has ended."""

    def __init__(self, folder: ExperimentFolder, seen: list[list[ArmView]]) -> None:
        self.folder = folder
        self.seen = seen

    def job(self, arm: str, attempt: int) -> JobFile:
        return JobFile.read(self.folder.attempt(arm, attempt).job_file)

    def steps(self, arm: str, attempt: int, rank: int = 0) -> list[int]:
        return sorted(read_rank_metrics(self.folder.attempt(arm, attempt).metrics(rank)).steps)

    def metrics(self, arm: str, attempt: int, step: int, rank: int = 0) -> dict[str, str]:
        """Bits of a step's loss and gradient norm."""
        record = read_rank_metrics(self.folder.attempt(arm, attempt).metrics(rank)).steps[step]
        found = record.contents.metrics
        return {name: found[name]["bits"] for name in ("loss", "grad_norm")}

    def explain(self) -> str:
        lines = []
        for path in sorted(self.folder.path.glob("arms/*/attempt-*")):
            lines.append(
                f"{path}: {(path / 'job.json').read_text() if (path / 'job.json').exists() else 'no job.json'}"
            )
            lines += [log.read_text(errors="replace")[-2000:] for log in sorted(path.glob("log/*.log"))]
        return "\n".join(lines)


def run_resume(
    path: Path,
    cluster: Cluster,
    overrides: Sequence[str] = (),
    options: ResumeOptions | None = None,
    pace: Pace | None = None,
) -> Arms:
    """Runs a resume check of the recipe at `path` and waits until no arm can change any more."""
    archive = Archive(path.parent / ".detrun")
    loaded = load_recipe(path, overrides)
    folder = start_resume(loaded, archive, cluster, options or ResumeOptions(fresh=True), ["detrun"], lambda _: None)
    seen: list[list[ArmView]] = []
    pace = pace or Pace(look=0.2, poll=0.5, at_rest=2.0, grace=2.0, lost=60.0)
    Follower(cluster, folder, pace).follow(lambda views: seen.append(list(views)))
    return Arms(folder, seen)
