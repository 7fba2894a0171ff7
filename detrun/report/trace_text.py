"""A comparison of traces as a person reads it: the answer, what brackets it, counts, coverage, what to do."""

from __future__ import annotations

from collections.abc import Sequence

from detrun.compare.folding import ranges, ranks_in_words
from detrun.compare.trace_summary import CleanRow, Lead, TraceComparison, shape_of_counts
from detrun.errors import ExitCode
from detrun.records.files import one_line
from detrun.records.trace_row import TraceEvent

LONG = 400
MOST_LINES = 12


def exit_code(comparison: TraceComparison) -> ExitCode:
    """0 where nothing differs and nothing is missing, 1 where something differs, 3 otherwise."""
    codes = {"identical": ExitCode.OK, "diverged": ExitCode.DIVERGED, "not-verified": ExitCode.NOT_VERIFIED}
    return codes[comparison.verdict]


def answer(comparison: TraceComparison) -> str:
    """The first line."""
    lead = comparison.lead
    if comparison.verdict == "diverged" and lead is not None:
        if comparison.pattern == "origin":
            word = "SUSPECT" if lead.role == "suspect" else "ORIGIN"
            return f"{word}  {place(lead)}"
        return f"DIFFERENT, no origin inside the trace  {_pattern_words(lead)}"
    if comparison.verdict == "diverged":
        return "DIFFERENT, no origin inside the trace"
    ranks = [reading.rank for reading in comparison.readings if reading.problem is None]
    if comparison.verdict == "identical":
        first, last = comparison.coverage["steps"]
        window = f"step {first}" if first == last else f"steps {first}-{last}"
        return (
            f"IDENTICAL  {_count(comparison.events, 'event')} of {_count(len(ranks), 'rank')} in both traces, {window}"
        )
    if comparison.events:
        return f"NOT VERIFIED  what both traces hold is equal, {_count(comparison.events, 'event')}; not all is there"
    return "NOT COMPARABLE"


def details(comparison: TraceComparison) -> list[tuple[str, str]]:
    """The lines below the answer, as (label, text); a label is empty where a line goes on with the one before."""
    lines: list[tuple[str, str]] = []
    lead = comparison.lead
    if lead is not None:
        lines += _lead_lines(lead)
        lines += _labelled("leads", _group_lines(comparison))
        lines += _labelled("by shape", [_clean_line(row) for row in _telling(comparison.table)])
        lines += _labelled("spread", _spread_lines(comparison))
    lines += _labelled("recomputed", [_recompute_line(found) for found in comparison.recompute])
    lines += _labelled("incomplete", [one_line(text, LONG) for text in comparison.incomplete])
    lines += _labelled("notes", [one_line(text, LONG) for text in comparison.notes])
    lines += [("compared", _counts(comparison))]
    lines += _labelled("not seen", _unseen(comparison))
    if comparison.hint:
        lines.append(("next", comparison.hint))
    return lines


def place(lead: Lead) -> str:
    """`aten.index_add.default in layers.1.moe, forward, rank 0, step 7, micro-batch 0, occurrence 1`."""
    event = lead.event
    where = f" in {_name(event.scope)}" if event.scope else ""
    return (
        f"{_name(event.op)}{where}, {_name(event.phase)}, rank {lead.rank}, step {event.step}, "
        f"micro-batch {event.microbatch}, occurrence {event.occurrence}"
    )


def _pattern_words(lead: Lead) -> str:
    if lead.role == "receiver":
        return f"first received by {place(lead)}"
    if lead.role == "uncaptured-producer":
        after = f" after {_event(lead.after)}" if lead.after is not None else ""
        return f"written unseen{after}, first read by {place(lead)}"
    kinds = {
        "data": "data from outside",
        "rng": "another random state",
        "control-flow": "another order of calls",
        "scalar": "another number from outside",
        "parameter": "another parameter from before",
    }
    return f"{kinds.get(lead.kind, 'from outside')}, first at {place(lead)}"


