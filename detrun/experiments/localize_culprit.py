"""The culprit of a localization: which event, where, in which role, and what is known of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from detrun.compare.trace_summary import Lead, TraceComparison
from detrun.errors import RecordError
from detrun.experiments.localize_bytes import EventReading
from detrun.records.environment_reader import read_environment
from detrun.records.layout import AttemptFolder
from detrun.records.trace_row import TraceEvent
from detrun.records.verdict import Finding

_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def culprit_of(
    lead: Lead,
    comparison: TraceComparison,
    reading: EventReading | None,
    causes: Sequence[Finding],
    attempt: AttemptFolder,
) -> dict[str, Any]:
    """The verdict's `culprit`. attempt: where the rank's coordinates are read."""
    event = lead.event
    best = causes[0].evidence if causes else {}
    return {
        "kind": lead.kind,
        "name": event.op,
        "names": [event.op],
        "scope": event.scope,
        "phase": event.phase,
        "rank": lead.rank,
        "ranks": ranks_of(lead, comparison),
        "coordinates": coordinates(attempt, lead.rank),
        "step": event.step,
        "microbatch": event.microbatch,
        "occurrence": event.occurrence,
        "call_site": call_site(lead, comparison),
        "role": lead.role,
        "after": _bracket(lead.after),
        "inputs": _inputs(event, reading) if lead.role == "origin" else None,
        "why": lead.why,
        "arms": [arm for arm, there in (("a", lead.a), ("b", lead.b)) if there is not None],
        "catalog": best.get("catalog"),
        "fix": best.get("fix"),
    }


def ranks_of(lead: Lead, comparison: TraceComparison) -> list[int]:
    """The ranks on which the same operation parts by itself, in the same role."""
    same = [each.rank for each in comparison.others if (each.event.op, each.role) == (lead.event.op, lead.role)]
    return sorted({lead.rank, *same})


def coordinates(attempt: AttemptFolder, rank: int) -> dict[str, Any] | None:
    """The rank's logical coordinates, where they are known."""
    try:
        return dict(read_environment(attempt.environment(rank), rank).coordinates) or None
    except RecordError:
        return None


def call_site(lead: Lead, comparison: TraceComparison) -> str | None:
    """`train.py:212 in combine`; None where no pass asked for call sites."""
    return lead.event.site or next(
        (each.event.site for each in comparison.others if each.event.op == lead.event.op and each.event.site), None
    )


def _bracket(event: TraceEvent | None) -> dict[str, Any] | None:
    if event is None:
        return None
    return {
        "op": event.op,
        "scope": event.scope,
        "phase": event.phase,
        "step": event.step,
        "microbatch": event.microbatch,
        "occurrence": event.occurrence,
    }


def _inputs(event: TraceEvent, reading: EventReading | None) -> str:
    """`3 tensors, 1.2 MB, equal`."""
    count = len(event.inputs)
    words = [f"{count} tensor{'' if count == 1 else 's'}"]
    if reading is not None and reading.a is not None:
        words.append(_bytes(sum(tensor.nbytes for tensor in reading.a.tensors if tensor.side == "input")))
    return ", ".join([*words, "equal"])


def _bytes(number: int) -> str:
    for unit, size in _UNITS:
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} bytes"
