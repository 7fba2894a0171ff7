"""What ranks have to know of each other: of each collective, send and receive that differs, whether its inputs do."""

from __future__ import annotations

import numpy

from detrun.compare.trace_align import occurrences
from detrun.compare.trace_sources import Scene
from detrun.compare.trace_summary import CollectiveKey, RankReading
from detrun.records.trace_table import Integers, StepTable

MOST_SHARED = 20_000

_KINDS = ("collective", "send", "recv")


def note_shared(reading: RankReading, scene: Scene) -> None:
    """Notes the step's collectives, sends and receives that differ."""
    found = scene.alignment.differences
    table = scene.a.table
    rows, keys = shared_keys(table, scene.rank)
    if not len(rows):
        return
    pair_of = numpy.full(len(table), -1, numpy.int64)
    pair_of[scene.alignment.rows_a] = numpy.arange(len(scene.alignment.rows_a))
    pairs = pair_of[rows]
    there = pairs >= 0
    apart = numpy.zeros(len(rows), bool)
    apart[there] = found.any[pairs[there]]
    # An event that one arm lacks cannot be said to match.
    apart |= ~there
    for at in numpy.flatnonzero(apart).tolist():
        if len(reading.shared) >= MOST_SHARED:
            reading.shared_until = min(table.step, reading.shared_until or table.step)
            return
        reading.shared[keys(at)] = bool(pairs[at] < 0 or found.inputs[pairs[at]])


def shared_key(scene: Scene, row: int) -> CollectiveKey | None:
    """What a collective, send or receive in a row of A is joined by."""
    rows, keys = shared_keys(scene.a.table, scene.rank)
    at = int(numpy.searchsorted(rows, row))
    return keys(at) if at < len(rows) and rows[at] == row else None


class _Keys:
    """The keys of some rows; made one at a time, as few are needed."""

    def __init__(self, table: StepTable, rank: int, rows: Integers, order: Integers) -> None:
        self._table, self._rank, self._rows, self._order = table, rank, rows, order

    def __call__(self, at: int) -> CollectiveKey:
        table, row = self._table, int(self._rows[at])
        kind, peer = table.texts["kind"][row], int(table.numbers["peer"][row])
        if kind == "collective":
            return (table.step, table.texts["op"][row], table.texts["group"][row], int(self._order[at]))
        way = f"{self._rank}>{peer}" if kind == "send" else f"{peer}>{self._rank}"
        return (table.step, "", way, int(self._order[at]))


def shared_keys(table: StepTable, rank: int) -> tuple[Integers, _Keys]:
    """(rows of the collectives, sends and receives of a step, the key of each)."""
    kinds = table.texts["kind"]
    codes = [kinds.values.index(kind) for kind in _KINDS if kind in kinds.values]
    rows = numpy.flatnonzero(numpy.isin(kinds.codes, codes)) if codes else numpy.zeros(0, numpy.int64)
    if not len(rows):
        return rows, _Keys(table, rank, rows, rows)
    ops, groups = table.texts["op"].codes[rows], table.texts["group"].codes[rows]
    together = kinds.codes[rows] == (kinds.values.index("collective") if "collective" in kinds.values else -1)
    # A send or receive is counted by its direction and peer, whatever it is called.
    columns = numpy.stack(
        [
            numpy.where(together, -1, kinds.codes[rows]),
            numpy.where(together, ops, table.numbers["peer"][rows]),
            numpy.where(together, groups, 0),
        ],
        axis=1,
    )
    _, combined = numpy.unique(columns, axis=0, return_inverse=True)
    return rows, _Keys(table, rank, rows, occurrences(combined.reshape(-1)))


def members(group: str) -> tuple[int, ...] | None:
    """The ranks of "0-3" or "0-1,6"; None where the text is no list of ranks."""
    ranks: list[int] = []
    for span in group.split(","):
        first, dash, last = span.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(span) > 24:
            return None
        begin, end = int(first), int(last) if dash else int(first)
        if end < begin or end - begin + len(ranks) > 1_000_000:
            return None
        ranks += range(begin, end + 1)
    return tuple(ranks)
