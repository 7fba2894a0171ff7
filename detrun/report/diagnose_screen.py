"""The verdict of `detrun diagnose` on a screen: what was changed, what came of it, which cause fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.text import Text

from detrun.records.files import one_line
from detrun.records.jobs import ExperimentFile
from detrun.records.verdict import Finding, Verdict
from detrun.report.localize_rows import Row
from detrun.report.words import listed, plural, short_id
from detrun.report.wrapping import GAP, Labelled

EXPERIMENT = "diagnose"
MAX_LABEL = 44
_TRIED = ("unchanged", "confirmed", "not-tried")


def head(verdict: Verdict) -> str:
    """The first word of the answer."""
    return "NOT VERIFIED" if verdict.verdict == "not-verified" else "DIAGNOSED"


def sentence(verdict: Verdict, experiment: ExperimentFile) -> str:
    """The answer without its head."""
    name = experiment.recipe_name
    if verdict.verdict == "not-verified":
        return f"{name}: " + "; ".join(verdict.not_verified[:3])
    confirmed = verdict.of_kind("confirmed")
    if any(_clean(each) for each in verdict.of_kind("unchanged")):
        again = verdict.of_kind("unchanged")[0].evidence["of"]
        return f"{name}: the fault did not come back in {plural(again, 'run')} of the same: nothing can be told"
    helped = _helped(verdict)
    if not helped:
        if not confirmed:
            return f"{name}: no change could be tried"
        names = [str(each.evidence["experiment"]) for each in confirmed if not _reversed(each)]
        if not names:
            return f"{name}: nothing that was tried makes the arms agree"
        return f"{name}: with {listed(names, 'or')} the arms still differ"
    counts = {(each.evidence["identical"], each.evidence["of"]) for each in helped}
    what = listed([str(each.evidence["experiment"]) for each in helped])
    told = f", {_of(helped[0])}" + (" each" if len(helped) > 1 else "") if len(counts) == 1 else ""
    return f"{name}: with {what} the arms agree{told}"


def body(verdict: Verdict, experiment: ExperimentFile) -> Iterator[Text]:
    """What stands below the first line."""
    tried = [finding for kind in _TRIED for finding in verdict.of_kind(kind)]
    yield Text()
    width = max([len("likely cause"), *(len(_label(each)) for each in tried)]) + 2
    counts = max([len("identical"), *(len(_of(each)) for each in tried)]) + 2
    yield Text(f"{'changed':<{width}}{'identical':<{counts}}first differs", style="bold")
    for finding in tried:
        yield Labelled.of(_label(finding), f"{_of(finding):<{counts}}{_where(finding)}", width)
    for number, finding in enumerate(verdict.of_kind("left-out")):
        yield Labelled.of("" if number else "left out", _text(finding.what), width)
    yield Text()
    for finding in verdict.of_kind("unchanged"):
        if not finding.evidence.get("identical") or finding.evidence.get("identical") != finding.evidence.get("of"):
            continue
        yield Labelled.of("but", _text(str(finding.evidence.get("reading") or "")), width)
    for number, finding in enumerate(verdict.of_kind("cause")):
        facts = [str(finding.evidence.get("title") or finding.what).rstrip(".")]
        facts.append(f"catalog: {finding.evidence.get('catalog')}")
        if not number and finding.evidence.get("signs"):
            facts.append(f"since {'; '.join(map(str, finding.evidence['signs'][:3]))}")
        yield Labelled.of("or" if number else _blamed(verdict), GAP.join(map(_text, facts)), width)
    if not verdict.of_kind("cause"):
        yield Labelled.of("cause", "none of the catalog's entries fits what was tried", width)
    yield Text(f"each change: {_runs(tried, experiment)}")


def rows(verdict: Verdict) -> list[Row]:
    """The same as rows of a page: what was changed, what came of it and what that means, then the causes that fit."""
    found = []
    for finding in (finding for kind in _TRIED for finding in verdict.of_kind(kind)):
        told = [f"identical: {_of(finding)}", _where(finding), str(finding.evidence.get("reading") or "")]
        found.append(Row(_label(finding), tuple(fact for fact in told if fact)))
    found += [Row("left out", (finding.what,)) for finding in verdict.of_kind("left-out")]
    for number, finding in enumerate(verdict.of_kind("cause")):
        evidence = finding.evidence
        signs, sources = (", ".join(map(str, evidence.get(key) or ())) for key in ("signs", "sources"))
        facts = (finding.what, f"catalog: {evidence.get('catalog')}", signs and f"since {signs}", sources)
        found.append(Row("or" if number else _blamed(verdict), tuple(fact for fact in facts if fact)))
    return found


def fix(verdict: Verdict) -> str | None:
    """What to do, of the likeliest cause."""
    told = (verdict.culprit or {}).get("fix")
    return f"fix: {told}" if told else None


def next_lines(verdict: Verdict, experiment: ExperimentFile, options: str) -> Iterator[Text]:
    """What to do."""
    if mend := fix(verdict):
        yield Text(_text(mend))
    target = experiment.reference.experiment if experiment.reference else experiment.id
    which = f"{_text(short_id(target), 100)}{f' {options}' if options else ''}"
    if (verdict.culprit or {}).get("role"):
        yield Text(f"hint: detrun report {which} shows the operation")
    else:
        yield Text(f"hint: detrun localize {which} names the operation")


def _blamed(verdict: Verdict) -> str:
    """What the entry of the catalog that fits best is called: nothing is proved where no change has helped."""
    return "cause" if _helped(verdict) else "likely cause"


def _helped(verdict: Verdict) -> list[Finding]:
    return [each for each in verdict.of_kind("confirmed") if _clean(each) and not _reversed(each)]


def _runs(tried: list[Finding], experiment: ExperimentFile) -> str:
    arms = max((finding.evidence.get("of") or 0 for finding in tried), default=0) + 1
    ranks = plural(experiment.ranks, "rank")
    return f"{plural(arms, 'arm')}, the others held against the first, {ranks}"


def _label(finding: Finding) -> str:
    return _text(str(finding.evidence.get("experiment") or finding.kind), MAX_LABEL)


def _of(finding: Finding) -> str:
    of: Any = finding.evidence.get("of")
    return f"{finding.evidence.get('identical')} of {of}" if of else "-"


def _where(finding: Finding) -> str:
    if not finding.evidence.get("of"):
        return f"cannot be told: {_text(str(finding.evidence.get('why') or ''), 400)}"
    step = finding.evidence.get("first_step")
    return f"step {step}" if step else ""


def _clean(finding: Finding) -> bool:
    return bool(finding.evidence.get("of")) and finding.evidence.get("identical") == finding.evidence.get("of")


def _reversed(finding: Finding) -> bool:
    return finding.evidence.get("change") in ("different-fills", "unfilled-memory")


def _text(text: str, limit: int = 2000) -> str:
    return one_line(text, limit)
