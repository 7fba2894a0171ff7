"""Differences as findings: where the arms part, in which stream first, how far, and how it goes on."""

from __future__ import annotations

import statistics
from typing import Any

from detrun.compare.bits import distance
from detrun.compare.evidence import PairEvidence
from detrun.compare.folding import ranks_in_words
from detrun.compare.streams import BATCH, METRIC, RNG, STATE, StreamTally
from detrun.fingerprint.scalar import json_value
from detrun.records.metrics_line import Metric, shown_name
from detrun.records.verdict import Finding, FirstDivergence, MetricDifference, StateDifference, Value

MAX_SERIES = 1000
"""Points of a series kept in a verdict; a longer one keeps the worst of each stretch."""


def streams_in_order(pair: PairEvidence) -> list[StreamTally]:
    """A pair's differing streams by their first step, within a step in causal order."""
    return sorted(pair.streams.streams.values(), key=lambda tally: (tally.first_step, tally.stream.causal))


def order_of(pair: PairEvidence) -> tuple[int, int, tuple[int, int, str], str]:
    """Sort key that puts the pair with the earliest divergence first."""
    if pair.initial_differences:
        return (0, 0, (0, 0, ""), pair.streams.b)
    first = streams_in_order(pair)
    if not first:
        return (2, 0, (0, 0, ""), pair.streams.b)
    return (1, first[0].first_step, first[0].stream.causal, pair.streams.b)


def first_divergence(pair: PairEvidence) -> FirstDivergence:
    """The first step in which two arms differ; the pair must differ somewhere."""
    ordered = streams_in_order(pair)
    metrics = {tally.stream.name: metric_difference(tally) for tally in ordered if tally.stream.kind == METRIC}
    initial = pair.initial_differences
    if initial:
        return FirstDivergence(
            step=1,
            boundary="begin",
            stream=initial[0].component,
            ranks=sorted(set(initial[0].ranks)),
            arms=pair.arms,
            metrics=metrics,
            state=[
                _initial_state(difference.component, min(difference.ranks), difference.a, difference.b)
                for difference in initial
            ],
        )
    step = ordered[0].first_step
    here = [tally for tally in ordered if tally.first_step == step]
    return FirstDivergence(
        step=step,
        boundary="end",
        stream=ordered[0].stream.label,
        ranks=sorted(ordered[0].ranks),
        arms=pair.arms,
        metrics=metrics,
        state=[
            StateDifference(component=tally.stream.label, rank=min(tally.ranks), a=str(tally.a), b=str(tally.b))
            for tally in here
            if tally.stream.kind != METRIC
        ],
    )


def _initial_state(component: str, rank: int, a: str, b: str) -> StateDifference:
    stem, _, name = component.partition(".")
    return StateDifference(component=stem, name=name or None, rank=rank, a=a, b=b)


def metric_difference(tally: StreamTally) -> MetricDifference:
    """A metric's first difference, on the lowest rank that has it."""
    same = tally.a["dtype"] == tally.b["dtype"]
    # Of digits as printed nobody knows the bits between.
    printed = "printed" in tally.a or "printed" in tally.b
    apart = distance(tally.a["bits"], tally.b["bits"], tally.a["dtype"]) if same else None
    return MetricDifference(
        step=tally.first_step,
        ranks=sorted(tally.ranks),
        a=_value(tally.a),
        b=_value(tally.b),
        ulp=apart.ulp if apart and not printed else None,
        relative=apart.relative if apart else None,
        equal_to_decimals=apart.equal_to_decimals if apart else None,
    )


def _value(metric: Metric) -> Value:
    """The bits with the value that they stand for, whatever the record gave beside them."""
    bits, dtype = metric["bits"], metric["dtype"]
    # What a program wrote itself stood somewhere, and perhaps in decimals.
    beside = {key: metric[key] for key in ("printed", "place", "mean_of_steps") if key in metric}
    return Value(bits=bits, dtype=dtype, value=json_value(int(bits, 16), dtype), **beside)


def divergence_findings(pair: PairEvidence, ranks: int) -> list[Finding]:
    """One finding a differing stream, in order, then what they say together."""
    findings = [
        Finding(
            kind="initial-state",
            severity="divergence",
            where={
                "arms": pair.arms,
                "ranks": sorted(difference.ranks),
                "step": 1,
                "boundary": "begin",
                "stream": difference.component,
            },
            what=_initial_words(difference.component, ranks_in_words(difference.ranks, ranks)),
            evidence={"a": difference.a, "b": difference.b},
        )
        for difference in pair.initial_differences
    ]
    ordered = streams_in_order(pair)
    findings += [_stream_finding(tally, pair, ranks) for tally in ordered]
    if ordered:
        findings += _together(pair, ordered)
    return findings


def _initial_words(component: str, where: str) -> str:
    stem, _, name = component.partition(".")
    if stem == "rng":
        return f"the RNG stream {name} already differs before the first step ({where})"
    verb = "differ" if stem.endswith("s") else "differs"
    return f"the {component} already {verb} before the first step ({where})"


