"""Reads the records of a resume check: each attempt of the interrupted arm beside the uninterrupted reference.

The reference may lie in another experiment's folder, where a clean pair's arm is used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from detrun.compare.attempts import Position, came_back_from, comparable, has_whole, shifted, without
from detrun.compare.completeness import Asked, survey_rank
from detrun.compare.environment import ArmContext, EnvironmentTally, compare_environments, compare_initial, templates_of
from detrun.compare.evidence import ArmEvidence, PairEvidence
from detrun.compare.resume_evidence import AttemptEvidence, Boundary, ControlEvidence, ResumeEvidence
from detrun.compare.streams import Gap, PairTally, compare_rank
from detrun.errors import RecordError
from detrun.experiments.arm_files import asked_of, read_arm, read_cost, read_surroundings, size_of, stage_of
from detrun.experiments.checkpoint_evidence import audit_checkpoints, note_what_was_saved
from detrun.experiments.slices import read_all, slices
from detrun.experiments.state_evidence import RankState, compare_state, elsewhere
from detrun.records.environment_reader import RankEnvironment
from detrun.records.files import one_line, read_object
from detrun.records.jobs import ArmPlan, ExperimentFile, JobFile
from detrun.records.layout import AttemptFolder, ExperimentFolder
from detrun.records.metrics_line import LineReader, StepRecord
from detrun.records.metrics_reader import RankMetrics, read_rank_metrics


@dataclass(slots=True)
class _Attempt:
    """What reading one attempt needs to know. writer: the attempts that may have written its checkpoint, last first;
    before: the attempt that it followed."""

    folder: AttemptFolder
    context: ArmContext
    told: Position
    cut_short: bool
    writers: Sequence[AttemptFolder] = ()
    named: int | None = None
    before: AttemptFolder | None = None


@dataclass(slots=True)
class _Task:
    ranks: Sequence[int]
    reference: _Attempt
    attempts: Sequence[_Attempt]
    asked: Asked


@dataclass(slots=True)
class _Part:
    """What a slice of ranks leaves behind: the reference, and every attempt held against it."""

    reference: ArmEvidence
    attempts: list[AttemptEvidence] = field(default_factory=list)


def gather_resume(place: ExperimentFolder, experiment: ExperimentFile, processes: int | None = None) -> ResumeEvidence:
    """Reads everything about a resume check that a verdict rests on."""
    asked = asked_of(experiment)
    plans = {plan.id: plan for plan in experiment.arms}
    first = next((plan for plan in experiment.arms if plan.role == "reference"), None)
    if first is None:
        raise RecordError("names no reference among its arms", where=str(place.experiment_file))
    home, arm = reference_folder(place, experiment, first)
    templates = templates_of(experiment.recipe)
    reference = _Attempt(home.attempt(arm, 0), _context(home.id, arm, 0, first, (), templates), Position(0), False)
    evidence = read_arm(home, first.model_copy(update={"id": arm}), reference.folder, asked)
    evidence.id = first.id
    evidence.gaps += _reference_gaps(home, experiment, first.id)
    resumed_by = _resume_args(experiment.recipe)
    attempts: list[_Attempt] = []
    found: list[AttemptEvidence] = []
    for plan in (plan for plan in experiment.arms if plan is not first):
        for folder in place.attempts(plan.id):
            attempt = _attempt(place, plans, plan, folder, resumed_by, templates)
            attempts.append(attempt)
            found.append(_empty(read_arm(place, plan, folder, asked), evidence, attempt))
    parts = slices(asked.ranks)
    tasks = [_Task(ranks, reference, attempts, asked) for ranks in parts]
    folders = [reference.folder, *(attempt.folder for attempt in attempts)]
    for part in read_all(read_slice, tasks, lambda: size_of(folders, parts), processes):
        _merge_arm(evidence, part.reference)
        for mine, theirs in zip(found, part.attempts, strict=True):
            _merge(mine, theirs)
    interrupted = next((plan for plan in experiment.arms if plan.role == "interrupted"), None)
    for mine in found:
        if mine.restored is not None:
            elsewhere(mine.restored, reference.folder, asked.ranks)
            note_what_was_saved(mine.restored, mine.arm.job)
    checkpoints = audit_checkpoints(place, experiment, interrupted.id) if interrupted else []
    return ResumeEvidence(
        asked,
        evidence,
        [mine for mine in found if plans[mine.arm.id].role == "interrupted"],
        [
            ControlEvidence(str(plans[mine.arm.id].purpose), mine)
            for mine in found
            if plans[mine.arm.id].role == "control"
        ],
        checkpoints,
    )


def reference_folder(
    place: ExperimentFolder, experiment: ExperimentFile, plan: ArmPlan
) -> tuple[ExperimentFolder, str]:
    """Where the reference's records lie, and the arm's name there."""
    elsewhere_ = experiment.reference
    if elsewhere_ is None:
        return place, plan.id
    return ExperimentFolder(Path(elsewhere_.path)), elsewhere_.arm


def _reference_gaps(home: ExperimentFolder, experiment: ExperimentFile, arm: str) -> list[Gap]:
    """Whether the experiment of which an arm is used again is the one that was chosen."""
    told = experiment.reference
    if told is None:
        return []
    try:
        found = ExperimentFile.read(home.experiment_file).id
    except RecordError as error:
        return [
            Gap(
                "reference",
                f"{told.experiment}, of which it is an arm, cannot be read: its experiment.json {error.what}",
                -1,
                arm,
            )
        ]
    if found != told.experiment:
        return [Gap("reference", f"its records are those of {one_line(found, 80)}, not of {told.experiment}", -1, arm)]
    return []


def _resume_args(recipe: dict[str, Any]) -> tuple[str, ...]:
    checkpoint = recipe.get("checkpoint")
    args = checkpoint.get("resume_args") if isinstance(checkpoint, dict) else None
    return tuple(word for word in args if isinstance(word, str)) if isinstance(args, list) else ()


def _context(
    id: str, arm: str, attempt: int, plan: ArmPlan, args: tuple[str, ...], templates: tuple[str, ...]
) -> ArmContext:
    return ArmContext(arm, id, attempt, (), (*plan.declared.args, *args), dict(plan.declared.env), templates)


def _attempt(
    place: ExperimentFolder,
    plans: dict[str, ArmPlan],
    plan: ArmPlan,
    folder: AttemptFolder,
    resumed_by: tuple[str, ...],
    templates: tuple[str, ...],
) -> _Attempt:
    told, named, cut_short, job = Position(0), None, False, None
    try:
        job = JobFile.read(folder.job_file)
    except RecordError:
        pass
    else:
        cut_short = job.state != "done"
        if job.resumed_from is not None:
            told = Position(job.resumed_from.step, job.resumed_from.microbatch)
            named = job.resumed_from.named
    args = resumed_by if folder.number else ()
    source = next((other.id for other in plans.values() if other.role == "interrupted"), plan.id)
    earlier = place.attempts(plan.id if plan.role == "interrupted" else source)
    writers = [other for other in reversed(earlier) if other.arm != plan.id or other.number < folder.number]
    before = writers[0] if folder.number and writers and plan.role == "interrupted" else None
    return _Attempt(
        folder,
        _context(place.id, plan.id, folder.number, plan, args, templates),
        told,
        cut_short,
        writers if folder.number else (),
        named,
        before,
    )


def _empty(arm: ArmEvidence, reference: ArmEvidence, attempt: _Attempt) -> AttemptEvidence:
    pair = PairEvidence(PairTally(reference.id, arm.id), EnvironmentTally(reference.id, arm.id))
    found = AttemptEvidence(arm, pair)
    if attempt.folder.number:
        found.told, found.named = attempt.told, attempt.named
        found.restored, found.saved = Boundary(attempt.told), Boundary(attempt.told)
        found.overlap = PairTally(f"{arm.id}{attempt.folder.number - 1}", f"{arm.id}{attempt.folder.number}")
    return found


def read_slice(task: _Task) -> _Part:
    """Reads some ranks of every attempt and holds them against the reference's."""
    reference = ArmEvidence(task.reference.folder.arm, "reference")
    part = _Part(
        reference,
        [_empty(ArmEvidence(a.folder.arm, "interrupted", a.folder.number), reference, a) for a in task.attempts],
    )
    reader = LineReader()
    for rank in task.ranks:
        records = read_rank_metrics(task.reference.folder.metrics(rank), None, reader)
        reference.surveys.append(survey_rank(reference.id, rank, records, task.asked))
        surroundings = read_surroundings(task.reference.folder, rank, task.asked, reference.gaps, reference.id)
        if surroundings is not None:
            _note_place(reference, rank, surroundings)
        read_cost(task.reference.folder, rank, reference.remarks, reference.cost, reference.gaps)
        seen: dict[Path, RankMetrics] = {}
        for attempt, found in zip(task.attempts, part.attempts, strict=True):
            _read_attempt(task, attempt, found, rank, records, surroundings, reader, seen)
    return part


