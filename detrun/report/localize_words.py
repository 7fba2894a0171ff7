"""The verdict of `detrun localize` (and of `detrun trace`) in words: its head, its sentence, the place, what to do.

Everything is read from the verdict alone, and nothing is taken for granted of it: what is not there is not said.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from detrun.compare.folding import ranks_in_words
from detrun.records.jobs import ExperimentFile
from detrun.records.verdict import Finding, Verdict
from detrun.report import words
from detrun.report.words import listed, plural

LOCALIZE, TRACE = "localize", "trace"
EXPERIMENTS = frozenset({LOCALIZE, TRACE})

HEADS = {
    "origin": "ORIGIN",
    "uncaptured-producer": "UNCAPTURED PRODUCER",
    "outside-the-trace": "FROM OUTSIDE THE TRACE",
    "receiver": "RECEIVED",
}
"""What a diverged verdict is called, by its culprit's role."""

_WHY = {
    "observer": "tracing changed the run, so that what it saw proves nothing:",
    "not-repeated": "the fault did not come back:",
    "outside-the-capture": "nothing that was traced differs, so the fault lies outside the capture:",
    "trace": "the trace is incomplete:",
    "scope": "nothing was traced:",
    "window": "the steps asked for do not hold the one at which the arms part:",
}
"""The sentence of a verdict that is not verified, by the first finding of these kinds."""

_UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9}
OUTSIDE_MODULES = "outside modules"


def head(verdict: Verdict) -> str:
    """The first words of the answer."""
    if verdict.verdict == "not-verified":
        return "NOT VERIFIED"
    if verdict.verdict == "identical":
        return "TRACED" if verdict.experiment == TRACE else "IDENTICAL"
    return HEADS.get(str((verdict.culprit or {}).get("role")), "DIVERGED")


def sentence(verdict: Verdict, experiment: ExperimentFile) -> str:
    """The answer without its head."""
    if verdict.verdict == "diverged":
        return _diverged(verdict, experiment)
    if verdict.verdict == "identical":
        return _recorded(verdict, experiment)
    return _not_verified(verdict, experiment)


def _diverged(verdict: Verdict, experiment: ExperimentFile) -> str:
    culprit = verdict.culprit
    if culprit is None:
        first = verdict.first_divergence
        if first is None:
            return "the arms differ"
        return f"at step {first.step}, {ranks_in_words(first.ranks, experiment.ranks)}; no operation can be blamed"
    role, called = culprit.get("role"), operation_in_its_place(culprit)
    if role == "uncaptured-producer":
        return f"of what {called} reads"
    if role == "outside-the-trace" and culprit.get("component"):
        return f"state that was not restored: {culprit['component']}, first seen by {called}"
    if role == "outside-the-trace":
        return _OUTSIDE.get(_outside_kind(culprit), _OUTSIDE["data"])[0].format(called)
    where = ", ".join(part for part in (called, when(culprit, experiment.ranks)) if part)
    if role == "receiver":
        return f"by {where}: the difference came from a rank that was not traced"
    if culprit.get("kind") == "recompute":
        return f"recomputation that differs from its forward: {where}"
    return where


_OUTSIDE = {
    "batch": ("input data: the batch", "the arms were given different data: look at loader, sampler and files"),
    "data": ("data that {} reads", "nothing that was traced had written it: it came from the host"),
    "rng": ("RNG, drawn from by {}", "all before it is equal, but the generator stood elsewhere"),
    "control-flow": ("order of calls: {}", "it came at another turn, or in one arm alone: the host decided otherwise"),
    "scalar": ("a number given to {}", "its tensors are equal; the host gave it another argument"),
    "parameter": (
        "parameters: {}",
        "they differ before the first traced event: widen the window, or look at their start",
    ),
}
"""What differed outside of the trace, by the culprit's kind: in the first line, and what is known of it."""


def _outside_kind(culprit: dict[str, Any]) -> str:
    return "batch" if culprit.get("kind") == "data" and culprit.get("name") == "batch" else str(culprit.get("kind"))


def operation_in_its_place(culprit: dict[str, Any]) -> str:
    """`aten.index_put_ in layers.1.moe`; `aten.lerp_ of layers.1.weight` in an optimizer's step."""
    name, scope = operation(culprit.get("name")), culprit.get("scope")
    return f"{name} of {scope}" if scope and culprit.get("phase") == "optimizer" else f"{name} {within(scope)}"


def when(culprit: dict[str, Any], ranks: int) -> str:
    """`backward, step 1, rank 0`. Between the phases there is no word for where a step is."""
    on, phase = _numbers(culprit.get("ranks")), culprit.get("phase")
    parts = [str(phase)] if phase and phase != "between" else []
    parts += [f"step {culprit['step']}"] if culprit.get("step") is not None else []
    if len(on) > 1:
        parts.append(ranks_in_words(on, ranks))
    elif culprit.get("rank") is not None:
        parts.append(f"rank {culprit['rank']}")
    return ", ".join(parts)


