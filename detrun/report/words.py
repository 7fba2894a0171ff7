"""The sentences of a report, shared by terminal and HTML: what the verdict says, in words, from the verdict alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from detrun.compare.bits import decode, hexadecimal
from detrun.compare.chance import pairs_for_bound
from detrun.compare.folding import ranks_in_words
from detrun.records.jobs import ExperimentFile
from detrun.records.metrics_line import DERIVED, stem_of
from detrun.records.verdict import Finding, Verdict
from detrun.report import against_words

_STATE_WORDS = {"optimizer": "optimizer state", "RNG": "RNG streams", "batch": "batches"}


def short_id(id: str) -> str:
    """The last part of an experiment's id, which commands take too."""
    return id.rpartition("-")[2] or id


def listed(words: Sequence[str], last: str = "and") -> str:
    """`a, b and c`."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"


def plural(number: int, word: str, words: str | None = None) -> str:
    """`1 step`, `30 steps`."""
    return f"{number:,} {word if number == 1 else words or f'{word}s'}"


def sentence(verdict: Verdict, experiment: ExperimentFile) -> str:
    """The answer without its leading word (IDENTICAL, DIVERGED, NOT VERIFIED)."""
    if verdict.verdict == "identical":
        return _identical(verdict, experiment)
    if verdict.verdict == "diverged":
        return _diverged(verdict, experiment)
    if unasked := against_words.unasked(verdict):
        return unasked
    jobs = verdict.of_kind("job")
    if jobs:
        arms = listed([f"arm {finding.where.get('arm')}" for finding in jobs])
        return f"{arms} did not finish, so nothing is proved:"
    if verdict.of_kind("nothing-compared"):
        return "there is nothing that both arms recorded:"
    return "nothing differs in what was recorded, but it does not prove identity:"


def _identical(verdict: Verdict, experiment: ExperimentFile) -> str:
    ranks = plural(experiment.ranks, "rank")
    coverage = next(iter(verdict.of_kind("coverage")), None)
    evidence = coverage.evidence if coverage else {}
    if "source" in evidence:
        steps = plural(int(evidence.get("steps", experiment.steps)), "step")
        return f"{verdict.recipe}: {steps}, {by_source(evidence)}"
    steps = plural(int(evidence.get("steps", experiment.steps)), "step")
    if verdict.of_kind("micro-batches"):
        numbers = verdict.of_kind("micro-batches")[0].evidence
        count = plural(int(numbers["micro_batches"]), "micro-batch", "micro-batches")
        steps = f"{count} in {numbers['optimizer_steps']:,} optimizer steps"
    parts = [plural(len([name for name in evidence.get("metrics", ()) if stem_of(str(name)) == name]), "metric")]
    if evidence.get("batch"):
        parts.append(_STATE_WORDS["batch"])
    state = [*evidence.get("state", ())] if evidence.get("state_every") else []
    parts += [_STATE_WORDS.get(name, str(name)) for name in state]
    if evidence.get("rng"):
        parts.append(_STATE_WORDS["RNG"])
    every = evidence.get("state_every")
    how_often = f" (state every {every} steps)" if isinstance(every, int) and every > 1 else ""
    return f"{verdict.recipe}: {ranks} × {steps}, every bit of {listed(parts)}{how_often}"


def by_source(coverage: dict[str, Any]) -> str:
    """What an `identical` without the recorder covers."""
    held = listed([f"{name} ({words})" for name, words in coverage.get("resolution", {}).items()])
    return f"{held} as {coverage['source']} has them; no state was compared"


def _diverged(verdict: Verdict, experiment: ExperimentFile) -> str:
    first = verdict.first_divergence
    if first is None:
        return "the arms differ"
    who = ranks_in_words(first.ranks, experiment.ranks)
    if first.boundary == "begin":
        finding = verdict.of_kind("initial-state")[0]
        return f"before the first step, {who}: {finding.what.partition(' before')[0]}"
    metric_steps = [metric.step for metric in first.metrics.values()]
    if first.stream == "batch":
        text = f"at step {first.step}, {who}, first seen in the batch: the input data differs"
    elif first.stream in first.metrics:
        return f"at step {first.step}, {who}, first seen in {first.stream}"
    else:
        text = f"at step {first.step}, {who}, first seen in the {_STATE_WORDS.get(first.stream, first.stream)}"
    if not metric_steps:
        return f"{text}; in no metric"
    return f"{text}; in a metric at step {min(metric_steps)}"


def plain_first(rows: Sequence[Row]) -> list[Row]:
    """The rows without derived metrics, except for one that is the first metric to differ or alone of its name."""
    named = [row for row in rows if "metric" in row.finding.where]
    stems = {row.stream for row in named}
    return [
        row
        for row in rows
        if row not in named or row is named[0] or stem_of(row.stream) == row.stream or stem_of(row.stream) not in stems
    ]


@dataclass(frozen=True)
class Row:
    """One line of the table of first differences. values: hexadecimal and decimal of each arm, or a digest."""

    step: int
    stream: str
    ranks: str
    a: tuple[str, str]
    b: tuple[str, str]
    apart: str
    finding: Finding


def first_rows(verdict: Verdict, experiment: ExperimentFile) -> list[Row]:
    """Each stream's first difference of the pair that parts first, in order of steps."""
    first = verdict.first_divergence
    if first is None:
        return []
    rows = []
    for finding in verdict.of_severity("divergence"):
        if finding.where.get("arms") != first.arms or finding.kind == "restore":
            continue
        ranks = finding.where.get("ranks", [])
        who = "all" if len(ranks) >= experiment.ranks > 1 else ranks_in_words(ranks).partition(" ")[2]
        step = 0 if finding.where.get("boundary") == "begin" else int(finding.where.get("step", 0))
        evidence = finding.evidence
        stream = str(finding.where.get("stream"))
        if "metric" in finding.where:
            a, b = value_words(evidence["a"]), value_words(evidence["b"])
            apart = _apart(finding)
        else:
            x, y = digest_words(evidence["a"], evidence["b"])
            a, b = (x, ""), (y, "")
            apart = "digest" if ":" in str(evidence["a"]) else ""
        rows.append(Row(step, stream, who, a, b, apart, finding))
    return rows