def _read_attempt(
    task: _Task,
    attempt: _Attempt,
    found: AttemptEvidence,
    rank: int,
    reference: RankMetrics,
    surroundings: RankEnvironment | None,
    reader: LineReader,
    seen: dict[Path, RankMetrics],
) -> None:
    folder, asked, arm = attempt.folder, task.asked, found.arm
    records = read_rank_metrics(folder.metrics(rank), reference, reader)
    environment = read_surroundings(folder, rank, asked, arm.gaps, arm.id)
    if environment is not None:
        _note_place(arm, rank, environment)
    read_cost(folder, rank, arm.remarks, arm.cost, arm.gaps)
    began = attempt.told
    if folder.number and records.steps:
        came = came_back_from(attempt.told, reference, surroundings, records, environment, attempt.named)
        found.came_from[rank] = came
        began = came or attempt.told
        _note_batch(found, rank, reference, records.steps[min(records.steps)], began)
        if min(records.steps) <= attempt.told.step:
            what = f"records begin at step {min(records.steps)}, and it was to go on from {attempt.told.words}"
            arm.gaps.append(Gap("first-step", what, rank, arm.id, min(records.steps)))
        if min(records.steps) != began.step + 1:
            # It counted on from where it was told to go on; a first step that is missing does not change that.
            records = shifted(records, began.step - attempt.told.step)
        _note_sabotage(found, folder, rank)
    seen[folder.path] = records
    # One that died after its last step, as in the end of a process group, has recorded all that there was.
    cut_short = attempt.cut_short and not has_whole(records, reference, asked.steps)
    both = comparable(reference, records, cut_short=cut_short, begins_in=began.microbatch)
    compare_rank(found.pair.streams, rank, both.a, both.b, asked.ignore)
    whole = without(records, both.partial, cut_short=cut_short)
    first = began.step + 1 + (1 if began.microbatch and len(records.steps) > 1 else 0)
    arm.surveys.append(survey_rank(arm.id, rank, whole, asked, first))
    if surroundings and environment:
        compare_environments(
            found.pair.environment, rank, surroundings, environment, task.reference.context, attempt.context
        )
        if not folder.number:
            compare_initial(found.pair.initial, rank, surroundings, environment)
    if attempt.before is not None and found.overlap is not None and attempt.before.path in seen:
        earlier = comparable(
            seen[attempt.before.path],
            records,
            cut_short=cut_short,
            begins_in=began.microbatch,
            cut_short_a=True,
        )
        compare_rank(found.overlap, rank, earlier.a, earlier.b, asked.ignore)
    if found.restored is not None and found.saved is not None:
        state = RankState(
            rank,
            task.reference.folder,
            folder,
            attempt.writers,
            began,
            attempt.told,
            surroundings,
            environment,
            cut_short and len(records.steps) < 2,
            asked.absent,
        )
        compare_state(state, found.restored, found.saved)


