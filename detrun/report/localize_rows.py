"""What a localization went through and found, a row a subject: the way down, bytes, cause, reproduction, coverage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any

from detrun.compare.folding import ranks_in_words
from detrun.records.jobs import ExperimentFile
from detrun.records.verdict import Finding, Verdict
from detrun.report.localize_words import TRACE, operation, traced_coverage, window, window_in_words, within
from detrun.report.words import listed, plural

MAX_CAUSES = 3
MAX_SPREAD = 6
MAX_LISTED = 8
MAX_TENSORS = 4
_LEVELS = {1: "metrics", 2: "semantic", 3: "modules", 4: "operators", 5: "kernels"}


@dataclass(frozen=True)
class Row:
    """A subject and short facts about it."""

    label: str
    facts: tuple[str, ...]


def rows(verdict: Verdict, experiment: ExperimentFile) -> list[Row]:
    """Every row that the verdict has findings for, in the order of a reader's questions."""
    return [
        *_descents(verdict, experiment),
        *_spread(verdict, experiment),
        *_propagation(verdict),
        *_bytes(verdict),
        *_kernels(verdict),
        *_causes(verdict),
        *_confirmed(verdict),
        *_reproduction(verdict),
        *_observer(verdict),
        *_coverage(verdict, experiment),
    ]


def _descents(verdict: Verdict, experiment: ExperimentFile) -> Iterator[Row]:
    described = []
    coverage = traced_coverage(verdict)
    last = window(coverage.evidence, experiment.ranks) if coverage else ""
    for finding in verdict.of_kind("descent"):
        evidence = finding.evidence
        level = evidence.get("level", finding.where.get("level"))
        name = evidence.get("name") or _LEVELS.get(level if isinstance(level, int) else 0, "")
        name = "once more" if "-bytes" in str(evidence.get("pass")) else name
        where = window({key: evidence[key] for key in ("steps", "ranks") if key in evidence}, experiment.ranks)
        if isinstance(evidence.get("events"), int):
            # What the last pass captured is told below.
            where = "" if window({"level": level, **evidence}, experiment.ranks) == last else where
            described.append((f"level {level}  {name}", plural(evidence["events"], "event"), _counted(evidence), where))
        else:
            steps, _, who = where.partition(", ")
            described.append((f"level {level}  {name}", steps or finding.what, who, ""))
    width = max((len(first) for _, first, _, _ in described), default=0)
    for label, first, second, third in described:
        later = tuple(part for part in (second, third) if part)
        yield Row(label, (first.ljust(width), *later) if later else (first,))
    yield from (Row("pairs", (finding.what,)) for finding in verdict.of_kind("levels"))


def _counted(evidence: dict[str, Any]) -> str:
    """`1,213 equal, 1 origin, 2 that follow from it, 1 missing`."""
    equal, differing, origins = (evidence.get(key) for key in ("equal", "differing", "origins"))
    parts = [f"{equal:,} equal"] if isinstance(equal, int) else []
    if isinstance(differing, int) and isinstance(origins, int) and origins:
        follow = max(0, differing - origins)
        whom = "it" if origins == 1 else "them"
        parts += [plural(origins, "origin")] + ([f"{follow:,} that follow from {whom}"] if follow else [])
    elif isinstance(differing, int) and differing:
        parts.append(f"{differing:,} different")
    for key, words in (("missing", "in arm a alone"), ("extra", "in arm b alone")):
        count = evidence.get(key)
        parts += [f"{count:,} {words}"] if isinstance(count, int) and count else []
    return ", ".join(parts)


