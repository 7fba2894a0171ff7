"""Reads one experiment's records, has them compared, and writes the verdict: where reading and comparing meet.

Works from the archive alone and can be run again at any time. Ranks are read in slices, in several processes
where there are many, and each slice leaves only a small tally behind: no more than one rank's records of all
arms are in memory at once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from detrun.compare.resume import decide_resume
from detrun.compare.streams import Gap, PairTally, compare_rank
from detrun.errors import ArchiveError
from detrun.experiments.arm_files import (
    asked_of,
    pinned_on_the_node,
    read_arm,
    read_cost,
    read_surroundings,
    size_of,
    stage_of,
)
from detrun.experiments.judge_against import AGAINST, judge_against
from detrun.experiments.judge_resume import gather_resume
from detrun.experiments.judge_sources import (
    gather_by_source,
    gather_resume_by_source,
    second_sources,
    source_of,
)
from detrun.experiments.judge_trace import judge_trace
from detrun.experiments.slices import read_all, slices
from detrun.experiments.surroundings import stamped
from detrun.experiments.write_verdict import write_page, write_verdict
from detrun.records.environment_reader import RankEnvironment
from detrun.records.jobs import ExperimentFile
from detrun.records.layout import AttemptFolder, ExperimentFolder, path_of
from detrun.records.metrics_line import LineReader
from detrun.records.metrics_reader import RankMetrics, read_rank_metrics
from detrun.records.pruned import Pruned, in_words, read_pruned
from detrun.records.verdict import Finding, Verdict


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
    if (pruned := read_pruned(place)) is not None and place.verdict_file.is_file():
        return _as_it_was(place, experiment, pruned, write and report, standalone)
    experiment.pinned.update(pinned_on_the_node(place, experiment))
    recorded = source_of(experiment) == "recorder"
    if experiment.experiment == "resume-check":
        resumed = (
            gather_resume(place, experiment, processes) if recorded else gather_resume_by_source(place, experiment)
        )
        resumed.notes += second_sources(place, experiment)
        verdict = decide_resume(experiment, resumed)
    elif experiment.experiment == AGAINST:
        verdict = judge_against(place, experiment)
    elif experiment.experiment == "trace":
        verdict = judge_trace(place, experiment, gather(place, experiment, processes))
    else:
        evidence = gather(place, experiment, processes) if recorded else gather_by_source(place, experiment)
        evidence.notes += second_sources(place, experiment)
        verdict = decide(experiment, evidence)
    if write:
        return write_verdict(place, experiment, verdict, report=report, standalone=standalone)
    return stamped(place, experiment, verdict)


def _as_it_was(
    place: ExperimentFolder, experiment: ExperimentFile, pruned: Pruned, page: bool, standalone: bool
) -> Verdict:
    """The verdict of before its records were pruned; what is left of them would only look as if some went missing."""
    verdict = Verdict.read(place.verdict_file)
    what = f"{in_words(pruned)}: this is the verdict of before, and is not judged anew"
    where = {"path": "pruned.json"}
    note = Finding(kind="pruned", severity="info", where=where, what=what)
    verdict = verdict.model_copy(update={"findings": [*verdict.findings, note]})
    if page:
        try:
            write_page(place, experiment, verdict, standalone=standalone)
        except ArchiveError as error:
            note = Finding(kind="report", severity="warning", where={"path": "report.html"}, what=str(error))
            verdict = verdict.model_copy(update={"findings": [*verdict.findings, note]})
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


def gather(
    place: ExperimentFolder,
    experiment: ExperimentFile,
    processes: int | None = None,
    homes: Mapping[str, tuple[ExperimentFolder, str]] | None = None,
) -> Evidence:
    """Reads everything about an experiment's arms that a verdict rests on.

    homes: by arm, where its records lie if not here, and what the arm is called there.
    """
    asked = asked_of(experiment)
    arms: list[ArmEvidence] = []
    attempts: list[AttemptFolder] = []
    contexts: list[ArmContext] = []
    templates = templates_of(experiment.recipe)
    for plan in experiment.arms:
        home, name = (homes or {}).get(plan.id, (place, plan.id))
        existing = home.attempts(name)
        attempt = existing[-1] if existing else home.attempt(name, 0)
        arm = read_arm(home, plan, attempt, asked)
        if name != plan.id:
            arm.gaps = [replace(gap, arm=plan.id) for gap in arm.gaps]
        arms.append(arm)
        attempts.append(replace(attempt, arm=plan.id))
        contexts.append(
            ArmContext(
                name,
                path_of(home.id if homes else experiment.id),
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
    parts = slices(asked.ranks)
    tasks = [_Task(ranks, attempts, contexts, asked) for ranks in parts]
    for part in read_all(read_slice, tasks, lambda: size_of(attempts, parts), processes):
        _add(part, arms, pairs)
    return Evidence(asked, arms, pairs)


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
            read_cost(attempt, rank, part.remarks[index], part.costs[index], part.gaps[index])
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
    environment = read_surroundings(attempt, rank, task.asked, part.gaps[index], attempt.arm)
    if environment is not None:
        part.environments[index][rank] = (environment.host, environment.replicas, stage_of(environment))
    return environment


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
        pair.merge(part.streams[index], part.settings[index], part.initial[index])
