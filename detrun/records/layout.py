"""Where each file of an experiment lies: the one place that knows the folder's shape.

    <archive>/<id>/
        .detrun-experiment      marks the folder as ours
        experiment.json         what was asked
        recorder/ code/ jobs/   what the arms run with
        arms/<arm>/work/        the arm's own output folder
        arms/<arm>/attempt-<n>/ job.json marker/ environment/ metrics/ recorder/ progress/ log/
                                saves/ state/<boundary>/ interrupt/ sabotage/ trace/ kept/
        passes/<n>-<name>/      an experiment that this one ran: a folder like this one
        verdict.json report.html

Names only: nothing here reads or writes, except for listing which attempts and rank files exist.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

MARKER = ".detrun-experiment"

_ATTEMPT = re.compile(r"attempt-(0|[1-9][0-9]{0,5})")
_WITHIN = "@"  # in no experiment's own name
_PASS = re.compile(r"([1-9][0-9]{0,5})-([a-z0-9][a-z0-9-]{0,60})")
_RANK_FILE = re.compile(r"rank([0-9]{5,})\.([a-z]+)")


def rank_name(rank: int, extension: str) -> str:
    """`rank00003.jsonl`: the name of one rank's file."""
    return f"rank{rank:05d}.{extension}"


@dataclass(frozen=True)
class AttemptFolder:
    """One start of an arm."""

    path: Path
    arm: str
    number: int

    @property
    def job_file(self) -> Path:
        return self.path / "job.json"

    @property
    def marker_dir(self) -> Path:
        return self.path / "marker"

    @property
    def metrics_dir(self) -> Path:
        return self.path / "metrics"

    @property
    def environment_dir(self) -> Path:
        return self.path / "environment"

    @property
    def recorder_dir(self) -> Path:
        return self.path / "recorder"

    @property
    def progress_dir(self) -> Path:
        return self.path / "progress"

    @property
    def written(self) -> Path:
        """Which sources of metrics the program writes itself, and what of them was there before."""
        return self.path / "written.json"

    @property
    def source_progress(self) -> Path:
        """How far it is by these."""
        return self.path / "progress" / "source"

    @property
    def log_dir(self) -> Path:
        return self.path / "log"

    @property
    def saves_dir(self) -> Path:
        return self.path / "saves"

    @property
    def interrupt_dir(self) -> Path:
        return self.path / "interrupt"

    @property
    def state_dir(self) -> Path:
        return self.path / "state"

    @property
    def sabotage_dir(self) -> Path:
        return self.path / "sabotage"

    @property
    def trace_dir(self) -> Path:
        return self.path / "trace"

    @property
    def kept_dir(self) -> Path:
        return self.path / "kept"

    def marker(self, task: int) -> Path:
        return self.marker_dir / f"task{task:05d}.json"

    def metrics(self, rank: int) -> Path:
        return self.metrics_dir / rank_name(rank, "jsonl")

    def environment(self, rank: int) -> Path:
        return self.environment_dir / rank_name(rank, "json")

    def recorder(self, rank: int) -> Path:
        return self.recorder_dir / rank_name(rank, "json")

    def progress(self, rank: int) -> Path:
        return self.progress_dir / f"rank{rank:05d}"

    def log(self, rank: int) -> Path:
        return self.log_dir / rank_name(rank, "log")

    def saves(self, rank: int) -> Path:
        return self.saves_dir / rank_name(rank, "jsonl")

    def interrupt(self, rank: int) -> Path:
        return self.interrupt_dir / rank_name(rank, "json")

    def sabotage(self, rank: int) -> Path:
        return self.sabotage_dir / rank_name(rank, "json")

    def state(self, boundary: str, rank: int) -> Path:
        """The rows of a boundary (`end-00000010`)."""
        return self.state_dir / boundary / rank_name(rank, "arrow")

    def state_bytes(self, boundary: str, rank: int) -> Path:
        """The bytes that were kept of them."""
        return self.state_dir / boundary / rank_name(rank, "bytes")

    def trace(self, rank: int) -> Path:
        """The events of a rank."""
        return self.trace_dir / rank_name(rank, "arrow")

    def trace_index(self, rank: int) -> Path:
        """What steps the events cover."""
        return self.trace_dir / rank_name(rank, "jsonl")

    def kept(self, rank: int) -> Path:
        """The events whose tensors were kept."""
        return self.kept_dir / rank_name(rank, "jsonl")

    def kept_bytes(self, rank: int) -> Path:
        """The bytes of these tensors."""
        return self.kept_dir / rank_name(rank, "bytes")


