"""Holds two arms' records of a rank against each other, bit by bit, and tallies what differs.

A stream is one thing recorded every step: the batch, the RNG streams, a component of the state, a metric. Its
differences are tallied, not listed: thousands of ranks that differ in thousands of steps stay a small value,
and tallies of different ranks can be merged in any order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from detrun.compare.bits import decode, looks_equal, ulp_distance
from detrun.compare.folding import steps_in_words
from detrun.records.metrics_line import DERIVED, Contents, Metric, StepRecord, shown_name, stem_of
from detrun.records.metrics_reader import RankMetrics

BATCH = "batch"
MICROBATCHES = "microbatches"
RNG = "rng"
STATE = "state"
SKIPPED = "skipped"
METRIC = "metric"

_KINDS = {BATCH: 0, MICROBATCHES: 1, RNG: 2, STATE: 3, SKIPPED: 4, METRIC: 5}
_COMPONENTS = {"buffers": 0, "gradients": 1, "parameters": 2, "optimizer": 3}


class Stream(NamedTuple):
    """What is recorded every step; `name` is the component of a state, or the metric."""

    kind: str
    name: str = ""

    @property
    def causal(self) -> tuple[int, int, str]:
        """Sort key within a step: what a step reads first comes first, what is computed from it later."""
        return (_KINDS[self.kind], _COMPONENTS.get(self.name, len(_COMPONENTS)), self.name)

    @property
    def label(self) -> str:
        """The stream in a table."""
        return self.name or {RNG: "RNG", MICROBATCHES: "micro-batches"}.get(self.kind, self.kind)


@dataclass(slots=True)
class StepTally:
    """How one stream differs in one step: on how many ranks, and the worst of them."""

    ranks: int = 0
    ulp: int | None = None
    rank: int = -1


@dataclass(slots=True)
class StreamTally:
    """All differences of one stream between two arms.

    ranks: those that differ in the first step; a, b: what the lowest of them holds there (a digest, a count,
    a flag or a metric). visible: the first step in which a value printed with so many decimals shows it.
    """

    stream: Stream
    first_step: int
    ranks: list[int]
    a: Any
    b: Any
    steps: dict[int, StepTally] = field(default_factory=dict)
    visible: dict[int, int] = field(default_factory=dict)

    @property
    def last_step(self) -> int:
        return max(self.steps)

    def merge(self, other: StreamTally) -> None:
        """Adds the differences of other ranks."""
        if other.first_step < self.first_step:
            self.first_step, self.ranks = other.first_step, list(other.ranks)
            self.a, self.b = other.a, other.b
        elif other.first_step == self.first_step:
            if min(other.ranks) < min(self.ranks):
                self.a, self.b = other.a, other.b
            self.ranks = sorted({*self.ranks, *other.ranks})
        for step, tally in other.steps.items():
            mine = self.steps.setdefault(step, StepTally())
            mine.ranks += tally.ranks
            _worse(mine, tally.ulp, tally.rank)
        for decimals, step in other.visible.items():
            self.visible[decimals] = min(step, self.visible.get(decimals, step))


@dataclass(frozen=True, slots=True)
class Gap:
    """Why something of a rank could not be compared. `what` reads on behind `arm b, rank 3: `.

    arm None: between the arms rather than in one of them.
    """

    kind: str
    what: str
    rank: int
    arm: str | None = None
    step: int | None = None
    line: int | None = None
    path: str | None = None
    name: str | None = None


@dataclass(slots=True)
class PairTally:
    """What a comparison of two arms found, over any number of ranks."""

    a: str
    b: str
    streams: dict[Stream, StreamTally] = field(default_factory=dict)
    compared: dict[int, int] = field(default_factory=dict)
    """Ranks compared, by step."""
    gaps: list[Gap] = field(default_factory=list)

    def merge(self, other: PairTally) -> None:
        """Adds what a comparison of other ranks found."""
        for stream, tally in other.streams.items():
            if stream in self.streams:
                self.streams[stream].merge(tally)
            else:
                self.streams[stream] = tally
        for step, ranks in other.compared.items():
            self.compared[step] = self.compared.get(step, 0) + ranks
        self.gaps.extend(other.gaps)


def compare_rank(tally: PairTally, rank: int, a: RankMetrics, b: RankMetrics, ignore: Iterable[str] = ()) -> None:
    """Adds to `tally` how a rank's records of two arms differ in the steps that both hold."""
    ignored = frozenset(ignore)
    only: dict[tuple[Stream, str], list[int]] = {}
    reasons: dict[str, int] = {}
    common = 0
    for step, left in a.steps.items():
        right = b.steps.get(step)
        if right is None:
            continue
        common += 1
        tally.compared[step] = tally.compared.get(step, 0) + 1
        if left is right:
            continue
        _compare_step(tally, rank, left, right, ignored, reasons)
        if left.held is not right.held:
            mine, theirs = _streams_of(left.contents, ignored), _streams_of(right.contents, ignored)
            for stream in mine - theirs:
                only.setdefault((stream, tally.b), []).append(step)
            for stream in theirs - mine:
                only.setdefault((stream, tally.a), []).append(step)
    for (stream, arm), steps in only.items():
        other = tally.a if arm == tally.b else tally.b
        what = f"{shown_name(stream.label)} is missing {steps_in_words(steps, common)}, arm {other} has it"
        tally.gaps.append(Gap("one-arm", what, rank, arm, min(steps), name=stream.label))
    for what, step in reasons.items():
        tally.gaps.append(Gap("incomparable", what, rank, None, step))


