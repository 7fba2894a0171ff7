"""Recomputed events held against their forward, within one arm.

A part of a forward pass may be recomputed, and a recomputation may end as soon as it has what it needs; so an event is
looked for among the forward's by what went in. One that finds its inputs there, and none of the outputs, is a finding.
"""

from __future__ import annotations

import numpy

from detrun.compare.trace_align import content_hashes
from detrun.compare.trace_differ import doubtful_parts
from detrun.compare.trace_summary import Lead
from detrun.records.trace_table import Digests, Integers, StepTable


def recompute_findings(table: StepTable, rank: int, arm: str, most: int) -> list[Lead]:
    """At most `most` recomputed events of a step whose outputs are not those of their forward.

    A lead's `a` is the forward event and its `b` the recomputed one, both of the same arm.
    """
    phases = table.texts["phase"]
    code = {value: code for code, value in enumerate(phases.values)}
    if "recompute" not in code or "forward" not in code:
        return []
    again = numpy.flatnonzero(phases.codes == code["recompute"])
    first = numpy.flatnonzero(phases.codes == code["forward"])
    first = first[numpy.isin(_place(table, first), _place(table, again))]
    if not len(again) or not len(first):
        return []
    flagged = numpy.concatenate([[0], numpy.cumsum(doubtful_parts(table))])
    trusted = flagged[table.parts.offsets[1:]] == flagged[table.parts.offsets[:-1]]
    again = again[trusted[again]]
    hashes_again, hashes_first = (content_hashes(table, table, rows, rng=False) for rows in (again, first))
    inputs_again = _joined(_place(table, again), hashes_again["inputs"])
    inputs_first = _joined(_place(table, first), hashes_first["inputs"])
    whole_again = _joined(_place(table, again), hashes_again["everything"])
    whole_first = _joined(_place(table, first), hashes_first["everything"])
    wrong = numpy.isin(inputs_again, inputs_first) & ~numpy.isin(whole_again, whole_first)
    found: list[Lead] = []
    for at in numpy.flatnonzero(wrong)[:most].tolist():
        origin = int(first[numpy.flatnonzero(inputs_first == inputs_again[at])[0]])
        forward, recomputed = table.event(origin), table.event(int(again[at]))
        outputs = tuple(
            number
            for number, (left, right) in enumerate(zip(forward.outputs, recomputed.outputs, strict=False))
            if left != right
        )
        drawn = forward.rng != recomputed.rng
        why = f"in arm {arm} its recomputation has the forward's inputs and other outputs" + (
            ": the random number generator was in another state" if drawn else ""
        )
        role, kind = ("outside-the-trace", "rng") if drawn else ("origin", "recompute")
        found.append(Lead(role, kind, rank, forward, recomputed, (), outputs, None, why))  # type: ignore[arg-type]
    return found


def _place(table: StepTable, rows: Integers) -> Integers:
    """A number for the micro-batch, scope and operation of rows."""
    scopes, ops = table.texts["scope"], table.texts["op"]
    span = max(1, len(ops.values)) * max(1, len(scopes.values))
    place: Integers = table.numbers["microbatch"][rows].astype(numpy.int64) * span
    place += scopes.codes[rows].astype(numpy.int64) * max(1, len(ops.values)) + ops.codes[rows]
    return place


def _joined(places: Integers, hashes: Digests) -> Digests:
    """Place and content in one number."""
    joined: Digests = hashes ^ (places.astype(numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15))
    return joined