def _spread(verdict: Verdict, experiment: ExperimentFile) -> Iterator[Row]:
    """Where the same happened elsewhere, folded by operation, with what the ranks say about where to look."""
    found: dict[str, list[dict[str, Any]]] = {}
    for each in spread(verdict):
        found.setdefault(operation(each.get("op")), []).append(each)
    groups = [each for finding in verdict.of_kind("spread") for each in _dicts(finding.evidence.get("groups"))]
    readings = {operation(group.get("op")): str(group.get("reading") or "") for group in reversed(groups)}
    for number, (name, places) in enumerate(found.items()):
        label = "" if number else "elsewhere"
        if number == MAX_SPREAD:
            yield Row("", (f"and {len(found) - MAX_SPREAD:,} more operations, all in report.html",))
            return
        on = sorted({each["rank"] for each in places if isinstance(each.get("rank"), int)})
        scopes = list(dict.fromkeys(str(each.get("scope") or "") for each in places))
        where = within(scopes[0]) if len(scopes) == 1 else f"in {_some(scopes)}"
        who = f", {ranks_in_words(on, experiment.ranks)}" if on else ""
        yield Row(label, (f"{name} {where}{who}", *((readings[name],) if readings.get(name) else ())))


def _propagation(verdict: Verdict) -> Iterator[Row]:
    """The scopes through which the difference went on, in the order in which it came there."""
    scopes = list(dict.fromkeys(str(each.get("scope") or "") for each in propagation(verdict)))
    if len(scopes) > 1:
        yield Row("went on through", (_some(scopes),))


def propagation(verdict: Verdict) -> list[dict[str, Any]]:
    """The first event that differs of each scope, phase and rank, each {rank, step, phase, scope, op, …}."""
    return [each for finding in verdict.of_kind("propagation") for each in _dicts(finding.evidence.get("rows"))]


def spread(verdict: Verdict) -> list[dict[str, Any]]:
    """The other origins, each {scope, rank, op, step}."""
    return [each for finding in verdict.of_kind("spread") for each in _dicts(finding.evidence.get("places"))]


def _bytes(verdict: Verdict) -> Iterator[Row]:
    found = verdict.of_kind("bytes")
    for number, finding in enumerate(found[:MAX_TENSORS]):
        yield Row("" if number else "bytes", tuple(bytes_in_words(finding)))
    if len(found) > MAX_TENSORS:
        yield Row("", (f"and {len(found) - MAX_TENSORS:,} more tensors, all in report.html",))


def bytes_in_words(finding: Finding) -> list[str]:
    """`118 of 32,768 elements differ, by 1 to 2 ULP, in rows 17, 40, 41 …`, then what else is known of how."""
    evidence = finding.evidence
    elements, differing = evidence.get("elements"), evidence.get("differing")
    if not isinstance(elements, int) or not isinstance(differing, int):
        return [finding.what]
    if not differing:
        return [f"all {elements:,} elements are equal: its bytes do not show what its digests did"]
    parts = [f"{differing:,} of {plural(elements, 'element')} {'differs' if differing == 1 else 'differ'}"]
    if ulp := _ulp(evidence):
        parts.append(ulp)
    if where := _rows(evidence):
        parts.append(where)
    tensor = f"{evidence['tensor']}: " if evidence.get("tensor") else ""
    facts = [f"{tensor}{', '.join(parts)}"]
    order = {"rows": "the same rows in another order", "elements": "the same elements in another order"}
    facts += [order[str(evidence["permutation"])]] if str(evidence.get("permutation")) in order else []
    for key, word in (("nan", "NaN"), ("signed_zeros", "only in the sign of zero")):
        count = evidence.get(key)
        facts += [f"{count:,} {word}"] if isinstance(count, int) and count else []
    dtype, shape = evidence.get("dtype"), evidence.get("shape")
    if dtype:
        facts.append(f"{dtype}{_shape(shape)}")
    return facts


def _ulp(evidence: dict[str, Any]) -> str:
    low, high = evidence.get("min_ulp"), evidence.get("max_ulp")
    if not isinstance(high, int) or not high:
        return ""
    unit = "" if str(evidence.get("dtype")).startswith(("int", "uint", "bool")) else " ULP"
    return f"by {low:,} to {high:,}{unit}" if isinstance(low, int) and 0 < low < high else f"by {high:,}{unit}"