def _streams_of(record: Contents, ignored: frozenset[str]) -> set[Stream]:
    found = {Stream(METRIC, name) for name in record.metrics if not is_ignored(name, ignored)}
    found.update(Stream(STATE, name) for name in record.state)
    if record.batch is not None:
        found.add(Stream(BATCH))
    if record.rng is not None:
        found.add(Stream(RNG))
    return found


def is_ignored(name: str, ignored: frozenset[str]) -> bool:
    """Whether a metric, or one that was derived from it (`loss[0]`, `loss (adapter)`), is to be left out: by the
    recipe's word, or because an adapter knows it as bookkeeping that may restart on resume."""
    return name.endswith(DERIVED) or (bool(ignored) and (name in ignored or stem_of(name) in ignored))


def _compare_step(
    tally: PairTally,
    rank: int,
    left: StepRecord,
    right: StepRecord,
    ignored: frozenset[str],
    reasons: dict[str, int],
) -> None:
    step, a, b = left.step, left.contents, right.contents
    digests: list[tuple[Stream, str | None, str | None]] = []
    if a.batch != b.batch:
        digests.append((Stream(BATCH), a.batch, b.batch))
    if a.rng != b.rng:
        digests.append((Stream(RNG), a.rng, b.rng))
    if a.state != b.state:
        digests += [(Stream(STATE, name), a.state[name], b.state[name]) for name in a.state if name in b.state]
    for stream, x, y in digests:
        if x is None or y is None or x == y:
            continue
        kinds = x.partition(":")[0], y.partition(":")[0]
        if kinds[0] == kinds[1]:
            _differ(tally, stream, rank, step, x, y)
        else:
            shown = f"{kinds[0]} in arm {tally.a}, {kinds[1]} in arm {tally.b}"
            reasons.setdefault(f"digests of {shown_name(stream.label)} by different algorithms ({shown})", step)
    if left.microbatches != right.microbatches:
        _differ(tally, Stream(MICROBATCHES), rank, step, left.microbatches, right.microbatches)
    if left.skipped != right.skipped:
        _differ(tally, Stream(SKIPPED), rank, step, left.skipped, right.skipped)
    if a.metrics != b.metrics:
        for name, x_metric in a.metrics.items():
            y_metric = b.metrics.get(name)
            if y_metric is None or x_metric == y_metric or is_ignored(name, ignored):
                continue
            _compare_metric(tally, name, rank, step, x_metric, y_metric, reasons)
    if a.other != b.other:
        keys = sorted(key for key in {*a.other, *b.other} if a.other.get(key) != b.other.get(key))
        reasons.setdefault(f"{shown_name(', '.join(keys))} differs, which this detrun cannot judge", step)


def _compare_metric(
    tally: PairTally, name: str, rank: int, step: int, a: Metric, b: Metric, reasons: dict[str, int]
) -> None:
    dtype = a["dtype"]
    if dtype != b["dtype"]:
        _differ(tally, Stream(METRIC, name), rank, step, a, b)
    elif a["bits"] != b["bits"]:
        ulp = ulp_distance(a["bits"], b["bits"], dtype)
        _differ(tally, Stream(METRIC, name), rank, step, a, b, ulp)
    elif a.get("source") != b.get("source"):
        sources = shown_name(str(a.get("source"))), shown_name(str(b.get("source")))
        shown = f"{sources[0]} in arm {tally.a}, {sources[1]} in arm {tally.b}"
        reasons.setdefault(f"{shown_name(name)} comes from different places ({shown})", step)
    elif repr(a.get("value")) != repr(b.get("value")):
        reasons.setdefault(f"{shown_name(name)}: the same bits are given with different values", step)


def _differ(tally: PairTally, stream: Stream, rank: int, step: int, a: Any, b: Any, ulp: int | None = None) -> None:
    found = tally.streams.get(stream)
    if found is None:
        found = tally.streams[stream] = StreamTally(stream, step, [rank], a, b)
    elif step < found.first_step:
        found.first_step, found.ranks, found.a, found.b = step, [rank], a, b
    elif step == found.first_step and rank not in found.ranks:
        if rank < min(found.ranks):
            found.a, found.b = a, b
        found.ranks.append(rank)
    at = found.steps.get(step)
    if at is None:
        at = found.steps[step] = StepTally()
    at.ranks += 1
    _worse(at, ulp, rank)
    if stream.kind == METRIC:
        for decimals in (6, 4):
            seen = found.visible.get(decimals)
            if (seen is None or step < seen) and not _looks_equal(a, b, decimals):
                found.visible[decimals] = step


def _worse(tally: StepTally, ulp: int | None, rank: int) -> None:
    if tally.rank < 0 or (ulp is not None and (tally.ulp is None or ulp > tally.ulp)):
        tally.ulp, tally.rank = ulp, rank


def _looks_equal(a: Metric, b: Metric, decimals: int) -> bool:
    """Of different dtypes too: a log prints both alike."""
    x, y = decode(a["bits"], a["dtype"]), decode(b["bits"], b["dtype"])
    return looks_equal(x, y, decimals)