def _stream_finding(tally: StreamTally, pair: PairEvidence, ranks: int) -> Finding:
    last = max(pair.streams.compared)
    later = [step for step in pair.streams.compared if step > tally.first_step]
    agree = [step for step in later if step not in tally.steps]
    evidence: dict[str, Any] = {
        "a": tally.a,
        "b": tally.b,
        "steps_differing": len(tally.steps),
        "later_steps_equal": len(agree),
        "last_step_differing": tally.last_step,
        "last_step_compared": last,
    }
    what = f"{_subject(tally)} from step {tally.first_step} on {ranks_in_words(tally.ranks, ranks)}"
    if tally.stream.kind == METRIC:
        difference = metric_difference(tally)
        evidence |= {
            "a": difference.a.model_dump(),
            "b": difference.b.model_dump(),
            "ulp": difference.ulp,
            "relative": difference.relative,
            "equal_to_decimals": difference.equal_to_decimals,
            "visible_with_decimals": {str(key): tally.visible.get(key) for key in (4, 6)},
            "ulp_by_step": series(tally),
        }
        growth = later_ulps(tally)
        if growth:
            evidence["later_ulp"] = growth
        if tally.a["dtype"] != tally.b["dtype"]:
            what += f", as {tally.a['dtype']} in arm {pair.streams.a} and {tally.b['dtype']} in arm {pair.streams.b}"
        elif difference.ulp is not None:
            what += f", {difference.ulp:,} ULP apart"
    if agree:
        what += f"; {len(agree):,} of {len(later):,} later steps agree"
    where: dict[str, Any] = {
        "arms": pair.arms,
        "step": tally.first_step,
        "ranks": sorted(tally.ranks),
        "stream": tally.stream.label,
    }
    if tally.stream.kind == METRIC:
        where["metric"] = tally.stream.name
    return Finding(kind=tally.stream.kind, severity="divergence", where=where, what=what, evidence=evidence)


def _subject(tally: StreamTally) -> str:
    kind, name = tally.stream.kind, shown_name(tally.stream.name)
    if kind == BATCH:
        return "the input data differs: batches"
    if kind == RNG:
        return "the RNG streams differ"
    if kind == STATE:
        return f"the {name} differ" if name.endswith("s") else f"the {name} state differs"
    if kind == METRIC:
        return f"{name} differs"
    return f"the {tally.stream.label} differ" if kind == "microbatches" else "a skipped step differs"


def series(tally: StreamTally) -> list[list[int]]:
    """[step, worst ULP over the ranks] of the steps that differ, at most MAX_SERIES of them."""
    points = [[step, at.ulp] for step, at in sorted(tally.steps.items()) if at.ulp is not None]
    width = -(-len(points) // MAX_SERIES) or 1
    stretches = (points[start : start + width] for start in range(0, len(points), width))
    return [max(stretch, key=lambda point: point[1]) for stretch in stretches]


def later_ulps(tally: StreamTally) -> dict[str, float | int] | None:
    """Smallest, median and largest worst-rank distance in ULP of the differing steps after the first."""
    later = [at.ulp for step, at in tally.steps.items() if step > tally.first_step and at.ulp is not None]
    if not later:
        return None
    return {"min": min(later), "median": statistics.median(later), "max": max(later), "steps": len(later)}


def _together(pair: PairEvidence, ordered: list[StreamTally]) -> list[Finding]:
    first = ordered[0]
    findings = []
    if first.stream.kind == BATCH:
        findings.append(
            Finding(
                kind="input-data",
                severity="info",
                where={"arms": pair.arms, "step": first.first_step},
                what="the input data differs first: the arms were not given the same batches",
            )
        )
    metrics = [tally.first_step for tally in ordered if tally.stream.kind == METRIC]
    where = {"arms": pair.arms, "step": first.first_step}
    if not metrics:
        what = f"invisible in the metrics: equal in all {len(pair.streams.compared):,} steps compared"
        findings.append(Finding(kind="invisible", severity="info", where=where, what=what))
    elif min(metrics) > first.first_step:
        what = f"invisible in the metrics until step {min(metrics)}"
        evidence = {"until": min(metrics)}
        findings.append(Finding(kind="invisible", severity="info", where=where, what=what, evidence=evidence))
    differing = {step for tally in ordered for step in tally.steps}
    later = [step for step in pair.streams.compared if step > first.first_step]
    agree = [step for step in later if step not in differing]
    if agree:
        how_many = f"all {len(later):,}" if len(agree) == len(later) else f"{len(agree):,} of the {len(later):,}"
        what = f"{how_many} later steps agree again in everything recorded"
        evidence = {"agree": len(agree), "later": len(later)}
        findings.append(Finding(kind="agrees-later", severity="info", where=where, what=what, evidence=evidence))
    return findings