def value_words(value: dict[str, object]) -> tuple[str, str]:
    """A recorded number as exact hexadecimal and as decimals."""
    bits, dtype = str(value["bits"]), str(value["dtype"])
    if value.get("printed") is not None:
        return (str(value["printed"]), "")
    number = decode(bits, dtype)
    if isinstance(number, int):
        return (str(number), "")
    if number != number:
        return (bits, "nan")
    digits = {"float64": 17, "float32": 9}.get(dtype, 5)
    return (hexadecimal(number), f"{number:.{digits}g}")


def digest_words(a: object, b: object) -> tuple[str, str]:
    """Six digits of two digests, from where they differ on; counts and flags as they are."""
    x, y = str(a).partition(":")[2], str(b).partition(":")[2]
    if not x or not y:
        return (str(a), str(b))
    differ = next((place for place, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), 0)
    start = 0 if differ < 6 else min(differ, len(x) - 6)
    before = "…" if start else ""

    def part(body: str) -> str:
        return f"{before}{body[start : start + 6]}{'…' if start + 6 < len(body) else ''}"

    return (part(x), part(y))


def _apart(finding: Finding) -> str:
    evidence = finding.evidence
    if evidence["a"]["dtype"] != evidence["b"]["dtype"]:
        return f"{evidence['a']['dtype']}/{evidence['b']['dtype']}"
    if evidence["a"].get("printed") is not None or evidence["b"].get("printed") is not None:
        return "as printed"
    if evidence.get("ulp") is None:
        return "NaN" if "nan" in str(evidence["a"]["value"]) + str(evidence["b"]["value"]) else "bits"
    return f"{evidence['ulp']:,} ULP" if "float" in evidence["a"]["dtype"] else f"{evidence['ulp']:,}"


def after_the_first(verdict: Verdict, experiment: ExperimentFile) -> list[str]:
    """What is to be said below the table: what stays equal, what a log would have shown, how it goes on."""
    first = verdict.first_divergence
    if first is None:
        return []
    mine = [finding for finding in verdict.findings if finding.where.get("arms") == first.arms]
    coverage = next(iter(verdict.of_kind("coverage")), None)
    lines = []
    metrics = [finding for finding in mine if finding.kind == "metric"]
    names = [str(name) for name in coverage.evidence["metrics"]] if coverage else []
    equal = [name for name in names if name not in first.metrics and stem_of(name) == name]
    if equal and metrics:
        shown = listed(equal) if len(equal) <= 6 else f"{len(equal)} other metrics"
        steps = metrics[0].evidence.get("last_step_compared", experiment.steps)
        lines.append(f"{shown}: equal in all {plural(int(steps), 'step')}.")
    lines += [f"{finding.what[0].upper()}{finding.what[1:]}." for finding in mine if finding.kind == "invisible"]
    if metrics:
        lines.append(_as_printed(metrics))
    grown = [finding for finding in metrics if finding.evidence.get("later_ulp")]
    plain = [finding for finding in grown if stem_of(str(finding.where["metric"])) == finding.where["metric"]]
    growth = [_growth(finding) for finding in plain or grown]
    if growth:
        lines.append(f"How it goes on: {'; '.join(growth[:4])}.")
    lines += [f"{finding.what[0].upper()}{finding.what[1:]}." for finding in mine if finding.kind == "agrees-later"]
    pairs = verdict.figures.get("pairs")
    diverged = verdict.figures.get("pairs_diverged")
    if pairs and diverged and pairs.value > 1:
        seen = {str(f.where["arms"][1]) for f in verdict.of_severity("divergence") if len(f.where["arms"]) == 2}
        which = f"arm {listed(sorted(seen))} against arm {first.arms[0]}"
        lines.append(f"{diverged.value} of {pairs.value} pairs diverge ({which}); shown: arm {first.arms[1]}.")
    return lines


