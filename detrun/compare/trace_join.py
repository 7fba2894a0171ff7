"""From what each rank's traces say to what the traces say: which rank's first difference came from which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from detrun.compare.folding import ranks_in_words
from detrun.compare.trace_shared import members
from detrun.compare.trace_summary import Lead, LeadGroup, Pattern, RankReading, SpreadRow, TraceComparison
from detrun.records.files import one_line

MOST_SPREAD = 60

_WEIGHT = {"origin": 0, "outside-the-trace": 0, "uncaptured-producer": 1, "receiver": 2, "suspect": 3}
"""Ranks have no common clock. Of leads in one step, an origin comes before what may have come from another rank on a
way that is not recorded."""

_HINTS = {
    "data": "hold the order and content of the data against each other: seeds, worker processes, the order of a set "
    "or of a folder",
    "rng": "hold the random streams of the step before it against each other: who drew from them, what restored them",
    "control-flow": "trace once more with the lines of the calls, and look for an order that is not fixed: a set, "
    "arrival of messages, a data-dependent branch",
    "scalar": "look for where the number comes from: a clock, an environment variable, a value read back from a device",
    "parameter": "hold the state where the window begins against each other: what wrote it ran before that, or unseen",
}


def join(readings: Sequence[RankReading]) -> TraceComparison:
    """Joins what all ranks say. A collective or a receive is an origin only if every member's inputs match."""
    by_rank = {reading.rank: reading for reading in readings}
    result = TraceComparison(readings=list(readings))
    leads: list[Lead] = []
    firsts: list[Lead] = []
    missing: dict[Lead, tuple[int, ...]] = {}
    for reading in readings:
        own: list[Lead] = []
        for lead in reading.leads:
            judged, unknown = _judged(lead, by_rank)
            if judged.role == "receiver" and not unknown:
                continue
            if unknown:
                missing[judged] = unknown
            own.append(judged)
        leads += own
        firsts += own[:1]
        result.recompute += reading.recompute
        result.notes += reading.notes
        result.incomplete += reading.incomplete
        if reading.problem is not None:
            result.incomplete.append(f"rank {reading.rank} cannot be compared: {reading.problem}")
    trusted = [lead for lead in firsts if lead.role != "suspect"] or firsts
    if trusted:
        first = min(trusted, key=_order)
        result.lead = first
        kept = [lead for lead in leads if lead != first and (lead.role != "suspect" or first.role == "suspect")]
        result.others = sorted(kept, key=lambda lead: (not _is_alike(lead, first), _order(lead)))
        result.pattern = _pattern(first)
    result.groups = _groups(leads, readings)
    result.spread = _spread(result.lead, readings)
    result.coverage = _coverage(readings)
    result.hint = _hint(result, missing)
    return result


def _judged(lead: Lead, by_rank: Mapping[int, RankReading]) -> tuple[Lead, tuple[int, ...]]:
    """The lead as the other members of its collective make it, and the members that cannot be asked."""
    if lead.kind != "collective" or lead.role != "origin" or lead.key is None:
        return lead, ()
    event = lead.event
    if event.kind == "recv":
        others: tuple[int, ...] | None = (event.peer,) if event.peer >= 0 else _senders(lead, by_rank)
    elif event.kind == "collective":
        others = members(event.group)
    else:
        others = ()
    if others is None:
        return lead, ()
    sources: list[int] = []
    unknown: list[int] = []
    for rank in others:
        if rank == lead.rank:
            continue
        answer = _inputs_differ(by_rank.get(rank), lead)
        if answer is None:
            unknown.append(rank)
        elif answer:
            sources.append(rank)
    if sources:
        why = f"its own inputs match, those of {ranks_in_words(sources)} do not"
        return replace(lead, role="receiver", why=why), ()
    if unknown:
        words = ranks_in_words(unknown)
        why = f"its own inputs match, and what {words} gave to it was not traced"
        return replace(lead, role="receiver", why=why), tuple(unknown)
    if len(others) > 1 or event.kind == "recv":
        return replace(lead, why="the inputs of every member match, its outputs do not"), ()
    return lead, ()


def _inputs_differ(reading: RankReading | None, lead: Lead) -> bool | None:
    """Whether a member's inputs to the collective differ; None if that is not known."""
    step = lead.event.step
    if reading is None or reading.problem is not None or step not in reading.steps:
        return None
    assert lead.key is not None
    if lead.key in reading.shared:
        return reading.shared[lead.key]
    return None if reading.shared_until is not None and step >= reading.shared_until else False


def _senders(lead: Lead, by_rank: Mapping[int, RankReading]) -> tuple[int, ...]:
    """Ranks that sent to this one in the step what differs: one of them is what a receive from anywhere got."""
    ends = f">{lead.rank}"
    return tuple(
        rank
        for rank, reading in by_rank.items()
        if any(key[0] == lead.event.step and key[2].endswith(ends) and inputs for key, inputs in reading.shared.items())
    )


