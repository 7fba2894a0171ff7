"""What each pass of a localization says, as findings: the way down, the bytes, what else was seen, what was not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from detrun.compare.folding import ranks_in_words
from detrun.compare.trace_summary import Lead, TraceComparison
from detrun.experiments.localize_bytes import EventReading, TensorReading
from detrun.records.jobs import ExperimentFile
from detrun.records.verdict import Finding, FirstDivergence, Verdict

if TYPE_CHECKING:
    from detrun.experiments.localize_verdict import Traced

_NAMES = {2: "semantic", 3: "modules", 4: "operators", 5: "kernels"}
MOST = 100
"""Entries of a list in a finding."""


def metrics_finding(base: Verdict, first: FirstDivergence, id: str) -> Finding:
    """Level 1: the step, by what every run records."""
    ranks = base.arms[0].attempts[0].last_step if base.arms and base.arms[0].attempts else None
    return Finding(
        kind="descent",
        severity="info",
        where={"level": 1, "step": first.step, "ranks": first.ranks},
        what=f"metrics and state: step {first.step}, first in {first.stream}",
        evidence={"level": 1, "name": "metrics", "steps": [first.step, first.step], "ranks": first.ranks, "pass": id}
        | ({"last_step": ranks} if ranks else {}),
    )


def descent_finding(traced: Traced) -> Finding:
    """One traced pass. One that keeps tensors looks at the same events again, and is no level of its own."""
    comparison = traced.comparison
    origins = comparison.lead is not None and comparison.lead.role == "origin"
    counted = sum(reading.equal for reading in comparison.readings)
    return Finding(
        kind="kept-pass" if traced.keeps else "descent",
        severity="info",
        where={"level": traced.level, "path": f"passes/{traced.place.path.name}"},
        what=f"level {traced.level}, pass {traced.place.path.name}: {comparison.events:,} events, {counted:,} equal",
        evidence={
            "level": traced.level,
            "name": _NAMES.get(traced.level, ""),
            "pass": traced.place.path.name,
            "events": comparison.events,
            "equal": counted,
            "differing": comparison.differing,
            "missing": sum(reading.missing for reading in comparison.readings),
            "extra": sum(reading.extra for reading in comparison.readings),
            "origins": 1 + len(comparison.others) if origins else 0,
            "steps": list(traced.window.steps),
            "ranks": None if traced.window.ranks is None else list(traced.window.ranks),
        },
    )


def observer_findings(passes: Sequence[Traced], first_step: int) -> list[Finding]:
    """Whether looking changed the run: a traced arm must carry the bits of the untraced one as long as the untraced
    arms agree with each other. Where the traced arms part from each other by then, it is the fault that came earlier.
    """
    findings = []
    for traced in passes:
        own = traced.verdict.first_divergence
        changed = traced.observer.changed_before(first_step if own is None else min(first_step, own.step))
        for parting in changed:
            what = (
                f"pass {traced.place.path.name}: arm {parting.arm} differs from its untraced run at step "
                f"{parting.step} ({parting.stream}), where the untraced arms are equal, and so are the traced ones: "
                "the trace changed the run"
            )
            where: dict[str, Any] = {"arm": parting.arm, "step": parting.step}
            findings.append(Finding(kind="observer", severity="not-verified", where=where, what=what))
    passes = [traced for traced in passes if not traced.broken]
    if not findings and passes:
        compared = sum(traced.observer.compared for traced in passes)
        repeated = [arm for arm in ("a", "b") if all(traced.observer.repeats(arm) for traced in passes)]
        same = f"; arm {repeated[0]} repeated itself to the last bit" if len(repeated) == 1 else ""
        same = "; each arm repeated itself to the last bit" if len(repeated) > 1 else same
        what = f"traced runs carry the same bits as untraced ones up to where the arms part{same}"
        evidence = {"compared": compared, "repeats": repeated}
        findings.append(Finding(kind="observer", severity="info", what=what, evidence=evidence))
    return findings


def repeats_finding(passes: Sequence[Traced]) -> list[Finding]:
    """How often the fault came back, where that was not always."""
    passes = [traced for traced in passes if not traced.broken]
    came = sum(traced.verdict.first_divergence is not None for traced in passes)
    if came == len(passes):
        return []
    what = f"the fault came back in {came} of {len(passes)} traced passes"
    return [Finding(kind="repeats", severity="warning", what=what, evidence={"came_back": came, "of": len(passes)})]


def byte_findings(
    lead: Lead, readings: Sequence[EventReading], settled: EventReading | None, tries: int
) -> list[Finding]:
    """What the kept tensors say: of the settled event each part that differs; else why they settle nothing."""
    if not tries:
        return []
    if settled is None:
        why = next((reading.missing for reading in readings if reading.missing), None)
        why = why or "where the digests differed, the bytes that were kept do not, or no longer with equal inputs"
        what = f"the bytes do not settle it ({tries} pass{'es' if tries > 1 else ''}): {why}"
        return [Finding(kind="bytes", severity="warning", what=what)]
    side = "output" if lead.role == "origin" else "input"
    differing = settled.differing(side) or settled.differing("output" if side == "input" else "input")
    findings = [_byte_finding(settled, tensor) for tensor in differing[:MOST]]
    a, b = settled.a, settled.b
    if a is not None and b is not None and a.launched is not None and b.launched is not None:
        same = (a.launched, a.settings) == (b.launched, b.settings)
        what = "the same in both arms" if same else "other kernels or sub-operators in the arms"
        settings = {
            name: [each.get(name) for each in (a.settings or {}, b.settings or {})]
            for name in sorted({*(a.settings or {}), *(b.settings or {})})
            if (a.settings or {}).get(name) != (b.settings or {}).get(name)
        }
        evidence = {"level": 5, "a": list(a.launched), "b": list(b.launched), "settings": settings}
        findings.append(Finding(kind="kernels", severity="info", what=what, evidence=evidence))
    return findings


def _byte_finding(reading: EventReading, tensor: TensorReading) -> Finding:
    name = f"{tensor.side} {tensor.index}{f' ({tensor.part})' if tensor.part else ''}"
    where: dict[str, Any] = {"rank": reading.rank, "step": reading.key[0], "tensor": name}
    if tensor.difference is None:
        return Finding(kind="bytes", severity="divergence", where=where, what=f"{name}: of another dtype or shape")
    found = tensor.difference
    evidence = {
        "tensor": name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "elements": found.elements,
        "differing": found.differing,
        "max_ulp": found.max_ulp,
        "min_ulp": found.min_ulp,
        "ulps": found.ulps,
        "rows": list(found.rows),
        "rows_total": found.differing_rows,
        "permutation": found.permutation,
        "nan": found.nan,
        "signed_zeros": found.signed_zero,
        "first": list(found.first) if found.first is not None else None,
        "bitmap": found.bitmap,
    }
    what = f"{name}: {found.differing:,} of {found.elements:,} elements differ"
    return Finding(kind="bytes", severity="divergence", where=where, what=what, evidence=evidence)


def summary_findings(comparison: TraceComparison, lead: Lead, ranks: int) -> list[Finding]:
    """The other origins, the table of the guilty operation, the way the difference went on, recomputations."""
    findings = []
    if comparison.others:
        places = [
            {"op": each.event.op, "scope": each.event.scope, "rank": each.rank, "step": each.event.step}
            for each in comparison.others[:MOST]
            if each.role == lead.role
        ]
        groups = [{**asdict(group), "reading": group.reading} for group in comparison.groups[:MOST]]
        what = f"{len(comparison.others)} more places part by themselves"
        evidence = {"places": places, "groups": groups}
        findings.append(Finding(kind="spread", severity="info", what=what, evidence=evidence))
    if comparison.table:
        rows = _table(comparison)
        what = f"calls of {lead.event.op}: which were clean and which were not"
        findings.append(Finding(kind="clean-table", severity="info", what=what, evidence={"rows": rows}))
    if comparison.spread:
        evidence = {"rows": [asdict(row) for row in comparison.spread[:MOST]]}
        what = f"the difference went on through {len(comparison.spread)} scopes"
        findings.append(Finding(kind="propagation", severity="info", what=what, evidence=evidence))
    for each in comparison.recompute[:MOST]:
        event = each.event
        what = (
            f"{ranks_in_words([each.rank], ranks)}: the recomputation of {event.op} in {event.scope or 'no module'} "
            f"(step {event.step}) differs from its forward within one arm"
        )
        where = {"rank": each.rank, "step": event.step}
        findings.append(Finding(kind="recompute", severity="warning", where=where, what=what))
    return findings


def _table(comparison: TraceComparison) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for each in comparison.table[:MOST]:
        value = f"{each.signature} {each.phase}"
        rows.append({"by": "", "value": value, "clean": each.clean, "differing": each.differing})
    ranks = sorted({rank for row in comparison.table for rank in (*row.clean_ranks, *row.differing_ranks)})
    if len(ranks) > 1:
        for rank in ranks[:MOST]:
            clean = sum(rank in row.clean_ranks for row in comparison.table)
            differing = sum(rank in row.differing_ranks for row in comparison.table)
            rows.append({"by": "rank", "value": str(rank), "clean": clean, "differing": differing})
    return rows


def coverage_finding(passes: Sequence[Traced], experiment: ExperimentFile) -> Finding:
    """What was captured, and what is known to be missing from it: of all passes."""
    not_captured: list[str] = []
    opaque: dict[str, int] = {}
    for traced in passes:
        coverage = traced.comparison.coverage
        not_captured += [text for text in coverage.get("not_captured", []) if text not in not_captured]
        for name, count in coverage.get("opaque", {}).items():
            opaque[name] = max(opaque.get(name, 0), count)
    last = passes[-1] if passes else None
    steps = list(last.window.steps) if last else []
    if last and (last.window.steps != (1, experiment.steps)):
        not_captured.append(f"steps outside of {steps[0]} to {steps[1]}" if steps[0] != steps[1] else "other steps")
    ranks = last.window.ranks if last else None
    if ranks is not None:
        left = [rank for rank in range(experiment.ranks) if rank not in ranks]
        if left:
            not_captured.append(ranks_in_words(left, experiment.ranks))
    evidence = {
        "level": last.level if last else None,
        "steps": steps,
        "ranks": None if ranks is None else list(ranks),
        "not_captured": not_captured,
        "opaque": opaque,
    }
    what = f"not captured: {'; '.join(not_captured)}" if not_captured else "everything that the tracer knows of"
    return Finding(kind="coverage", severity="info", what=what, evidence=evidence)
