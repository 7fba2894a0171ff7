"""Whether a difference went on to what is trained, or ended where only a log reads it.

A program may keep a clock in a tensor, or a counter: it differs between equal runs, and nothing follows from it. It may
also gather the clocks of all ranks and print the slowest: a collective is what is trained only where that reads it, or
where nothing better is known.
"""

from __future__ import annotations

from detrun.compare.trace_sources import Scene
from detrun.records.trace_table import Integers

MOST_SOURCES = 20
"""Sources that are followed, in order."""

_PHASES = frozenset({"backward", "recompute", "optimizer"})
_KINDS = frozenset({"collective", "send", "parameter", "optimizer"})


def weightier(scene: Scene, sources: Integers, apart: Integers, *, origins: bool = False) -> int | None:
    """The first of `sources` (pairs whose input differs by itself) from which the difference went on to a gradient or a
    parameter, else to another rank; None where it did from none of those looked at. Where nothing of these differs in
    this step at all, the first source is as good as any.

    apart: the pairs that differ, in order. origins: whether an operation gave another result on equal inputs, which
    explains more than what other ranks may do with what they are sent.
    """
    if not any(_is_trained(scene, int(number)) for number in apart):
        return int(sources[0])
    for kinds in (_KINDS - {"collective"}, _KINDS)[: 1 if origins else 2]:
        for source in sources[:MOST_SOURCES].tolist():
            if _reaches(scene, source, apart, kinds):
                return int(source)
    return None


def _reaches(scene: Scene, source: int, apart: Integers, kinds: frozenset[str]) -> bool:
    """Whether what is trained reads, directly or through others, what the event of this pair wrote."""
    if _is_trained(scene, source, kinds):
        return True
    table, rows = scene.a.table, scene.alignment.rows_a
    seq, parts = table.numbers["seq"], table.parts
    tainted = {int(seq[rows[source]])}
    for number in apart[apart > source].tolist():
        row = int(rows[number])
        begin, end = int(parts.producer_offsets[row]), int(parts.producer_offsets[row + 1])
        back = parts.producers[begin:end]
        own = int(seq[row])
        if any(own - int(each) in tainted for each in back if each > 0):
            if _is_trained(scene, number, kinds):
                return True
            tainted.add(own)
    return False


def _is_trained(scene: Scene, number: int, kinds: frozenset[str] = _KINDS) -> bool:
    row = int(scene.alignment.rows_a[number])
    texts = scene.a.table.texts
    return texts["phase"][row] in _PHASES or texts["kind"][row] in kinds
