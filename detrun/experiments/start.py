"""Starts an experiment: its folder, what the jobs and later readers need, and the jobs themselves. All or nothing."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

import detrun
from detrun.errors import DetrunError, InfrastructureError
from detrun.experiments.plan import Plan
from detrun.experiments.source_checks import keep_patterns
from detrun.launch import wrapper
from detrun.launch.cluster import Cluster, SubmittedJob
from detrun.launch.command import RANK_SCRIPT
from detrun.launch.program import program_digest
from detrun.launch.snapshot import snapshot_code
from detrun.launch.submitted import read_submitted
from detrun.recipe import LoadedRecipe
from detrun.recorder.export import export_recorder
from detrun.records.archive import Archive
from detrun.records.jobs import ExperimentFile, Reference
from detrun.records.layout import ExperimentFolder

GONE_WITHIN = 30.0


@dataclass(frozen=True)
class Question:
    """What an experiment asks beside its recipe. kind: `pair`, `resume-check`, `localize` … reference: an arm of an
    earlier one. steps: the last step that is asked for, where arms are ended before the recipe's last. options: what a
    command that takes it up has to know. labels: what it belongs to, such as a night."""

    kind: str
    reference: Reference | None = None
    interrupts: Sequence[dict[str, Any]] = field(default=())
    steps: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


def start(
    loaded: LoadedRecipe,
    archive: Archive,
    cluster: Cluster,
    question: Question,
    plan_in: Callable[[ExperimentFolder], Plan],
    command_line: Sequence[str],
) -> ExperimentFolder:
    """Submits the jobs that `plan_in` plans for the new folder, and returns that folder.

    Where anything fails on the way, what was submitted is cancelled and the folder is removed: nothing
    half-made is left behind.
    """
    folder = archive.create(loaded.recipe.name, question.kind)
    start_in(folder, loaded, cluster, question, plan_in, command_line)
    return folder


def start_in(
    folder: ExperimentFolder,
    loaded: LoadedRecipe,
    cluster: Cluster,
    question: Question,
    plan_in: Callable[[ExperimentFolder], Plan],
    command_line: Sequence[str],
) -> None:
    """The same in a folder that is there and empty; it is removed where anything fails."""
    submitted: list[SubmittedJob] = []
    try:
        plan = plan_in(folder)
        write_experiment(loaded, folder, plan, cluster.name, question, command_line)
        for request in plan.requests:
            after = submitted[-1].id if request.after else None
            submitted.append(cluster.submit(replace(request, after=after)))
    except BaseException as error:
        _take_back(folder, cluster)
        if isinstance(error, OSError):
            raise InfrastructureError(
                f"the experiment could not be set up: {error.strerror or error}",
                where=str(error.filename or folder.path.parent),
            ) from None
        raise


def _take_back(folder: ExperimentFolder, cluster: Cluster) -> None:
    """Cancels what was submitted and removes the folder.

    It stays where a job cannot be cancelled: whatever runs on writes there, and `detrun cancel` has to find it.
    """
    jobs = [job for path in folder.jobs_dir.glob("*") if (job := read_submitted(path))]
    if jobs:
        try:
            cluster.cancel(jobs)
        except DetrunError as error:
            raise InfrastructureError(
                f"the experiment could not be started, and of what was submitted {error.what}",
                where=str(folder),
                hint=f"detrun cancel {folder.id}",
            ) from None
        # A driver that is still on its way out would make its folder anew.
        deadline = time.monotonic() + GONE_WITHIN
        while time.monotonic() < deadline and any(status.alive for status in cluster.poll(jobs).values()):
            time.sleep(0.5)
    shutil.rmtree(folder.path, ignore_errors=True)


def write_experiment(
    loaded: LoadedRecipe,
    folder: ExperimentFolder,
    plan: Plan,
    cluster: str,
    question: Question,
    command_line: Sequence[str],
) -> None:
    """Writes what the jobs and later readers need, experiment.json first."""
    recipe = loaded.recipe
    program = program_digest(plan.requests[0].spec.segments[0].argv, loaded.workdir)
    ExperimentFile(
        id=folder.id,
        experiment=question.kind,
        created=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        recipe=recipe.model_dump(mode="json"),
        recipe_path=str(loaded.path.absolute()),
        recipe_lines=dict(loaded.lines),
        command_line=list(command_line),
        cluster=cluster,
        placement=recipe.placement,
        arms=list(plan.arms),
        ranks=recipe.total_ranks,
        steps=question.steps or recipe.steps,
        seed=recipe.seed,
        pinned=plan.pinned,
        determinism=recipe.determinism,
        versions={"detrun": detrun.__version__, "python": sys.version.split()[0]},
        code=snapshot_code(loaded.workdir, folder.code_dir).model_copy(update={"program": program}),
        reference=question.reference,
        interrupts=list(question.interrupts),
        options=dict(question.options),
        labels=dict(question.labels),
    ).write(folder.experiment_file)
    (folder.path / "recipe.yaml").write_text(loaded.text, encoding="utf-8")
    keep_patterns(loaded, folder)
    folder.jobs_dir.mkdir(exist_ok=True)
    shutil.copyfile(str(wrapper.__file__), folder.jobs_dir / "wrapper.py")
    script = folder.jobs_dir / "rank.sh"
    script.write_text(RANK_SCRIPT, encoding="utf-8")
    script.chmod(0o755)
    export_recorder(folder.recorder_dir)
    launched = {segment.arm for request in plan.requests for segment in request.spec.segments}
    for arm in sorted(launched):
        folder.work_dir(arm).mkdir(parents=True, exist_ok=True)
