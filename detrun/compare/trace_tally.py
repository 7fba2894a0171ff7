"""For one operation: in which phases, with which shapes, dtypes and layouts, and on which ranks it did and did not give
equal outputs for equal inputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy

from detrun.compare.trace_align import align
from detrun.compare.trace_summary import CleanRow
from detrun.records.trace_reader import TraceFile

MOST_ROWS = 60
MOST_SCOPES = 20


@dataclass
class Tally:
    """Counts of one phase and signature. ranks: how many events were clean and how many differed, by rank."""

    scopes: dict[str, None] = field(default_factory=dict)
    ranks: dict[int, tuple[int, int]] = field(default_factory=dict)
    received: int = 0


Tallies = dict[tuple[str, str], Tally]


def tally(a: TraceFile, b: TraceFile, step: int, op: str) -> Tallies:
    """Counts one operation's events of a step on one rank. Empty where a trace lacks the step; RecordError where it
    cannot be read."""
    if a.step(step) is None or b.step(step) is None:
        return {}
    table, other = a.table(step), b.table(step)
    ops = table.texts["op"]
    if op not in ops.values:
        return {}
    alignment = align(table, other)
    mine = numpy.flatnonzero(ops.codes[alignment.rows_a] == ops.values.index(op))
    found = alignment.differences
    rows = alignment.rows_a[mine]
    counted: Tallies = {}
    phases, signatures, scopes = (table.texts[name] for name in ("phase", "signature", "scope"))
    # A step has few calls of one operation beside all its events.
    for row, received, differs in zip(
        rows.tolist(), found.inputs[mine].tolist(), found.outputs[mine].tolist(), strict=True
    ):
        entry = counted.setdefault((phases[row], signatures[row]), Tally())
        if len(entry.scopes) < MOST_SCOPES:
            entry.scopes[scopes[row]] = None
        if received:
            entry.received += 1
        else:
            clean, differing = entry.ranks.get(a.rank, (0, 0))
            entry.ranks[a.rank] = (clean, differing + 1) if differs else (clean + 1, differing)
    return counted


def table_of(parts: Iterable[Tallies]) -> list[CleanRow]:
    """The rows of the table from the tallies of all ranks: those with a difference first, then the most frequent."""
    merged: Tallies = {}
    for part in parts:
        for key, entry in part.items():
            whole = merged.setdefault(key, Tally())
            whole.scopes.update(entry.scopes)
            whole.received += entry.received
            whole.ranks.update(entry.ranks)
    rows = [
        CleanRow(
            phase=phase,
            signature=signature,
            scopes=tuple(entry.scopes)[:MOST_SCOPES],
            clean=sum(clean for clean, _ in entry.ranks.values()),
            differing=sum(differing for _, differing in entry.ranks.values()),
            received=entry.received,
            clean_ranks=tuple(sorted(rank for rank, (_, differing) in entry.ranks.items() if not differing)),
            differing_ranks=tuple(sorted(rank for rank, (_, differing) in entry.ranks.items() if differing)),
        )
        for (phase, signature), entry in merged.items()
    ]
    rows.sort(key=lambda row: (row.differing == 0, -row.differing - row.clean - row.received, row.phase, row.signature))
    return rows[:MOST_ROWS]