def _rows(evidence: dict[str, Any]) -> str:
    shown = evidence.get("rows")
    if not isinstance(shown, Sequence) or not shown:
        return ""
    shape = evidence.get("shape")
    if isinstance(shape, Sequence) and len(shape) == 1:
        return ""  # its rows are its elements, which are counted and drawn
    total = evidence.get("rows_total")
    total = total if isinstance(total, int) else len(shown)
    if total == 1:
        return f"in row {shown[0]}"
    head = ", ".join(str(each) for each in shown[:3])
    return f"in {total:,} rows: {head} …" if total > 3 else f"in rows {head}"


def _shape(shape: object) -> str:
    return f"[{','.join(str(each) for each in shape)}]" if isinstance(shape, Sequence) else ""


def _kernels(verdict: Verdict) -> Iterator[Row]:
    """What the operation launched, and the settings that choose it: what only one arm has, else what both launched."""
    for finding in verdict.of_kind("kernels"):
        a, b = (_kernel_names(finding.evidence.get(arm)) for arm in "ab")
        settings = _settings(finding.evidence.get("settings"))
        if not a or not b:
            yield Row("kernels", (finding.what, *settings))
        elif a == b:
            launched = [name for name in dict.fromkeys(a) if " = " not in name]
            same = f"the same in both arms: {_some(launched)}" if launched else "the same in both arms"
            yield Row("kernels", (same, *settings))
        else:
            alone = [
                (arm, [name for name in dict.fromkeys(own) if name not in other])
                for arm, own, other in (("a", a, b), ("b", b, a))
            ]
            told = tuple(f"in arm {arm} alone: {_some(names)}" for arm, names in alone if names)
            yield Row("kernels", (*(told or ("the same in both arms, in another order or number",)), *settings))


def _settings(value: object) -> list[str]:
    """`threads: 1 in arm a, 3 in arm b` of what differs between the arms, {name: [a, b]}."""
    pairs = value.items() if isinstance(value, dict) else ()
    return [f"{name}: {each[0]} in arm a, {each[1]} in arm b" for name, each in pairs if _is_pair(each)][:MAX_LISTED]


