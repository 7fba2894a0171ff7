"""Where a difference that no earlier recorded event explains came from: the third pattern, and the events that bracket
a producer that was not recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy

from detrun.compare.trace_align import Alignment
from detrun.compare.trace_history import MATCHED, NOBODY, History
from detrun.compare.trace_summary import Lead, LeadKind, Role
from detrun.records.files import one_line
from detrun.records.trace_row import NO_CONTENT, TraceEvent
from detrun.records.trace_table import Integers, Mask, StepTable

Find = Callable[[int], "TraceEvent | None"]

OPERATORS = 4
"""The level from which on every operator is recorded."""


@dataclass(frozen=True)
class Side:
    """One arm at a step: its events, what is known of earlier ones, and any event by its number. since: the number of
    the first event that counts: what the ones before it wrote was not held against the other arm."""

    table: StepTable
    history: History
    find: Find
    since: int = 0


@dataclass(frozen=True)
class Scene:
    """Two arms at a step, aligned. filtered: only some scopes were recorded."""

    rank: int
    level: int
    a: Side
    b: Side
    alignment: Alignment
    filtered: bool = False

    def pair(self, number: int) -> tuple[TraceEvent, TraceEvent]:
        """The two events of a pair."""
        alignment = self.alignment
        return (
            self.a.table.event(int(alignment.rows_a[number])),
            self.b.table.event(int(alignment.rows_b[number])),
        )


def explained(scene: Scene) -> Mask:
    """Of pairs, whether an input differs that an event wrote which differs as well."""
    alignment, found = scene.alignment, scene.alignment.differences
    mask = numpy.zeros(len(alignment.rows_a), bool)
    for side, rows in ((scene.a, alignment.rows_a), (scene.b, alignment.rows_b)):
        parts = side.table.parts
        row = rows[found.part_pair]
        enters = found.part_at < parts.inputs[row]
        row, number, pair = row[enters], found.part_at[enters], found.part_pair[enters]
        back = parts.producers[parts.producer_offsets[row] + number]
        known = back > 0
        state, _, _ = side.history.look_up(side.table.numbers["seq"][row[known]] - back[known])
        mask[pair[known][state > MATCHED]] = True
    return mask


def differing_parts(scene: Scene, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Numbers of the inputs and of the outputs of a pair that differ and can be trusted."""
    found = scene.alignment.differences
    begin, end = numpy.searchsorted(found.part_pair, [number, number + 1])
    entering = int(scene.a.table.parts.inputs[scene.alignment.rows_a[number]])
    numbers = [int(at) for at in found.part_at[begin:end]]
    return (
        tuple(at for at in numbers if at < entering),
        tuple(at - entering for at in numbers if at >= entering),
    )


def source_of(scene: Scene, number: int) -> Lead:
    """The lead of a pair whose inputs differ though nothing before it does."""
    a, b = scene.pair(number)
    inputs, outputs = differing_parts(scene, number)
    role, kind, after, why = _classified(scene, number, a, b, inputs)
    return Lead(role, kind, scene.rank, a, b, inputs, outputs, after, why)


_Class = tuple[Role, LeadKind, "TraceEvent | None", str]


def _classified(scene: Scene, number: int, a: TraceEvent, b: TraceEvent, inputs: tuple[int, ...]) -> _Class:
    found = scene.alignment.differences
    if a.kind == "batch":
        return "outside-the-trace", "data", None, "the batch differs before anything was computed from it"
    if a.kind == "parameter" and not inputs:
        why = "it differs where the window begins: what wrote it did so before, or unseen"
        return "outside-the-trace", "parameter", None, why
    if inputs:
        return _of_tensor(scene, number, a, b, inputs[0])
    if found.rng[number]:
        why = "the random number generator was in another state before it, and nothing recorded before it differs"
        return "outside-the-trace", "rng", None, why
    if found.scalars[number]:
        why = f"its plain arguments are {_short(a.scalars)} in A and {_short(b.scalars)} in B"
        return "outside-the-trace", "scalar", None, why
    if a.signature != b.signature:
        why = f"it was given {_short(a.signature)} in A and {_short(b.signature)} in B"
        return "outside-the-trace", "control-flow", None, why
    return "outside-the-trace", "control-flow", None, "it was called for other ranks or by another kind of call"