def _note_place(arm: ArmEvidence, rank: int, environment: RankEnvironment) -> None:
    arm.replicas[rank] = environment.replicas
    if environment.host:
        arm.hosts[rank] = environment.host
    stage = stage_of(environment)
    if stage is not None:
        arm.stages[rank] = stage


def _note_batch(found: AttemptEvidence, rank: int, reference: RankMetrics, first: StepRecord, began: Position) -> None:
    """How far the loader is off, where the first batch is one that the reference had at another step."""
    batch = first.contents.batch
    expected = reference.steps.get(began.step + 1)
    if batch is None or began.microbatch or expected is None or expected.contents.batch == batch:
        return
    steps = [step for step, record in reference.steps.items() if record.contents.batch == batch]
    if steps:
        nearest = min(steps, key=lambda step: abs(step - began.step - 1))
        found.batch_offsets[rank] = nearest - (began.step + 1)


def _note_sabotage(found: AttemptEvidence, folder: AttemptFolder, rank: int) -> None:
    try:
        found.sabotage[rank] = read_object(folder.sabotage(rank))
    except RecordError:
        return


def _merge_arm(arm: ArmEvidence, part: ArmEvidence) -> None:
    arm.surveys += part.surveys
    for survey in part.surveys:
        survey.arm = arm.id
    arm.gaps += part.gaps
    for text, ranks in part.remarks.items():
        arm.remarks.setdefault(text, []).extend(ranks)
    arm.stages.update(part.stages)
    arm.replicas.update(part.replicas)
    arm.hosts.update(part.hosts)
    arm.cost.merge(part.cost)


def _merge(mine: AttemptEvidence, part: AttemptEvidence) -> None:
    _merge_arm(mine.arm, part.arm)
    mine.pair.merge(part.pair.streams, part.pair.environment, part.pair.initial)
    mine.came_from.update(part.came_from)
    mine.batch_offsets.update(part.batch_offsets)
    mine.sabotage.update(part.sabotage)
    if mine.overlap is not None and part.overlap is not None:
        mine.overlap.merge(part.overlap)
    for whole, some in ((mine.restored, part.restored), (mine.saved, part.saved)):
        if whole is not None and some is not None:
            whole.merge(some)
