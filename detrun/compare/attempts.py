"""Lays the records of a resumed attempt beside an uninterrupted run's: where it really came back, and which steps are
only in part comparable. Pure.

An attempt that was killed leaves a last step of which a part may be missing; one that was resumed in the middle of a
gradient accumulation begins with a step of which it ran a part. Of such a step both sides are reduced to what both
hold; everything else is compared whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from detrun.records.environment_reader import RankEnvironment
from detrun.records.metrics_line import Contents, Metric, StepRecord, stem_of
from detrun.records.metrics_reader import RankMetrics


@dataclass(frozen=True, slots=True)
class Position:
    """So many optimizer steps are complete, and so many micro-batches of the next one are done."""

    step: int
    microbatch: int = 0

    @property
    def begin(self) -> str:
        """The name of the boundary at which the run goes on from here."""
        return f"begin-{self.step + 1:08d}{self._within}"

    @property
    def end(self) -> str:
        """The name of the boundary at which a checkpoint of this position was written."""
        return f"end-{self.step:08d}{self._within}"

    @property
    def _within(self) -> str:
        return f".{self.microbatch}" if self.microbatch else ""

    @property
    def words(self) -> str:
        """`step 10`, `step 10 and 2 micro-batches`."""
        if not self.microbatch:
            return f"step {self.step}"
        return f"step {self.step} and {self.microbatch} micro-batch{'es' if self.microbatch > 1 else ''}"


def came_back_from(
    told: Position,
    reference: RankMetrics,
    environment_a: RankEnvironment | None,
    records: RankMetrics,
    environment_b: RankEnvironment | None,
    named: int | None = None,
) -> Position | None:
    """The position of the reference in which a rank's attempt really began, or None where nothing tells.

    By the parameters before its first step, which are the reference's at the end of some step; its first batch must be
    the one that followed there. What was told is believed where that fits, whatever else does; but where the
    checkpoint is `named` after another step, and was perhaps written late, the data must not follow that one.
    """
    if not records.steps or environment_b is None:
        return None
    begun = environment_b.initial.get("parameters", "").partition(":")[2]
    if not begun:
        return None
    at_first = environment_a.initial.get("parameters", "").partition(":")[2] if environment_a else ""
    called = Position(named) if named is not None and named != told.step else None
    if called is not None and not (_follows(records, reference, called) and not _follows(records, reference, told)):
        called = None
    if told.step and called is None and _parameters(reference, told.step) in (begun, None):
        return told
    if not told.step and begun == at_first:
        return told
    first = records.steps[min(records.steps)]
    candidates = [step for step, record in reference.steps.items() if record.parameters == begun]
    if begun == at_first:
        candidates.insert(0, 0)
    for step in candidates:
        following = reference.steps.get(step + 1)
        if following is not None and _same_batch(following, first):
            return Position(step)
    return called


def _follows(records: RankMetrics, reference: RankMetrics, position: Position) -> bool:
    """Is the first batch the one that the reference had next?"""
    following = reference.steps.get(position.step + 1)
    return following is not None and _same_batch(following, records.steps[min(records.steps)])


def _parameters(records: RankMetrics, step: int) -> str | None:
    record = records.steps.get(step)
    return record.parameters if record else None


def _same_batch(a: StepRecord, b: StepRecord) -> bool:
    x, y = a.contents.batch, b.contents.batch
    return x is not None and x == y


def shifted(records: RankMetrics, by: int) -> RankMetrics:
    """The same records under other step numbers."""
    if not by:
        return records
    steps = {step + by: _renumbered(record, step + by) for step, record in records.steps.items() if step + by > 0}
    return RankMetrics(steps, {}, list(records.problems), records.raw)


def _renumbered(record: StepRecord, step: int) -> StepRecord:
    return StepRecord(step, record.microbatches, record.skipped, contents=record.contents)


@dataclass(frozen=True, slots=True)
class Comparable:
    """Two runs of a rank, reduced in the steps that one of them holds in part; `partial` names those."""

    a: RankMetrics
    b: RankMetrics
    partial: frozenset[int]


def comparable(
    a: RankMetrics, b: RankMetrics, *, cut_short: bool, begins_in: int = 0, cut_short_a: bool = False
) -> Comparable:
    """b is an attempt that begins after `begins_in` micro-batches of its first step; cut_short: it was ended from
    outside, so that its last step may lack what would still have been recorded; cut_short_a: so was a."""
    if not a.steps or not b.steps:
        return Comparable(a, b, frozenset())
    partial: set[int] = set()
    left, right = dict(a.steps), dict(b.steps)
    first = min(right)
    for last in [max(right)] * cut_short + [max(left)] * cut_short_a:
        if last in left and last in right:
            left[last], right[last] = _intersection(left[last], right[last])
            partial.add(last)
    if begins_in and first in left:
        left[first], right[first] = _rest_of_step(left[first], right[first])
        partial.add(first)
    if not partial:
        return Comparable(a, b, frozenset())
    return Comparable(_with_steps(a, left), _with_steps(b, right), frozenset(partial))


def has_whole(records: RankMetrics, reference: RankMetrics, step: int) -> bool:
    """Whether it is the last step of these records and holds all that it holds in the reference's."""
    own, other = records.steps.get(step), reference.steps.get(step)
    if own is None or other is None or step != max(records.steps) or own.microbatches != other.microbatches:
        return False
    ours, theirs = own.contents, other.contents
    return (
        {name: _source(metric) for name, metric in ours.metrics.items()}
        == {name: _source(metric) for name, metric in theirs.metrics.items()}
        and ours.state.keys() == theirs.state.keys()
        and (ours.rng is None) == (theirs.rng is None)
    )


