"""Reads what runs without a recorder wrote of their metrics themselves, and holds second sources against first ones.

What is handed on is the same evidence as that of recorded runs, so that one place decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from detrun.compare.attempts import Position
from detrun.compare.completeness import Asked
from detrun.compare.environment import EnvironmentTally
from detrun.compare.evidence import ArmEvidence, Evidence, PairEvidence
from detrun.compare.resume_evidence import AttemptEvidence, Boundary, ResumeEvidence
from detrun.compare.source_findings import claim_findings, held_findings, never_compared, resolutions
from detrun.compare.sources import (
    Agreement,
    Agreements,
    SourceAsked,
    compare_streams,
    hold_against,
    survey_stream,
)
from detrun.compare.streams import Gap, PairTally
from detrun.errors import RecordError
from detrun.experiments.arm_files import asked_of, read_arm
from detrun.experiments.checkpoint_evidence import audit_checkpoints
from detrun.experiments.judge_resume import reference_folder
from detrun.experiments.source_files import AttemptStreams, read_written
from detrun.fingerprint import scalar
from detrun.records.jobs import ExperimentFile, JobFile
from detrun.records.layout import AttemptFolder, ExperimentFolder
from detrun.records.metrics_line import LineReader
from detrun.records.metrics_reader import read_rank_metrics
from detrun.records.sources import Stream
from detrun.records.sources.number import Number
from detrun.records.verdict import Finding

MAX_RANKS = 32
"""Ranks whose records a second source is held against; of more, the first and the last half of so many."""


def source_of(experiment: ExperimentFile) -> str:
    """Where an experiment's metrics come from."""
    metrics = experiment.recipe.get("metrics")
    source = metrics.get("source") if isinstance(metrics, dict) else None
    return source if isinstance(source, str) else "recorder"


def gather_by_source(place: ExperimentFolder, experiment: ExperimentFile) -> Evidence:
    """Everything that a verdict on arms without a recorder rests on."""
    asked = asked_of(experiment)
    arms: list[ArmEvidence] = []
    read: list[AttemptStreams | None] = []
    for plan in experiment.arms:
        attempts = place.attempts(plan.id) or [place.attempt(plan.id, 0)]
        arm = read_arm(place, plan, attempts[-1], asked)
        read.append(_streams(place, experiment, asked, attempts, len(attempts) - 1, 1, arm))
        arms.append(arm)
    ranks = _ranks(read)
    required = _required(read, ranks)
    for arm, mine in zip(arms, read, strict=True):
        _survey(arm, mine, ranks, required, 1)
    pairs = []
    agreements: Agreements = {}
    for arm, mine in zip(arms[1:], read[1:], strict=True):
        tally = PairTally(arms[0].id, arm.id)
        if read[0] is not None and mine is not None:
            for rank in ranks:
                compare_streams(tally, rank, _stream(read[0], rank), _stream(mine, rank), mine.asked, agreements)
        pairs.append(PairEvidence(tally, EnvironmentTally(arms[0].id, arm.id)))
    evidence = Evidence(_of_source(asked, len(ranks)), arms, pairs, source=source_of(experiment))
    evidence.resolution = resolutions(agreements)
    first = next((each for each in read if each is not None), None)
    if first is not None:
        evidence.notes += _claims(experiment, asked, first.asked, agreements, read)
    return evidence


def gather_resume_by_source(place: ExperimentFolder, experiment: ExperimentFile) -> ResumeEvidence:
    """The same of a resume check: each attempt's readings are its own, whichever file they share."""
    asked = asked_of(experiment)
    first = next((plan for plan in experiment.arms if plan.role == "reference"), None)
    if first is None:
        raise RecordError("names no reference among its arms", where=str(place.experiment_file))
    home, name = reference_folder(place, experiment, first)
    reference = read_arm(home, first.model_copy(update={"id": name}), home.attempt(name, 0), asked)
    reference.id = first.id
    mine = _streams(home, experiment, asked, home.attempts(name)[:1] or [home.attempt(name, 0)], 0, 1, reference)
    found: list[AttemptEvidence] = []
    read: list[AttemptStreams | None] = []
    plans = [plan for plan in experiment.arms if plan.role == "interrupted"]
    for plan in plans:
        attempts = place.attempts(plan.id)
        for index, folder in enumerate(attempts):
            arm = read_arm(place, plan, folder, asked)
            told = _told(arm.job)
            found.append(_attempt(arm, reference, told))
            read.append(_streams(place, experiment, asked, attempts, index, told.step + 1, arm))
    ranks = _ranks([mine, *read])
    required = _required([mine, *read], ranks)
    _survey(reference, mine, ranks, required, 1)
    agreements: Agreements = {}
    for attempt, theirs in zip(found, read, strict=True):
        _judge_attempt(attempt, mine, theirs, ranks, required, agreements)
    evidence = ResumeEvidence(
        _of_source(asked, len(ranks)),
        reference,
        found,
        (),
        audit_checkpoints(place, experiment, plans[0].id) if plans else [],
        source=source_of(experiment),
        resolution=resolutions(agreements),
    )
    if mine is not None:
        evidence.notes += _claims(experiment, asked, mine.asked, agreements, [mine, *read])
        if len(found) > 1:
            compared = {step for attempt in found for step in attempt.pair.streams.compared}
            compared |= {step for agreement in agreements.values() for step in agreement.apart}
            evidence.notes += never_compared(mine.asked.due(1, asked.steps), compared, found[0].arm.id)
    return evidence