def _is_pair(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2


def _kernel_names(value: object) -> list[str]:
    """`name` of what was launched, `name = value` of a setting; of {kind, name, value} or plain text."""
    if not isinstance(value, list | tuple):
        return []
    named = [each if isinstance(each, dict) else {"name": each} for each in value]
    return [f"{each.get('name')} = {each['value']}" if "value" in each else str(each.get("name")) for each in named]


def _causes(verdict: Verdict) -> Iterator[Row]:
    """The catalog's entries that fit, the likeliest with why it does and how to make sure."""
    for number, finding in enumerate(verdict.of_kind("cause")[:MAX_CAUSES]):
        entry, evidence = finding.evidence.get("catalog"), finding.evidence
        title = str(evidence.get("title") or finding.what).rstrip(".")
        facts = [title, f"catalog: {entry}"] if entry else [title]
        if number:
            yield Row("or", tuple(facts))
            continue
        facts += [f"since {evidence['why']}"] if evidence.get("why") else []
        yield Row("cause" if _is_confirmed(verdict) else "likely cause", tuple(facts))
        if evidence.get("confirm") and not verdict.of_kind("confirmed"):
            yield Row("to confirm", (str(evidence["confirm"]).rstrip("."),))


def _is_confirmed(verdict: Verdict) -> bool:
    """Whether something that was tried made the arms agree: what merely fits proves nothing."""
    tried = [finding.evidence for finding in verdict.of_kind("confirmed")]
    return any(each.get("identical") and each.get("identical") == each.get("of") for each in tried)


def _confirmed(verdict: Verdict) -> Iterator[Row]:
    """What was tried with one thing changed: what made the arms equal, then what did not."""
    told: dict[str, list[str]] = {"confirmed": [], "in part": [], "no change": []}
    for finding in verdict.of_kind("confirmed"):
        evidence = finding.evidence
        identical, of = evidence.get("identical"), evidence.get("of")
        if not isinstance(identical, int) or not isinstance(of, int):
            told["confirmed"].append(finding.what)
            continue
        label = "no change" if not identical else "confirmed" if identical == of else "in part"
        told[label].append(f"{evidence.get('experiment')}: identical, {identical:,} of {of:,}")
    for label, facts in told.items():
        if facts:
            yield Row(label, tuple(facts))


def _reproduction(verdict: Verdict) -> Iterator[Row]:
    for finding in verdict.of_kind("reproduction"):
        evidence = finding.evidence
        script, distinct, runs = (evidence.get(key) for key in ("script", "distinct", "runs"))
        said = str(evidence.get("text") or "")
        if isinstance(distinct, int) and isinstance(runs, int) and runs and distinct:
            counted = f"{plural(distinct, 'distinct result')} in {plural(runs, 'run')}"
            said = f"does not reproduce alone: {counted}" if distinct == 1 else counted
        facts = f"{script}: {said or finding.what}" if script else said or finding.what
        yield Row("reproduction", (facts,))


def _observer(verdict: Verdict) -> Iterator[Row]:
    for finding in verdict.of_kind("observer"):
        if finding.severity in ("info", "warning"):
            yield Row("observer", (finding.what,))


def _coverage(verdict: Verdict, experiment: ExperimentFile) -> Iterator[Row]:
    """What was traced, and what was there that was not."""
    coverage = traced_coverage(verdict)
    if coverage is None:
        return
    captured = window_in_words(verdict, experiment)
    empty = [finding.evidence.get("events") for finding in verdict.of_kind("descent")][-1:] == [0]
    if captured and not empty and verdict.experiment != TRACE and verdict.verdict != "identical":
        yield Row("captured", (captured,))
    texts, opaque = _texts(coverage.evidence.get("not_captured")), coverage.evidence.get("opaque")
    facts = texts[:MAX_LISTED] + ([f"and {len(texts) - MAX_LISTED:,} more"] if len(texts) > MAX_LISTED else [])
    if isinstance(opaque, dict) and opaque:
        names = [f"{name} × {count:,}" if isinstance(count, int) else str(name) for name, count in opaque.items()]
        facts.append(f"seen from outside alone: {_some(names)}")
    yield Row("not captured", ("; ".join(facts) if facts else "nothing that the tracer knows of",))


def kernel_table(verdict: Verdict) -> list[tuple[str, str]]:
    """The kernels and settings of both arms, laid beside each other in order."""
    found: list[tuple[str, str]] = []
    for finding in verdict.of_kind("kernels"):
        a, b = (_kernel_names(finding.evidence.get(arm)) for arm in "ab")
        for _, a1, a2, b1, b2 in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
            found += zip_longest(a[a1:a2], b[b1:b2], fillvalue="")
    return found


def bitmaps(verdict: Verdict) -> list[str]:
    """Where in the tensor the elements that differ lie, drawn."""
    return [str(finding.evidence["bitmap"]) for finding in verdict.of_kind("bytes") if finding.evidence.get("bitmap")]


@dataclass(frozen=True)
class CleanRow:
    """How many calls of the guilty operation with this value were clean, and how many were not."""

    by: str
    value: str
    clean: int
    differing: int


def clean_table(verdict: Verdict) -> list[CleanRow]:
    """Which shapes, dtypes, layouts, phases and ranks of the guilty operation were clean and which were not."""
    made = []
    for finding in verdict.of_kind("clean-table"):
        for row in _dicts(finding.evidence.get("rows")):
            clean, differing = (row.get(key) for key in ("clean", "differing"))
            by = str(row.get("by") or finding.where.get("by") or "")
            numbers = (clean if isinstance(clean, int) else 0, differing if isinstance(differing, int) else 0)
            made.append(CleanRow(by, str(row.get("value")), *numbers))
    return made


def guilty_of_table(verdict: Verdict) -> str:
    """The operation that the table of clean and differing calls is about."""
    return operation((verdict.culprit or {}).get("name")) if verdict.culprit else "the operation"


def _dicts(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list | tuple) else []


def _texts(value: object) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list | tuple) else []


def _some(names: Sequence[str], most: int = 4) -> str:
    shown = [name or "outside modules" for name in names[:most]]
    return f"{', '.join(shown)} and {len(names) - most:,} more" if len(names) > most else listed(shown)
