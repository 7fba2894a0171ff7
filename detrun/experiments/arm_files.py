"""Reads what lies around an attempt's records: its job's end, stray files, the recorder's own failures and cost.

What is wrong with any of it becomes a gap or a remark of the arm; nothing here compares.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from detrun.compare.completeness import Asked
from detrun.compare.evidence import ArmEvidence, CostTally
from detrun.compare.streams import Gap
from detrun.errors import RecordError
from detrun.records.environment_reader import RankEnvironment, read_environment, read_recorder_cost
from detrun.records.files import one_line, read_object, read_plain
from detrun.records.jobs import ArmPlan, ExperimentFile, JobFile
from detrun.records.layout import AttemptFolder, ExperimentFolder, rank_files

MAX_FAILURES = 5
MAX_FAILURE_BYTES = 1 << 20

_CONFLICT = re.compile(r"rank([0-9]{5,9})\.conflict")
_HELPER = re.compile(r"rank([0-9]{5,9})\.helper-")


def asked_of(experiment: ExperimentFile) -> Asked:
    """What the experiment's recipe asked the recorder for."""
    rules = experiment.metric_rules
    whole = experiment.recipe.get("steps")
    return Asked(
        steps=experiment.steps,
        ranks=experiment.ranks,
        required=tuple(name for name in rules.required if name not in (*rules.ignore, *rules.absent)),
        state_every=rules.state_every,
        ignore=tuple(rules.ignore),
        absent=tuple(rules.absent),
        names=rules.names,
        required_line=experiment.recipe_lines.get("metrics.required"),
        cut_short=isinstance(whole, int) and whole > experiment.steps,
    )


def read_arm(place: ExperimentFolder, plan: ArmPlan, attempt: AttemptFolder, asked: Asked) -> ArmEvidence:
    """An arm's attempt without its ranks: how its job ended and what is wrong with its files."""
    arm = ArmEvidence(plan.id, plan.role, attempt.number)
    try:
        arm.job = JobFile.read(attempt.job_file)
    except RecordError as error:
        arm.gaps.append(Gap("job-file", f"{_short(error, place)} {error.what}", -1, plan.id))
    else:
        if (arm.job.arm, arm.job.attempt) != (attempt.arm, attempt.number):
            what = f"job.json speaks of arm {one_line(arm.job.arm, 20)}, attempt {arm.job.attempt}"
            arm.gaps.append(Gap("job-file", what, -1, plan.id))
    arm.gaps += _folder_gaps(place, attempt, asked)
    arm.gaps += _failures_of_the_recorder(attempt)
    _note_helpers(attempt, arm)
    return arm


def read_surroundings(
    attempt: AttemptFolder, rank: int, asked: Asked, gaps: list[Gap], arm: str
) -> RankEnvironment | None:
    """A rank's environment file; what is wrong with it is added to `gaps`."""
    try:
        environment = read_environment(attempt.environment(rank), rank)
    except RecordError as error:
        path = f"environment/{attempt.environment(rank).name}"
        gaps.append(Gap("environment-file", f"the environment file {error.what}", rank, arm, path=path))
        return None
    if environment.world_size != asked.ranks:
        what = f"ran with {environment.world_size} ranks, {asked.ranks} were asked for"
        gaps.append(Gap("world-size", what, rank, arm))
    return environment


def read_cost(
    attempt: AttemptFolder, rank: int, remarks: dict[str, list[int]], cost: CostTally, gaps: list[Gap]
) -> None:
    """The recorder's cost is a figure, not evidence: where it cannot be read it is a remark. What a framework's adapter
    did not find is a gap: something that it would have recorded is missing."""
    try:
        read = read_recorder_cost(attempt.recorder(rank))
    except RecordError as error:
        if error.what != "is missing":
            remarks.setdefault(f"its own cost cannot be read: it {error.what}", []).append(rank)
        return
    cost.merge(CostTally(1, dict(read.cpu_seconds), read.process_cpu_seconds))
    for warning in read.warnings:
        remarks.setdefault(warning, []).append(rank)
    for adapter in read.adapters:
        tried = f", tried on {' and '.join(adapter.tried)}" if adapter.tried else ""
        for lack in adapter.lacks:
            what = f"adapter {adapter.name} did not find {lack} (version {adapter.version or 'unknown'}{tried})"
            gaps.append(Gap("adapter", what, rank, attempt.arm, name=adapter.name))