def second_sources(place: ExperimentFolder, experiment: ExperimentFile) -> list[Finding]:
    """Every attempt's second sources (`metrics.also`), held against its first."""
    metrics = experiment.recipe.get("metrics")
    also = metrics.get("also") if isinstance(metrics, dict) else None
    if not also:
        return []
    asked, main = asked_of(experiment), source_of(experiment)
    offset = 0 if main == "recorder" else 1
    findings: list[Finding] = []
    for plan in experiment.arms:
        if plan.role == "control" or (experiment.reference is not None and plan.role == "reference"):
            continue  # the one breaks on purpose, the other was judged where it ran
        attempts = place.attempts(plan.id)
        for index, attempt in enumerate(attempts):
            job = _job(attempt)
            if job is not None and job.state == "cancelled":
                continue
            begins = _told(job).step + 1
            values = _values(place, experiment, asked, attempts, index, begins)
            for number in range(len(also)):
                findings += _second(place, experiment, asked, attempts, index, offset + number, begins, values)
    return findings


def _second(
    place: ExperimentFolder,
    experiment: ExperimentFile,
    asked: Asked,
    attempts: Sequence[AttemptFolder],
    index: int,
    source: int,
    begins: int,
    values: dict[str, dict[int, dict[int, list[Number]]]],
) -> list[Finding]:
    attempt, main = attempts[index], source_of(experiment)
    where: dict[str, Any] = {"arm": attempt.arm, "attempt": attempt.number}
    try:
        mine = read_written(place, experiment, asked, attempts, index, source, begins)
    except (RecordError, OSError) as error:
        what = f"arm {attempt.arm}: its second source cannot be read: {getattr(error, 'what', error)}"
        return [Finding(kind="sources-apart", severity="not-verified", where=where, what=what)]
    job = _job(attempt)
    cut_short = job is not None and job.state != "done"
    findings, whole = [], None
    for stream in mine.streams.values():
        held = hold_against(values, stream, mine.asked, recorder=main == "recorder")
        if whole is None:
            whole = held
        else:
            whole.contradictions += held.contradictions
            for name, agreement in held.agreements.items():
                whole.agreements.setdefault(name, Agreement()).merge(agreement)
        for problem in stream.problems:
            if cut_short and problem.kind == "torn":
                continue
            what = f"arm {attempt.arm}: {problem.file} {problem.what}"
            findings.append(Finding(kind="source-problem", severity="not-verified", where=where, what=what))
    if whole is None:
        whole = hold_against(values, Stream(), mine.asked)
    if cut_short and not whole.contradictions and not any(each.steps for each in whole.agreements.values()):
        return findings  # it may not have come as far as a flush
    return [*findings, *held_findings(whole, mine.asked, main_words(main), attempt.arm, attempt.number)]


def main_words(source: str) -> str:
    """The first source in a sentence."""
    return "the recorder" if source == "recorder" else source