def without(records: RankMetrics, steps: frozenset[int], *, cut_short: bool) -> RankMetrics:
    """The records of the steps that must be whole, and of a file that was cut short without what that explains."""
    kept = {step: record for step, record in records.steps.items() if step not in steps}
    problems = [p for p in records.problems if not (cut_short and (p.kind == "torn" or p.step in steps))]
    return RankMetrics(kept or dict(records.steps), {}, problems, records.raw)


def _with_steps(records: RankMetrics, steps: dict[int, StepRecord]) -> RankMetrics:
    return RankMetrics(steps, {}, records.problems, records.raw)


def _intersection(a: StepRecord, b: StepRecord) -> tuple[StepRecord, StepRecord]:
    # A step that was ended before its other micro-batches has other names for the same losses, and before the program
    # named its metrics itself the plain name is that of what was found.
    whole = a.microbatches == b.microbatches
    metrics = {
        name
        for name, metric in a.contents.metrics.items()
        if (whole or stem_of(name) != name) and _source(metric) == _source(b.contents.metrics.get(name))
    }
    return _reduced(a, b, metrics, whole), _reduced(b, a, metrics, whole, a.microbatches)


def _source(metric: Metric | None) -> object:
    return metric.get("source", "") if metric is not None else None


def _rest_of_step(a: StepRecord, b: StepRecord) -> tuple[StepRecord, StepRecord]:
    series = {stem_of(name) for name in a.contents.metrics if stem_of(name) != name}
    metrics = {name for name in a.contents.metrics if name in b.contents.metrics and name not in series}
    return _reduced(a, b, metrics, whole=False), _reduced(b, a, metrics, False, a.microbatches)


def _reduced(
    record: StepRecord, other: StepRecord, metrics: set[str], whole: bool, microbatches: int | None = None
) -> StepRecord:
    mine, theirs = record.contents, other.contents
    contents = Contents(
        {name: metric for name, metric in mine.metrics.items() if name in metrics},
        mine.batch if whole and theirs.batch is not None else None,
        {name: digest for name, digest in mine.state.items() if name in theirs.state},
        mine.rng if theirs.rng is not None else None,
        {},
    )
    count = record.microbatches if microbatches is None else microbatches
    return StepRecord(record.step, count, record.skipped, contents=contents)