@dataclass(frozen=True)
class ExperimentFolder:
    """One experiment in an archive; usable wherever a path is. within: the id of the experiment that runs it."""

    path: Path
    within: str | None = None

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def id(self) -> str:
        # Jobs are told apart by it, so that a pass needs more than its own name.
        return f"{self.within}{_WITHIN}{self.path.name}" if self.within else self.path.name

    @property
    def experiment_file(self) -> Path:
        return self.path / "experiment.json"

    @property
    def verdict_file(self) -> Path:
        return self.path / "verdict.json"

    @property
    def report_file(self) -> Path:
        return self.path / "report.html"

    @property
    def recorder_dir(self) -> Path:
        return self.path / "recorder"

    @property
    def patterns_dir(self) -> Path:
        """Copies of the recipe's own patterns of log lines."""
        return self.path / "patterns"

    @property
    def code_dir(self) -> Path:
        return self.path / "code"

    @property
    def jobs_dir(self) -> Path:
        return self.path / "jobs"

    @property
    def passes_dir(self) -> Path:
        return self.path / "passes"

    def pass_folder(self, number: int, name: str) -> ExperimentFolder:
        return ExperimentFolder(self.passes_dir / f"{number}-{name}", within=self.id)

    def passes(self) -> dict[str, ExperimentFolder]:
        """The experiments that this one ran, by name, in their order."""
        try:
            names = os.listdir(self.passes_dir)  # noqa: PTH208
        except OSError:
            return {}
        found = sorted((int(match[1]), match[2]) for name in names if (match := _PASS.fullmatch(name)))
        return {name: self.pass_folder(number, name) for number, name in found}

    def arm_dir(self, arm: str) -> Path:
        return self.path / "arms" / arm

    def work_dir(self, arm: str) -> Path:
        return self.arm_dir(arm) / "work"

    def attempt(self, arm: str, number: int) -> AttemptFolder:
        return AttemptFolder(self.arm_dir(arm) / f"attempt-{number}", arm, number)

    def attempts(self, arm: str) -> list[AttemptFolder]:
        """The attempts of an arm that have a folder, in order."""
        return attempts_in(self.arm_dir(arm))


def path_of(id: str) -> str:
    """Where an experiment of that id lies below its archive."""
    return id.replace(_WITHIN, "/passes/")


def attempts_in(arm: Path) -> list[AttemptFolder]:
    """The attempts in an arm's folder, in order, wherever that folder lies."""
    try:
        names = os.listdir(arm)  # noqa: PTH208  (names only; no stat each)
    except OSError:
        return []
    numbers = sorted(int(match[1]) for name in names if (match := _ATTEMPT.fullmatch(name)))
    return [AttemptFolder(arm / f"attempt-{number}", arm.name, number) for number in numbers]


@dataclass(frozen=True)
class RankFiles:
    """What lies in a folder that should hold one file a rank: the ranks, and whatever else."""

    ranks: frozenset[int]
    others: tuple[str, ...]


def rank_files(folder: Path, extension: str) -> RankFiles:
    """The ranks that have a file in `folder`, whatever kind it is, and the names that are nobody's."""
    try:
        names = sorted(os.listdir(folder))  # noqa: PTH208
    except OSError:
        return RankFiles(frozenset(), ())
    ranks: set[int] = set()
    others: list[str] = []
    for name in names:
        match = _RANK_FILE.fullmatch(name)
        if match and match[2] == extension and name == rank_name(int(match[1]), extension):
            ranks.add(int(match[1]))
        elif not name.startswith("."):
            others.append(name)
    return RankFiles(frozenset(ranks), tuple(others))