def operation(name: object) -> str:
    """An operation's name; the overload that every call means unless it says otherwise is left out."""
    return str(name or "an operation").removesuffix(".default")


def within(scope: object) -> str:
    """`in layers.1.moe`; the root and what lies outside have no name."""
    return f"in {scope}" if scope else OUTSIDE_MODULES


def event_in_words(event: object) -> str:
    """`aten.mm in layers.0, forward, step 7` of {op, scope, phase, step}."""
    if not isinstance(event, dict):
        return ""
    called = operation_in_its_place({**event, "name": event.get("op")})
    return ", ".join(part for part in (called, when({**event, "ranks": None, "rank": None}, 0)) if part)


def below_the_head(verdict: Verdict, experiment: ExperimentFile) -> list[tuple[str, ...]]:
    """Rows of short facts that belong to the culprit: where it was called, what it read, which call it is."""
    culprit = verdict.culprit
    if verdict.verdict != "diverged" or culprit is None:
        return []
    role = culprit.get("role")
    known = _known(culprit)
    call = (str(culprit["call_site"]),) if culprit.get("call_site") else ()
    inputs = (_inputs(culprit),) if culprit.get("inputs") else ()
    which = [
        f"{word} {culprit[key]}"
        for key, word in (("microbatch", "micro-batch"), ("occurrence", "occurrence"))
        if culprit.get(key) is not None
    ]
    coordinates = culprit.get("coordinates")
    on = [f"{name} {number}" for name, number in coordinates.items()] if isinstance(coordinates, dict) else []
    # The first line of these roles has no room for it.
    at = when(culprit, experiment.ranks) if role in ("uncaptured-producer", "outside-the-trace") else ""
    last = tuple(part for part in (at, ", ".join(which), ", ".join(on)) if part)
    return [row for row in ((known,) if known else (), (*call, *inputs), last) if row]


def _known(culprit: dict[str, Any]) -> str:
    """What is known of how it differs, where the role does not say it all."""
    role = culprit.get("role")
    if role == "origin":
        return ""
    general = _OUTSIDE.get(_outside_kind(culprit), _OUTSIDE["data"])[1] if role == "outside-the-trace" else ""
    return str(culprit.get("why") or general)


def _inputs(culprit: dict[str, Any]) -> str:
    text = str(culprit["inputs"])
    what, joint, standing = text.rpartition(", ")
    if culprit.get("role") == "origin" and joint and standing == "equal":
        return f"inputs equal ({what}), output differs"
    return f"inputs: {text}"


def brackets(verdict: Verdict) -> list[tuple[str, tuple[str, ...]]]:
    """The two events that what was not captured lies between, each with what is known of it."""
    culprit = verdict.culprit
    if verdict.verdict != "diverged" or not culprit or culprit.get("role") != "uncaptured-producer":
        return []
    reader = {**{key: culprit.get(key) for key in ("scope", "phase", "step")}, "op": culprit.get("name")}
    before = event_in_words(culprit.get("after"))
    return [
        ("written by", (before, "its output is equal") if before else ("nothing that was traced",)),
        ("then", ("something writes there that the trace does not see",)),
        ("read by", (event_in_words(reader), "its input differs")),
    ]


def _recorded(verdict: Verdict, experiment: ExperimentFile) -> str:
    """`hybrid-cpu: level 4, step 7, every rank: 3,028 events`."""
    seen = window_in_words(verdict, experiment)
    if verdict.experiment == TRACE:
        events, size = (verdict.figures.get(name) for name in ("trace_events", "trace_bytes"))
        counted = f": {plural(int(events.value), 'event')}" if events else ""
        disk = f", {in_bytes(float(size.value))} on disk" if size else ""
        return f"{verdict.recipe}: {seen or plural(experiment.ranks, 'rank')}{counted}{disk}"
    if not was_traced(verdict):
        return f"nothing to localize: {words.sentence(verdict, experiment)}"
    descents = [finding.evidence.get("events") for finding in verdict.of_kind("descent")]
    total = plural(sum(each for each in descents if isinstance(each, int)), "event")
    return f"nothing to localize: {verdict.recipe}: {seen}: {total}, all equal"


def was_traced(verdict: Verdict) -> bool:
    """Whether it went down from the metrics; where a pair was enough to answer, the verdict is that pair's."""
    return bool(verdict.of_kind("descent"))


def window_in_words(verdict: Verdict, experiment: ExperimentFile) -> str:
    """`level 4, step 7, every rank` of what was traced; empty where nothing says."""
    coverage = traced_coverage(verdict)
    return window(coverage.evidence, experiment.ranks) if coverage else ""


