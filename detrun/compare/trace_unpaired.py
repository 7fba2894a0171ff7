"""Events that only one arm has: which of them made the difference, and which are beside the point.

A program may do more in one arm without any effect: log a value, look for a maximum. Such an event leads only where
nothing else differs. One whose result is read by an event that differs, or that draws from a generator whose later
draws differ, comes before the difference it made.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy

from detrun.compare.trace_sources import Scene, Side
from detrun.compare.trace_summary import Lead
from detrun.records.files import one_line
from detrun.records.trace_row import TraceEvent
from detrun.records.trace_table import Integers


@dataclass(frozen=True)
class Unpaired:
    """Rows without a partner that count, by arm: b's hold what a has not and the other way round."""

    a: Integers
    b: Integers

    def __len__(self) -> int:
        return len(self.a) + len(self.b)


def lead_of_unpaired(scene: Scene, unpaired: Unpaired, apart: Integers) -> Lead | None:
    """The lead of the first event that only one arm has and that matters; None where a pair that differs leads.

    apart: the pairs that differ, in order. Where none does, the first event without a partner is the difference.
    """
    if not len(unpaired):
        return None
    if not len(apart):
        return _lead(scene, *_first(scene, unpaired.a, unpaired.b))
    read = (
        _read_by(scene.a, unpaired.a, _rows(scene, apart, 0)),
        _read_by(scene.b, unpaired.b, _rows(scene, apart, 1)),
    )
    if len(read[0]) or len(read[1]):
        found = _first(scene, *read)
        return _batch(scene, apart, unpaired) or (_lead(scene, *found) if _is_before(scene, found, apart) else None)
    drawn = [rows[side.table.has_rng[rows]] for side, rows in ((scene.a, unpaired.a), (scene.b, unpaired.b))]
    if scene.alignment.differences.rng[apart].any() and (len(drawn[0]) or len(drawn[1])):
        found = _first(scene, *drawn)
        return _draw(scene, *found) if _is_before(scene, found, apart) else None
    return None


def _rows(scene: Scene, pairs: Integers, arm: int) -> Integers:
    alignment = scene.alignment
    return (alignment.rows_b if arm else alignment.rows_a)[pairs]


def _read_by(side: Side, lonely: Integers, readers: Integers) -> Integers:
    """Rows of `lonely` that wrote what one of `readers` reads, and those that wrote what these read, and so on."""
    if not len(lonely):
        return lonely
    table = side.table
    seq = table.numbers["seq"]
    found = numpy.zeros(len(table), bool)
    is_lonely = numpy.zeros(len(table), bool)
    is_lonely[lonely] = True
    front = readers
    while len(front):
        offsets = table.parts.producer_offsets
        begins, ends = offsets[front], offsets[front + 1]
        at = numpy.concatenate([numpy.arange(b, e) for b, e in zip(begins.tolist(), ends.tolist(), strict=True)])
        owner = numpy.repeat(front, ends - begins)
        back = table.parts.producers[at.astype(numpy.int64)]
        wanted = seq[owner[back > 0]] - back[back > 0]
        place = numpy.searchsorted(seq, wanted)
        inside = place < len(seq)
        place = place[inside][seq[place[inside]] == wanted[inside]]
        fresh = numpy.unique(place[is_lonely[place] & ~found[place]])
        found[fresh] = True
        front = fresh
    return numpy.flatnonzero(found)


def _first(scene: Scene, only_a: Integers, only_b: Integers) -> tuple[float, int | None, int | None]:
    """(place in a's order, row in a, row in b) of the first of these events; of both where they stand in one place."""
    alignment = scene.alignment
    places: list[tuple[float, int]] = []
    if len(only_a):
        places.append((float(only_a[0]), 0))
    if len(only_b):
        before = alignment.rows_a[alignment.rows_b < only_b[0]]
        places.append((float(before.max(initial=-1)) + 0.5, 1))
    place, arm = min(places)
    both = len(places) == 2 and places[0][0] == place
    return place, int(only_a[0]) if arm == 0 or both else None, int(only_b[0]) if arm == 1 else None


def _is_before(scene: Scene, found: tuple[float, int | None, int | None], apart: Integers) -> bool:
    return bool(scene.alignment.rows_a[apart[0]] >= found[0])


def _events(scene: Scene, a: int | None, b: int | None) -> tuple[TraceEvent | None, TraceEvent | None]:
    return (
        None if a is None else scene.a.table.event(a),
        None if b is None else scene.b.table.event(b),
    )


def _lead(scene: Scene, _place: float, row_a: int | None, row_b: int | None) -> Lead:
    a, b = _events(scene, row_a, row_b)
    why = f"{_alone(a, b)}, and everything before it matches"
    return Lead("outside-the-trace", "control-flow", scene.rank, a, b, why=why)


def _draw(scene: Scene, _place: float, row_a: int | None, row_b: int | None) -> Lead:
    a, b = _events(scene, row_a, row_b)
    why = f"{_alone(a, b)} and drew from a random number generator, so that later draws differ"
    return Lead("outside-the-trace", "rng", scene.rank, a, b, why=why)


def _batch(scene: Scene, apart: Integers, unpaired: Unpaired) -> Lead | None:
    """The batch, where that is the first pair that differs: what one arm alone did before it only made it another."""
    a, b = scene.pair(int(apart[0]))
    if a.kind != "batch":
        return None
    why = "the batch differs before anything was computed from it"
    first = apart[:1]
    wrote = (
        _read_by(scene.a, unpaired.a, _rows(scene, first, 0)),
        _read_by(scene.b, unpaired.b, _rows(scene, first, 1)),
    )
    if len(wrote[0]) or len(wrote[1]):
        _, row_a, row_b = _first(scene, *wrote)
        events = _events(scene, row_a, row_b)
        event = events[0] or events[1]
        site = f" ({one_line(event.site, 120)})" if event is not None and event.site else ""
        why = f"{why}; {_alone(*events)}{site} and wrote it"
    return Lead("outside-the-trace", "data", scene.rank, a, b, tuple(range(len(a.inputs))), why=why)


def _alone(a: TraceEvent | None, b: TraceEvent | None) -> str:
    event = a or b
    assert event is not None
    where = f" in {one_line(event.scope, 120)}" if event.scope else ""
    return f"{one_line(event.op, 120)}{where} happened in {'A' if a is not None else 'B'} alone"