def _as_printed(metrics: Sequence[Finding]) -> str:
    seen: dict[int, tuple[int, str]] = {}
    for decimals in (6, 4):
        steps = [
            (int(step), str(finding.where["metric"]))
            for finding in metrics
            if (step := finding.evidence.get("visible_with_decimals", {}).get(str(decimals)))
        ]
        if steps:
            seen[decimals] = min(steps)
    if 6 not in seen:
        return "Printed with 6 decimals, every metric would have looked equal."
    with_four = f"with 4 at step {seen[4][0]}" if 4 in seen else "with 4 never"
    return f"Printed with 6 decimals it shows at step {seen[6][0]}, in {seen[6][1]}; {with_four}."


def _growth(finding: Finding) -> str:
    later = finding.evidence["later_ulp"]
    low, high, steps = later["min"], later["max"], later["steps"]
    span = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    median = f" (median {later['median']:,.0f})" if low != high else ""
    return f"{finding.where['metric']} {span} ULP{median} in {plural(steps, 'later step')}"


def chance(verdict: Verdict) -> str | None:
    """What so many clean pairs say about the next one."""
    figure = verdict.figures.get("divergence_chance_bound")
    if figure is None:
        return None
    count = {1: "One clean pair"}.get(figure.n, f"{figure.n:,} clean pairs")
    bound = f"{100 * float(figure.value):.3g}%"
    text = f"{count}: the chance of divergence per pair is below {bound} (95% confidence)."
    if figure.value > 0.05:
        text += f" detrun pair --repeat {pairs_for_bound(0.05)} brings it below 5%."
    return text


def context(verdict: Verdict, experiment: ExperimentFile) -> list[str]:
    """Short facts that a reader of a verdict has to know: what was pinned, where it ran, whether settings agree."""
    pinned = ", ".join(f"{name}={value}" for name, value in experiment.pinned.items())
    facts = [f"pinned by detrun: {pinned or 'nothing'}"]
    if verdict.experiment == against_words.EXPERIMENT:
        facts = against_words.context(verdict)
    facts += [finding.what for finding in verdict.of_kind("same-nodes", "different-nodes", "devices")]
    differing = [f for f in verdict.of_kind("environment") if f.severity != "info"]
    informing = [f for f in verdict.of_kind("environment") if f.severity == "info"]
    unread = verdict.of_kind("environment-file")
    if verdict.of_kind("source"):
        facts.append("environments: not recorded")
    elif unread:
        facts.append("environments: not all recorded")
    elif differing:
        facts.append(f"environments: {plural(len(differing), 'undeclared difference')}")
    elif informing:
        number = len({name for finding in informing for name in finding.evidence.get("settings", ())})
        facts.append(f"environments: equal but for {plural(number, 'setting')} of unknown effect")
    elif not verdict.of_kind("nothing-compared", "one-arm", "changed", "baseline", "settings", "reference"):
        facts.append("environments: equal")
    coverage = next(iter(verdict.of_kind("coverage")), None)
    if coverage and coverage.evidence.get("ignored"):
        facts.append(f"ignored by the recipe: {', '.join(coverage.evidence['ignored'])}")
    if coverage and coverage.evidence.get("derived"):
        names = ", ".join(name.removesuffix(DERIVED) for name in coverage.evidence["derived"])
        facts.append(f"recorded and not compared, as they may begin anew on a resume: {names}")
    return facts


def to_localize(verdict: Verdict, id: str) -> str:
    """The command that goes on from a divergence."""
    if verdict.of_kind("source"):
        return "with metrics.source: recorder, detrun localize RECIPE names the operation"
    return f"detrun localize {id}"


def declared(verdict: Verdict) -> str | None:
    """The differences between the arms that the recipe declares."""
    found = verdict.of_kind("declared")
    if not found:
        return None
    shown = "; ".join(finding.what for finding in found)
    many = "difference" if len(found) == 1 else "differences"
    return f"declared {many} between the arms: {shown}"


def cost(verdict: Verdict) -> str | None:
    """What recording cost the ranks."""
    total = verdict.figures.get("recorder_cpu_share")
    state = verdict.figures.get("state_digest_cpu_share")
    if total is None:
        return None
    parts = f", state digests {100 * state.value:.1f}%" if state else ""
    captures = verdict.figures.get("state_capture_cpu_share")
    around = f"; capturing state around saves {100 * captures.value:.1f}%" if captures else ""
    processes = plural(total.n, "process", "processes")
    return f"recording took {100 * total.value:.1f}% of the ranks' CPU time{parts} ({processes}){around}"