def _order(lead: Lead) -> tuple[int, int, int, int]:
    event = lead.event
    return (event.step, _WEIGHT[lead.role], event.seq, lead.rank)


def _is_alike(lead: Lead, first: Lead) -> bool:
    return (lead.role, lead.event.op) == (first.role, first.event.op)


def _pattern(lead: Lead) -> Pattern:
    if lead.role in ("origin", "suspect"):
        return "origin"
    return "receiver" if lead.role == "receiver" else "outside"


def _groups(leads: Sequence[Lead], readings: Sequence[RankReading]) -> list[LeadGroup]:
    """Leads by operation and role, in the order of their first."""
    compared = sum(reading.problem is None for reading in readings)
    gathered: dict[tuple[str, str, str], list[Lead]] = {}
    for lead in sorted(leads, key=_order):
        gathered.setdefault((lead.event.op, lead.role, lead.kind), []).append(lead)
    return [
        LeadGroup(
            op=op,
            role=of[0].role,
            kind=of[0].kind,
            count=len(of),
            ranks=tuple(sorted({lead.rank for lead in of})),
            scopes=tuple(dict.fromkeys(lead.event.scope for lead in of)),
            phases=tuple(dict.fromkeys(lead.event.phase for lead in of)),
            steps=(min(lead.event.step for lead in of), max(lead.event.step for lead in of)),
            ranks_compared=compared,
        )
        for (op, _, _), of in gathered.items()
    ]


def _spread(lead: Lead | None, readings: Sequence[RankReading]) -> list[SpreadRow]:
    """How the difference went on: over the scopes of the lead's rank, then to each other rank."""
    if lead is None:
        return []
    own = [row for reading in readings if reading.rank == lead.rank for row in reading.spread]
    others = [reading.spread[0] for reading in readings if reading.rank != lead.rank and reading.spread]
    others.sort(key=lambda row: (row.step, row.seq, row.rank))
    return [*own[: MOST_SPREAD // 2], *others[: MOST_SPREAD - min(len(own), MOST_SPREAD // 2)]]


def _coverage(readings: Sequence[RankReading]) -> dict[str, Any]:
    """What was compared, and what the tracers say that they did not see."""
    steps = sorted({step for reading in readings for step in reading.steps})
    opaque: dict[str, int] = {}
    not_captured: dict[str, None] = {}
    views = 0
    for reading in readings:
        for arm in reading.coverage.values():
            named = arm.get("opaque")
            for name, count in named.items() if isinstance(named, dict) else ():
                opaque[str(name)] = opaque.get(str(name), 0) + (count if type(count) is int else 1)
            texts = arm.get("not_captured")
            not_captured.update(dict.fromkeys(str(text) for text in texts) if isinstance(texts, list) else {})
            skipped = arm.get("skipped_views")
            views += skipped if type(skipped) is int else 0
    compared = [reading.rank for reading in readings if reading.problem is None and reading.steps]
    return {
        "ranks": compared,
        "steps": [steps[0], steps[-1]] if steps else [],
        "levels": sorted({reading.level for reading in readings}),
        "events": sum(reading.events for reading in readings),
        "flagged": sum(reading.flagged for reading in readings),
        "skipped_steps": sum(reading.skipped_steps for reading in readings),
        "skipped_views": views,
        "opaque": opaque,
        "not_captured": list(not_captured),
    }


def _hint(result: TraceComparison, missing: Mapping[Lead, tuple[int, ...]]) -> str:
    """What to do next."""
    lead = result.lead
    if lead is None:
        return "if the runs differ all the same, widen the window of steps" if result.verdict == "identical" else ""
    if lead.role == "receiver":
        return f"outside the capture: trace {ranks_in_words(missing.get(lead, ()))} as well"
    if lead.role == "uncaptured-producer":
        event = one_line(lead.event.op, 80)
        between = f" before {event}" if lead.after is None else f" between {one_line(lead.after.op, 80)} and {event}"
        return f"{_UNSEEN if result.coverage['levels'] == [_DEEPEST] else _OPERATORS}{between}"
    if lead.role == "outside-the-trace":
        return _HINTS.get(lead.kind, "")
    if lead.role == "suspect":
        return "run once more with memory filled before use: what then changes was made from uninitialized memory"
    if result.coverage["levels"] != [_DEEPEST]:
        return f"{_OPERATORS} inside of it"
    return "keep its tensors in both arms, and compare their bytes"


_DEEPEST = 4
_OPERATORS = "trace the operators (level 4)"
_UNSEEN = "look for what runs unseen (an extension's kernel, a compiled region, a fused step)"