def _of_tensor(scene: Scene, number: int, a: TraceEvent, b: TraceEvent, index: int) -> _Class:
    """An input part differs and no recorded event explains it."""
    writer_a, writer_b = _writer(scene.a, a, index), _writer(scene.b, b, index)
    _, partner, _ = scene.a.history.look_up(numpy.array([writer_a]))
    if writer_a != NOBODY and writer_b != NOBODY:
        event_a, event_b = scene.a.find(writer_a), scene.b.find(writer_b)
        same = int(partner[0]) == writer_b if partner[0] != NOBODY else _same_key(event_a, event_b)
        if not same and event_a is not None and event_b is not None:
            why = (
                f"input {index} is what {_name(event_a)} wrote in A and what {_name(event_b)} wrote in B, and both "
                "match: the calls came in another order"
            )
            return "outside-the-trace", "control-flow", None, why
        if same and _is_exchanged(scene, a, b, index):
            why = f"input {index} is what another call of it was given in the other arm: they came in another order"
            return "outside-the-trace", "control-flow", None, why
        if same or not scene.filtered:
            return "uncaptured-producer", _kind(a), event_a or event_b, _written_between(index, event_a or event_b)
    other_a, other_b = _made_by(scene.a, a, index), _made_by(scene.b, b, index)
    if other_a is not None and other_b is not None and other_a.key != other_b.key:
        why = (
            f"input {index} is what {_name(other_a)} gave in A and what {_name(other_b)} gave in B: the calls came in "
            "another order"
        )
        return "outside-the-trace", "control-flow", None, why
    if writer_a != NOBODY or writer_b != NOBODY:
        event = scene.a.find(writer_a) if writer_a != NOBODY else scene.b.find(writer_b)
        return "uncaptured-producer", _kind(a), event, _written_between(index, event)
    if scene.alignment.uneven[number]:
        why = f"the arms call {_short(a.op)} {'in ' + _short(a.scope) + ' ' if a.scope else ''}another number of times"
        return "outside-the-trace", "control-flow", None, why
    if a.kind == "parameter":
        return "outside-the-trace", "parameter", None, "the parameter differs and no recorded event wrote it"
    if scene.level < OPERATORS:
        why = f"input {index} differs; a trace of level {scene.level} does not record what computed it"
        return "uncaptured-producer", _kind(a), None, why
    if scene.filtered:
        why = f"input {index} differs; what computed it lies outside of the scopes that were traced"
        return "uncaptured-producer", _kind(a), None, why
    return "outside-the-trace", "data", None, f"input {index} differs and no recorded event wrote it"


def _writer(side: Side, event: TraceEvent, index: int) -> int:
    """The number of the event that last wrote an input, NOBODY if it is not known."""
    back = event.producers[index] if index < len(event.producers) else 0
    return event.seq - back if back and event.seq - back >= side.since else NOBODY


def _made_by(side: Side, event: TraceEvent, index: int) -> TraceEvent | None:
    """The last event of the step, before `event`, that put out just what this input holds."""
    content = event.inputs[index] if index < len(event.inputs) else NO_CONTENT
    if content == NO_CONTENT:
        return None
    parts = side.table.parts
    lo, hi = int.from_bytes(content[:8], "little"), int.from_bytes(content[8:], "little")
    at: Integers = numpy.flatnonzero((parts.lo == numpy.uint64(lo)) & (parts.hi == numpy.uint64(hi)))
    rows = numpy.searchsorted(parts.offsets, at, side="right") - 1
    left = at - parts.offsets[rows] >= parts.inputs[rows]
    before = rows[left & (side.table.numbers["seq"][rows] < event.seq)]
    return side.table.event(int(before[-1])) if len(before) else None


def _is_exchanged(scene: Scene, a: TraceEvent, b: TraceEvent, index: int) -> bool:
    """Whether each arm reads here what the other one reads in another call of the same operation in the same place:
    parts of one tensor that are gone through in another order."""
    if index >= min(len(a.inputs), len(b.inputs)):
        return False
    return _is_given(scene.b, b, a.inputs[index]) and _is_given(scene.a, a, b.inputs[index])


def _is_given(side: Side, event: TraceEvent, content: bytes) -> bool:
    """Whether another event of the same group of keys is given this content."""
    parts = side.table.parts
    lo, hi = int.from_bytes(content[:8], "little"), int.from_bytes(content[8:], "little")
    at: Integers = numpy.flatnonzero((parts.lo == numpy.uint64(lo)) & (parts.hi == numpy.uint64(hi)))
    rows = numpy.searchsorted(parts.offsets, at, side="right") - 1
    rows = rows[(at - parts.offsets[rows] < parts.inputs[rows]) & (side.table.numbers["seq"][rows] != event.seq)]
    for name in ("phase", "scope", "op"):
        words = side.table.texts[name]
        rows = rows[words.codes[rows] == words.values.index(getattr(event, name))]
    return bool((side.table.numbers["microbatch"][rows] == event.microbatch).any())


def _written_between(index: int, writer: TraceEvent | None) -> str:
    """Why an unseen write is the only explanation."""
    by = "the event that wrote it last" if writer is None else f"{_name(writer)}, which wrote it last,"
    return f"input {index} differs though {by} matches: something that is not recorded wrote it in between"


def _same_key(a: TraceEvent | None, b: TraceEvent | None) -> bool:
    return a is None or b is None or a.key == b.key


def _kind(event: TraceEvent) -> LeadKind:
    if event.kind in ("collective", "send", "recv"):
        return "collective"
    if event.kind == "parameter":
        return "parameter"
    return "recompute" if event.kind == "recompute" else "op"


def _name(event: TraceEvent) -> str:
    where = f" in {_short(event.scope)}" if event.scope else ""
    return f"{_short(event.op)}{where} (occurrence {event.occurrence})"


def _short(text: str) -> str:
    return one_line(text, 120)
