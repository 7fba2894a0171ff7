"""What a run that was held against an earlier night's has to say beside the verdict's own words."""

from __future__ import annotations

from detrun.compare.history import Change
from detrun.records.files import one_line
from detrun.records.verdict import Verdict
from detrun.report.history_words import MAX_CHANGES, change

EXPERIMENT = "against"


def unasked(verdict: Verdict) -> str | None:
    """The answer where there was nothing to hold against each other; None for every other verdict."""
    if verdict.experiment != EXPERIMENT:
        return None
    if verdict.of_kind("baseline"):
        return "there is nothing to hold it against:"
    if verdict.of_kind("settings"):
        return f"it was not asked as {_of(verdict, 'reference') or 'the baseline'} was, so that nothing was compared:"
    return "nothing was compared:" if verdict.of_kind("reference", "source") else None


def context(verdict: Verdict) -> list[str]:
    """Which two were held against each other, and what has changed between them."""
    before, now = _of(verdict, "reference"), _of(verdict, "candidate")
    facts = [f"a: {before}, the baseline"] if before else []
    if now:
        facts.append(f"{'b: ' if before else ''}{now}")
    if not verdict.of_kind("coverage"):
        return facts
    found = verdict.of_kind("changed")
    told = [
        change(Change(str(each.where.get("setting")), each.evidence.get("a"), each.evidence.get("b"))) for each in found
    ]
    if not told:
        return [*facts, "changed since the baseline: nothing that is recorded"]
    rest = len(told) - MAX_CHANGES
    more = f" and {rest} more" if rest > 0 else ""
    return [*facts, f"changed since the baseline: {', '.join(told[:MAX_CHANGES])}{more}"]


def next_step(verdict: Verdict, id: str) -> str:
    """What to do about it. id: of this experiment, with what a command needs to find it."""
    if verdict.verdict == "identical":
        return f"detrun report {id}"
    now = _of(verdict, "candidate")
    if now and verdict.verdict == "diverged":
        return f"hint: if the change was meant, --against {now} makes that run the next one's baseline"
    if verdict.of_kind("baseline"):
        return "hint: a night without a divergence is the next one's baseline; --against ID names another"
    if verdict.of_kind("settings"):
        return "hint: --against ID names a baseline that was asked in the same way"
    return f"hint: detrun report {id}"


def _of(verdict: Verdict, name: str) -> str | None:
    told = (verdict.model_extra or {}).get(name)
    experiment = told.get("experiment") if isinstance(told, dict) else None
    return one_line(experiment, 200) if isinstance(experiment, str) else None