def _lead_lines(lead: Lead) -> list[tuple[str, str]]:
    event = lead.event
    lines = [("why", one_line(lead.why, LONG))]
    if event.site:
        lines.append(("called", _name(event.site)))
    if lead.inputs or lead.outputs:
        parts = [
            f"{side}{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"
            for side, numbers in (("input", lead.inputs), ("output", lead.outputs))
            if numbers
        ]
        lines.append(("differing", " and ".join(parts)))
    lines.append(("tensors", one_line(event.signature, LONG)))
    if event.scalars:
        lines.append(("arguments", one_line(event.scalars, LONG)))
    if event.group or event.peer >= 0:
        lines.append(("with", f"ranks {_name(event.group)}" if event.group else f"rank {event.peer}"))
    if event.flags:
        lines.append(("flags", _name(event.flags)))
    if lead.after is not None:
        lines.append(("between", f"{_event(lead.after)}, which matches, and {_event(event)}"))
    return lines


def _group_lines(comparison: TraceComparison) -> list[str]:
    """Only where there is more than the one lead."""
    if sum(group.count for group in comparison.groups) < 2:
        return []
    lines: list[str] = []
    for group in comparison.groups:
        scopes = ", ".join(_name(scope) or "outside modules" for scope in group.scopes[:4])
        more = f" and {len(group.scopes) - 4} more" if len(group.scopes) > 4 else ""
        reading = f"; {group.reading}" if group.reading else ""
        lines.append(
            f"{_name(group.op)}: {group.role} {group.count} ×, {ranks_in_words(group.ranks)}, {scopes}{more}{reading}"
        )
    return lines


def _telling(rows: Sequence[CleanRow]) -> list[CleanRow]:
    return [row for row in rows if row.clean or row.differing]


def _clean_line(row: CleanRow) -> str:
    ranks = []
    if row.differing_ranks:
        ranks.append(f"differs on {ranks_in_words(row.differing_ranks)}")
    if row.clean_ranks:
        ranks.append(f"clean on {ranks_in_words(row.clean_ranks)}")
    counts = f"{row.differing} of {row.differing + row.clean} differ with equal inputs"
    return f"{_name(row.phase)} {one_line(row.signature, 160)}: {counts} ({', '.join(ranks)})"


def _spread_lines(comparison: TraceComparison) -> list[str]:
    lead = comparison.lead
    lines = []
    for row in comparison.spread:
        if lead is not None and row.rank == lead.rank and row.seq == lead.event.seq:
            continue
        where = f" in {_name(row.scope)}" if row.scope else ""
        lines.append(
            f"rank {row.rank}, step {row.step}, micro-batch {row.microbatch}, {_name(row.phase)}: "
            f"{_name(row.op)}{where}"
        )
    return lines


def _recompute_line(lead: Lead) -> str:
    return f"{place(lead)}: {one_line(lead.why, LONG)}"


def _counts(comparison: TraceComparison) -> str:
    readings = comparison.readings
    equal, differing = sum(r.equal for r in readings), comparison.differing
    words = [f"{equal:,} equal", f"{differing:,} different"]
    for name, what in (("missing", "only in A"), ("extra", "only in B"), ("flagged", "flagged")):
        count = sum(getattr(reading, name) for reading in readings)
        if count:
            words.append(f"{count:,} {what}")
    skipped = sum(reading.skipped_steps for reading in readings)
    ranks = [reading.rank for reading in readings if reading.problem is None]
    by_digest = f"; {_count(skipped, 'step')} equal by digest" if skipped else ""
    levels = ranges(comparison.coverage.get("levels") or [])
    of = f"{ranks_in_words(ranks)}, level {levels}" if ranks else "no rank"
    return f"{_count(comparison.events, 'event')} of {of}: {', '.join(words)}{by_digest}"


def _unseen(comparison: TraceComparison) -> list[str]:
    coverage = comparison.coverage
    lines = []
    opaque = coverage.get("opaque")
    if opaque:
        lines.append(f"the inside of {one_line(shape_of_counts(opaque), LONG)}")
    lines += [one_line(text, LONG) for text in coverage.get("not_captured", ())]
    return lines


def _labelled(label: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    shown = list(texts[:MOST_LINES])
    if len(texts) > MOST_LINES:
        shown.append(f"… {len(texts) - MOST_LINES:,} more (--json has all)")
    return [(label if number == 0 else "", text) for number, text in enumerate(shown)]


def _event(event: TraceEvent) -> str:
    where = f" in {_name(event.scope)}" if event.scope else ""
    return f"{_name(event.op)}{where} (step {event.step}, {_name(event.phase)}, occurrence {event.occurrence})"


def _name(text: str) -> str:
    return one_line(text, 160)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