def _folder_gaps(place: ExperimentFolder, attempt: AttemptFolder, asked: Asked) -> list[Gap]:
    """What lies in an attempt's folders beside what was expected."""
    gaps: list[Gap] = []
    for folder in (place.path / "arms", place.arm_dir(attempt.arm), attempt.path):
        gaps += _link_gaps(folder, attempt)
    for folder, extension in ((attempt.metrics_dir, "jsonl"), (attempt.environment_dir, "json")):
        name = folder.name
        gaps += _link_gaps(folder, attempt)
        found = rank_files(folder, extension)
        extra = sorted(rank for rank in found.ranks if rank >= asked.ranks)
        gaps += [
            Gap("extra-rank", f"{name} of a rank beyond the {asked.ranks} asked for", rank, attempt.arm)
            for rank in extra
        ]
        for other in found.others:
            claimed = _CONFLICT.match(other)
            what = f"{name}/{other} is no rank's file"
            if claimed:
                what = f"another process claimed the same rank ({name}/{other})"
            kind, rank = ("conflict", int(claimed[1])) if claimed else ("stray", -1)
            gaps.append(Gap(kind, what, rank, attempt.arm, path=f"{name}/{other}"))
    return gaps


def _failures_of_the_recorder(attempt: AttemptFolder) -> list[Gap]:
    """What the recorder left where it could not even start, so that missing records have a reason."""
    gaps = []
    for path in sorted(attempt.recorder_dir.glob("failed-*.txt"))[:MAX_FAILURES]:
        try:
            lines = read_plain(path, MAX_FAILURE_BYTES).decode("utf-8", "replace").split("\n")
        except RecordError:
            lines = []
        last = next((line for line in reversed(lines) if line.strip()), "it left no word")
        what = f"the recorder could not start in one process: {one_line(last, 200)}"
        gaps.append(Gap("recorder", what, -1, attempt.arm, path=f"recorder/{path.name}"))
    return gaps


def _note_helpers(attempt: AttemptFolder, arm: ArmEvidence) -> None:
    """Processes that a rank started and that trained too: no part of what was asked, but worth a word."""
    for name in rank_files(attempt.recorder(0).parent, "json").others:
        if found := _HELPER.match(name):
            ranks = arm.remarks.setdefault("a process that the rank started trained too and was not recorded", [])
            if int(found[1]) not in ranks:
                ranks.append(int(found[1]))


def _link_gaps(folder: Path, attempt: AttemptFolder) -> list[Gap]:
    if not folder.is_symlink():
        return []
    return [Gap("file", f"{folder.name} is a symbolic link, which no record is", -1, attempt.arm)]


def _short(error: RecordError, place: ExperimentFolder) -> str:
    """The file an error speaks of, from the experiment's folder on."""
    where = error.where or ""
    return where.removeprefix(f"{place.path}/")


def stage_of(environment: RankEnvironment) -> str | None:
    """The rank's pipeline stage, where the program has several."""
    stage = environment.coordinates.get("pp")
    return None if stage is None else str(stage)


def size_of(attempts: Sequence[AttemptFolder], ranks: Sequence[range]) -> int:
    """A guess of the records' bytes from the first rank of each slice."""
    total = 0
    for slice_ in ranks:
        for attempt in attempts:
            try:
                total += attempt.metrics(slice_[0]).lstat().st_size * len(slice_)
            except OSError:
                continue
    return total


def pinned_on_the_node(place: ExperimentFolder, experiment: ExperimentFile) -> dict[str, str]:
    """Values of pinned variables that were settled where the job ran, such as a number of threads."""
    for arm in experiment.arms:
        for attempt in place.attempts(arm.id):
            try:
                env = read_object(attempt.path / "launch.json").get("env")
            except RecordError:
                continue
            if isinstance(env, dict):
                return {name: one_line(str(env[name]), 40) for name in experiment.pinned if name in env}
    return {}
