"""Reads one experiment's records, has them compared, and writes the verdict: where reading and comparing meet.

Works from the archive alone and can be run again at any time. Ranks are read in slices, in several processes
where there are many, and each slice leaves only a small tally behind: no more than one rank's records of all
arms are in memory at once.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from detrun.compare.completeness import Asked, RankSurvey, survey_rank
from detrun.compare.decision import decide
from detrun.compare.environment import (
    ArmContext,
    EnvironmentTally,
    InitialDifference,
    compare_environments,
    compare_initial,
    templates_of,
)
from detrun.compare.evidence import ArmEvidence, CostTally, Evidence, PairEvidence
from detrun.compare.streams import Gap, PairTally, compare_rank
from detrun.errors import ArchiveError, RecordError
from detrun.records.environment_reader import RankEnvironment, read_environment, read_recorder_cost
from detrun.records.files import one_line, read_object, read_plain
from detrun.records.jobs import ExperimentFile, JobFile
from detrun.records.layout import AttemptFolder, ExperimentFolder, rank_files
from detrun.records.metrics_line import LineReader
from detrun.records.metrics_reader import RankMetrics, read_rank_metrics
from detrun.records.verdict import Finding, Verdict

PARALLEL_FROM_BYTES = 64 << 20
"""Less than this is compared sooner than a process is started."""

MAX_FAILURES = 5
MAX_FAILURE_BYTES = 1 << 20

SLICE = 16
"""Ranks a task of the process pool."""

_CONFLICT = re.compile(r"rank([0-9]{5,9})\.conflict")
_HELPER = re.compile(r"rank([0-9]{5,9})\.helper-")


def judge(
    folder: str | os.PathLike[str],
    *,
    processes: int | None = None,
    write: bool = True,
    report: bool = True,
    standalone: bool = False,
) -> Verdict:
    """The verdict on an experiment's folder; with `write`, verdict.json is written by rename, last of all.

    processes: how many read at most; default: one a CPU this process may use. standalone: report.html carries its
    script. Raises RecordError where
    experiment.json cannot be read (without it nothing says what was asked), ArchiveError where the verdict
    cannot be written. Whatever is wrong with the arms' records is in the verdict instead.
    """
    place = ExperimentFolder(Path(folder))
    experiment = ExperimentFile.read(place.experiment_file)
    experiment.pinned.update(_pinned_on_the_node(place, experiment))
    evidence = gather(place, experiment, processes)
    verdict = decide(experiment, evidence)
    if write:
        if report:
            verdict = _with_report(place, experiment, verdict, standalone)
        verdict.write(place.verdict_file)
    return verdict


def _pinned_on_the_node(place: ExperimentFolder, experiment: ExperimentFile) -> dict[str, str]:
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


def _with_report(place: ExperimentFolder, experiment: ExperimentFile, verdict: Verdict, standalone: bool) -> Verdict:
    """Writes report.html. A report that cannot be written must not cost the verdict."""
    from detrun.report.html import write_report

    try:
        write_report(place.report_file, verdict, experiment, standalone=standalone)
    except ArchiveError as error:
        note = Finding(kind="report", severity="warning", where={"path": "report.html"}, what=str(error))
        return verdict.model_copy(update={"findings": [*verdict.findings, note]})
    return verdict


@dataclass(slots=True)
class _Task:
    """What a slice needs to know; small, as it travels to another process."""

    ranks: Sequence[int]
    attempts: Sequence[AttemptFolder]
    contexts: Sequence[ArmContext]
    asked: Asked


@dataclass(slots=True)
class _Slice:
    """What a slice of ranks leaves behind, by arm and by pair in the experiment's order."""

    surveys: list[list[RankSurvey]]
    gaps: list[list[Gap]]
    remarks: list[dict[str, list[int]]]
    costs: list[CostTally]
    environments: list[dict[int, tuple[str | None, tuple[int, ...] | None, str | None]]]
    streams: list[PairTally]
    settings: list[EnvironmentTally]
    initial: list[dict[str, InitialDifference]] = field(default_factory=list)


def gather(place: ExperimentFolder, experiment: ExperimentFile, processes: int | None = None) -> Evidence:
    """Reads everything about an experiment's arms that a verdict rests on."""
    rules = experiment.metric_rules
    asked = Asked(
        steps=experiment.steps,
        ranks=experiment.ranks,
        required=tuple(name for name in rules.required if name not in (*rules.ignore, *rules.absent)),
        state_every=rules.state_every,
        ignore=tuple(rules.ignore),
        absent=tuple(rules.absent),
        names=rules.names,
        required_line=experiment.recipe_lines.get("metrics.required"),
    )
    arms: list[ArmEvidence] = []
    attempts: list[AttemptFolder] = []
    contexts: list[ArmContext] = []
    templates = templates_of(experiment.recipe)
    for plan in experiment.arms:
        existing = place.attempts(plan.id)
        attempt = existing[-1] if existing else place.attempt(plan.id, 0)
        arm = ArmEvidence(plan.id, plan.role, attempt.number)
        try:
            arm.job = JobFile.read(attempt.job_file)
        except RecordError as error:
            arm.gaps.append(Gap("job-file", f"{_short(error, place)} {error.what}", -1, plan.id))
        else:
            if (arm.job.arm, arm.job.attempt) != (plan.id, attempt.number):
                what = f"job.json speaks of arm {one_line(arm.job.arm, 20)}, attempt {arm.job.attempt}"
                arm.gaps.append(Gap("job-file", what, -1, plan.id))
        arm.gaps += _folder_gaps(place, attempt, asked)
        arm.gaps += _failures_of_the_recorder(attempt)
        _note_helpers(attempt, arm)
        arms.append(arm)
        attempts.append(attempt)
        contexts.append(
            ArmContext(
                plan.id,
                experiment.id,
                attempt.number,
                tuple(arm.job.jobs) if arm.job else (),
                tuple(plan.declared.args),
                plan.declared.env,
                templates,
            )
        )
    pairs = [
        PairEvidence(PairTally(arms[0].id, other.id), EnvironmentTally(arms[0].id, other.id)) for other in arms[1:]
    ]
    tasks = [
        _Task(range(start, min(start + SLICE, asked.ranks)), attempts, contexts, asked)
        for start in range(0, asked.ranks, SLICE)
    ]
    for part in _run(tasks, processes):
        _add(part, arms, pairs)
    return Evidence(asked, arms, pairs)