def _values(
    place: ExperimentFolder,
    experiment: ExperimentFile,
    asked: Asked,
    attempts: Sequence[AttemptFolder],
    index: int,
    begins: int,
) -> dict[str, dict[int, dict[int, list[Number]]]]:
    """What the first source of an attempt has: by metric, step and rank."""
    found: dict[str, dict[int, dict[int, list[Number]]]] = {}
    if source_of(experiment) != "recorder":
        try:
            mine = read_written(place, experiment, asked, attempts, index, 0, begins)
        except (RecordError, OSError):
            return found
        for rank, stream in mine.streams.items():
            for metric in mine.asked.compared:
                _, series = mine.asked.series(stream, metric) or ("", {})
                for step, reading in series.items():
                    if reading.number is not None and not reading.is_mean and not reading.partial:
                        found.setdefault(metric, {}).setdefault(step, {}).setdefault(rank, []).append(reading.number)
        return found
    reader = LineReader()
    ranks = range(asked.ranks)
    for rank in ranks if asked.ranks <= MAX_RANKS else [*ranks[: MAX_RANKS // 2], *ranks[-MAX_RANKS // 2 :]]:
        for step, record in read_rank_metrics(attempts[index].metrics(rank), None, reader).steps.items():
            # The better source's word has the plain name and stands first; others' are `loss (backward)`.
            for key, held in sorted(record.contents.metrics.items(), key=lambda item: len(item[0])):
                number = Number(scalar.parse_bits(held["bits"], held["dtype"]), held["dtype"], "exact")
                found.setdefault(key.partition(" (")[0], {}).setdefault(step, {}).setdefault(rank, []).append(number)
    for ours, theirs in asked.names.items():
        if ours not in found and theirs in found:
            found[ours] = found[theirs]
    return found


def _streams(
    place: ExperimentFolder,
    experiment: ExperimentFile,
    asked: Asked,
    attempts: Sequence[AttemptFolder],
    index: int,
    begins: int,
    arm: ArmEvidence,
) -> AttemptStreams | None:
    try:
        return read_written(place, experiment, asked, attempts, index, 0, begins)
    except (RecordError, OSError) as error:
        what = f"what it wrote of its metrics cannot be read: {getattr(error, 'what', error)}"
        arm.gaps.append(Gap("source", what, -1, arm.id))
        return None


def _ranks(read: Sequence[AttemptStreams | None]) -> list[int]:
    """Ranks with a stream that holds a metric anywhere; at least one, so that nothing is missing in silence."""
    held = {rank for each in read if each for rank, stream in each.streams.items() if stream.series}
    return sorted(held) or [0]


def _required(read: Sequence[AttemptStreams | None], ranks: Sequence[int]) -> dict[int, tuple[str, ...]]:
    """Which required metrics each rank's stream has to have: those that it has in any run, and the first one those that
    nobody has."""
    wants = next((each.asked for each in read if each), None)
    if wants is None:
        return {}
    holders = {
        metric: [rank for rank in ranks if any(each and wants.series(_stream(each, rank), metric) for each in read)]
        for metric in wants.required
    }
    return {
        rank: tuple(m for m, on in holders.items() if rank in on or (not on and rank == ranks[0])) for rank in ranks
    }


def _stream(read: AttemptStreams, rank: int) -> Stream:
    return read.streams.get(rank, Stream())


def _survey(
    arm: ArmEvidence,
    read: AttemptStreams | None,
    ranks: Sequence[int],
    required: dict[int, tuple[str, ...]],
    first: int,
    cut_short: bool = False,
) -> None:
    if read is None:
        return
    for rank in ranks:
        wants = replace(read.asked, required=required.get(rank, ()))
        arm.surveys.append(survey_stream(arm.id, rank, _stream(read, rank), wants, first, cut_short=cut_short))


def _judge_attempt(
    attempt: AttemptEvidence,
    reference: AttemptStreams | None,
    read: AttemptStreams | None,
    ranks: Sequence[int],
    required: dict[int, tuple[str, ...]],
    agreements: Agreements,
) -> None:
    arm, told = attempt.arm, attempt.told or Position(0)
    cut_short = arm.job is not None and arm.job.state != "done"
    if read is None:
        return
    for name in read.rewritten:
        what = f"{name} was written anew by another attempt, so that nobody can tell whose its readings are"
        arm.gaps.append(Gap("rewritten", what, -1, arm.id, path=name))
    first = min((stream.first for stream in read.streams.values() if stream.series), default=0)
    if arm.attempt and first and first <= told.step:
        what = f"its readings begin at step {first}, and it was to go on from {told.words}"
        arm.gaps.append(Gap("first-step", what, -1, arm.id, first))
    _survey(arm, read, ranks, required, told.step + 1, cut_short)
    if reference is None:
        return
    for rank in ranks:
        mine, theirs = _stream(reference, rank), _stream(read, rank)
        compare_streams(attempt.pair.streams, rank, mine, theirs, read.asked, agreements)
    if cut_short:  # it may have ended before it wrote a metric at all
        attempt.pair.streams.gaps = [gap for gap in attempt.pair.streams.gaps if gap.kind != "one-arm"]
        for survey in arm.surveys:
            if survey.unreadable:
                survey.gaps = []


def _attempt(arm: ArmEvidence, reference: ArmEvidence, told: Position) -> AttemptEvidence:
    pair = PairEvidence(PairTally(reference.id, arm.id), EnvironmentTally(reference.id, arm.id))
    found = AttemptEvidence(arm, pair)
    if arm.attempt:
        found.told, found.restored, found.saved = told, Boundary(told), Boundary(told)
        found.named = arm.job.resumed_from.named if arm.job and arm.job.resumed_from else None
    return found


def _told(job: JobFile | None) -> Position:
    if job is None or job.resumed_from is None:
        return Position(0)
    return Position(job.resumed_from.step, job.resumed_from.microbatch)


def _job(attempt: AttemptFolder) -> JobFile | None:
    try:
        return JobFile.read(attempt.job_file)
    except RecordError:
        return None


def _of_source(asked: Asked, streams: int) -> Asked:
    """What the deciding side is to ask: of streams, and not of what only a recorder has."""
    return replace(asked, ranks=streams, required=(), state_every=0, absent=(*asked.absent, "batch"))


def _claims(
    experiment: ExperimentFile,
    asked: Asked,
    wants: SourceAsked,
    agreements: Agreements,
    read: Sequence[AttemptStreams | None],
) -> list[Finding]:
    derived = []
    for metric in wants.compared:
        names = [wants.series(stream, metric) for each in read if each for stream in each.streams.values()]
        if any(found and wants.pattern.is_derived(found[0]) for found in names):
            derived.append(metric)
    return claim_findings(agreements, wants, asked.state_every, experiment.determinism, derived)