def traced_coverage(verdict: Verdict) -> Finding | None:
    """The finding on what a trace captured. A pair's coverage, of metrics, is none."""
    return next((each for each in verdict.of_kind("coverage") if "not_captured" in each.evidence), None)


def window(evidence: dict[str, Any], ranks: int) -> str:
    """`level 4, step 7, every rank` of {level, steps: [first, last], ranks: a list or null for all}."""
    parts = [f"level {evidence['level']}"] if evidence.get("level") else []
    parts += [steps] if (steps := steps_in_words(evidence.get("steps"))) else []
    if "ranks" in evidence:
        on = _numbers(evidence["ranks"])
        parts.append(ranks_in_words(on, ranks) if on else "every rank" if ranks > 1 else "rank 0")
    return ", ".join(parts)


def steps_in_words(steps: object) -> str:
    """`step 7` or `steps 7 to 9` of [first, last], a number, or null."""
    numbers = [steps] if isinstance(steps, int) else _numbers(steps)
    if not numbers:
        return ""
    low, high = min(numbers), max(numbers)
    return f"step {low}" if low == high else f"steps {low} to {high}"


def in_bytes(number: float) -> str:
    """`812 bytes`, `60.2 kB`, `1.2 MB`."""
    if number < 1000:
        return plural(round(number), "byte")
    unit = next((unit for unit in ("kB", "MB") if number < 1000 * _UNITS[unit]), "GB")
    return f"{number / _UNITS[unit]:.1f} {unit}"


def _numbers(value: object) -> list[int]:
    return [each for each in value if isinstance(each, int)] if isinstance(value, Sequence) else []


def _not_verified(verdict: Verdict, experiment: ExperimentFile) -> str:
    found = {finding.kind for finding in verdict.of_severity("not-verified")}
    if verdict.of_kind("job"):
        arms = listed(list(dict.fromkeys(f"arm {finding.where.get('arm')}" for finding in verdict.of_kind("job"))))
        return f"{arms} did not finish, so nothing is proved:"
    for kind, why in _WHY.items():
        if kind in found:
            return why
    if verdict.experiment == LOCALIZE and not was_traced(verdict):
        return words.sentence(verdict, experiment)
    return "no operation can be blamed:" if verdict.experiment == LOCALIZE else "what was asked for was not recorded:"


def fix(verdict: Verdict) -> str | None:
    """What mends it: the culprit's, else that of the first cause that fits."""
    if verdict.verdict != "diverged":
        return None
    mends = [(verdict.culprit or {}).get("fix"), *(finding.evidence.get("fix") for finding in verdict.of_kind("cause"))]
    return next((f"fix: {mend}" for mend in mends if mend), None)


def context(verdict: Verdict, experiment: ExperimentFile) -> list[str]:
    """Short facts about the runs: what was pinned, where they ran, which settings differ without being declared."""
    if verdict.experiment == LOCALIZE and not was_traced(verdict):
        return words.context(verdict, experiment)
    pinned = ", ".join(f"{name}={value}" for name, value in experiment.pinned.items())
    facts = [f"pinned by detrun: {pinned or 'nothing'}"]
    facts += [finding.what for finding in verdict.of_kind("same-nodes", "different-nodes", "devices")]
    differing = [finding for finding in verdict.of_kind("environment") if finding.severity != "info"]
    if differing:
        facts.append(f"environments: {plural(len(differing), 'undeclared difference')}")
    return facts


def next_step(verdict: Verdict, experiment: ExperimentFile, id: str) -> str:
    """The last line: the command to give next. id: what a command has to be given to find this experiment."""
    again = shlex.join(experiment.command_line) or f"detrun localize {id}"
    if verdict.verdict == "identical":
        return f"hint: {_compare(experiment, id)}" if verdict.experiment == TRACE else f"hint: detrun report {id}"
    if verdict.verdict == "diverged":
        return f"hint: detrun diagnose {id}" if verdict.culprit else f"hint: detrun report {id}"
    for finding in verdict.of_severity("not-verified"):
        if finding.evidence.get("widen"):
            return f"hint: {again} {finding.evidence['widen']}"
    failed = verdict.of_severity("infrastructure")
    if not failed:
        return f"hint: detrun report {id}"
    place = failed[0].where
    if verdict.experiment == LOCALIZE or "arm" not in place:
        return f"hint: after the fix, {again}"
    rank = f" --rank {place['rank']}" if "rank" in place else ""
    return f"hint: detrun logs {id} --arm {place['arm']}{rank}"


def _compare(experiment: ExperimentFile, id: str) -> str:
    """The command for two traces: those of this experiment, or this one and another."""
    short, _, options = id.partition(" ")
    first, second = [f"{short}:{arm.id}" for arm in experiment.arms[:2]] + ["ID:ARM"] * (2 - len(experiment.arms[:2]))
    return f"detrun compare {first} {second}{f' {options}' if options else ''}"