def _run(tasks: Sequence[_Task], processes: int | None) -> list[_Slice]:
    workers = min(processes or len(os.sched_getaffinity(0)), len(tasks))
    if workers < 2 or _size(tasks) < PARALLEL_FROM_BYTES:
        return [read_slice(task) for task in tasks]
    # spawn: a caller with threads (a live display) must not be forked.
    try:
        with ProcessPoolExecutor(workers, get_context("spawn"), _leave_interrupts_to_the_caller) as pool:
            return list(pool.map(read_slice, tasks))
    except (BrokenProcessPool, OSError):
        # No room for another process, or one was killed for its memory: slower, but the answer is the same.
        return [read_slice(task) for task in tasks]


def _leave_interrupts_to_the_caller() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _size(tasks: Sequence[_Task]) -> int:
    """A guess of the records' bytes from the first rank of each slice."""
    total = 0
    for task in tasks:
        for attempt in task.attempts:
            try:
                total += attempt.metrics(task.ranks[0]).lstat().st_size * len(task.ranks)
            except OSError:
                continue
    return total


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


def read_slice(task: _Task) -> _Slice:
    """Reads and compares some ranks of all arms. The first arm's are read first, the others' held against them."""
    arms = range(len(task.attempts))
    names = [attempt.arm for attempt in task.attempts]
    part = _Slice(
        surveys=[[] for _ in arms],
        gaps=[[] for _ in arms],
        remarks=[{} for _ in arms],
        costs=[CostTally() for _ in arms],
        environments=[{} for _ in arms],
        streams=[PairTally(names[0], name) for name in names[1:]],
        settings=[EnvironmentTally(names[0], name) for name in names[1:]],
        initial=[{} for _ in names[1:]],
    )
    reader = LineReader()
    for rank in task.ranks:
        reference: RankMetrics | None = None
        surroundings: RankEnvironment | None = None
        for index in arms:
            attempt = task.attempts[index]
            records = read_rank_metrics(attempt.metrics(rank), reference, reader)
            if records is reference:
                part.surveys[index].append(part.surveys[0][-1].of_arm(attempt.arm))
            else:
                part.surveys[index].append(survey_rank(attempt.arm, rank, records, task.asked))
            environment = _environment(task, part, index, rank)
            _cost(attempt, part, index, rank)
            if reference is None:
                reference, surroundings = records, environment
                continue
            pair = index - 1
            compare_rank(part.streams[pair], rank, reference, records, task.asked.ignore)
            if surroundings and environment:
                contexts = task.contexts[0], task.contexts[index]
                compare_environments(part.settings[pair], rank, surroundings, environment, *contexts)
                compare_initial(part.initial[pair], rank, surroundings, environment)
    return part


def _environment(task: _Task, part: _Slice, index: int, rank: int) -> RankEnvironment | None:
    attempt = task.attempts[index]
    try:
        environment = read_environment(attempt.environment(rank), rank)
    except RecordError as error:
        path = f"environment/{attempt.environment(rank).name}"
        gap = Gap("environment-file", f"the environment file {error.what}", rank, attempt.arm, path=path)
        part.gaps[index].append(gap)
        return None
    if environment.world_size != task.asked.ranks:
        what = f"ran with {environment.world_size} ranks, {task.asked.ranks} were asked for"
        part.gaps[index].append(Gap("world-size", what, rank, attempt.arm))
    stage = environment.coordinates.get("pp")
    part.environments[index][rank] = (
        environment.host,
        environment.replicas,
        None if stage is None else str(stage),
    )
    return environment


def _cost(attempt: AttemptFolder, part: _Slice, index: int, rank: int) -> None:
    """The recorder's cost is a figure, not evidence: where it cannot be read it is a remark."""
    try:
        cost = read_recorder_cost(attempt.recorder(rank))
    except RecordError as error:
        if error.what != "is missing":
            part.remarks[index].setdefault(f"its own cost cannot be read: it {error.what}", []).append(rank)
        return
    part.costs[index].merge(CostTally(1, dict(cost.cpu_seconds), cost.process_cpu_seconds))
    for warning in cost.warnings:
        part.remarks[index].setdefault(warning, []).append(rank)


def _add(part: _Slice, arms: Sequence[ArmEvidence], pairs: Sequence[PairEvidence]) -> None:
    for index, arm in enumerate(arms):
        arm.surveys += part.surveys[index]
        arm.gaps += part.gaps[index]
        for text, ranks in part.remarks[index].items():
            arm.remarks.setdefault(text, []).extend(ranks)
        arm.cost.merge(part.costs[index])
        for rank, (host, replicas, stage) in part.environments[index].items():
            arm.replicas[rank] = replicas
            if host:
                arm.hosts[rank] = host
            if stage is not None:
                arm.stages[rank] = stage
    for index, pair in enumerate(pairs):
        pair.streams.merge(part.streams[index])
        pair.environment.merge(part.settings[index])
        for name, difference in part.initial[index].items():
            if name in pair.initial:
                pair.initial[name].ranks.extend(difference.ranks)
            else:
                pair.initial[name] = difference
