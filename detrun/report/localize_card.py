"""A localization on a page: the way down level by level, and all that is known of the operation that it ended at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from detrun.compare.folding import ranks_in_words
from detrun.diagnose.catalog import catalog
from detrun.records.jobs import ExperimentFile
from detrun.records.verdict import Finding, Verdict
from detrun.report.localize_rows import bytes_in_words
from detrun.report.localize_words import OUTSIDE_MODULES, event_in_words, operation, steps_in_words

_ROLES = {
    "origin": "origin: its inputs are equal in both arms, its output is not",
    "receiver": "receiver: what differs came from a rank that was not traced",
    "uncaptured-producer": "it reads what something untraced wrote",
    "outside-the-trace": "what differs was there before the first traced event, or came from the host",
}


@dataclass(frozen=True)
class Level:
    """One row of the way down. counts are words, empty where nothing was counted; path: the pass's folder."""

    level: str
    name: str
    steps: str
    ranks: str
    events: str = ""
    equal: str = ""
    differing: str = ""
    origins: str = ""
    path: str = ""


@dataclass(frozen=True)
class CatalogEntry:
    """An entry of the catalog that fits, in words."""

    id: str
    rows: tuple[tuple[str, str], ...]


def descent(verdict: Verdict, experiment: ExperimentFile) -> list[Level]:
    """The levels in the order in which they were looked at."""
    return [_level(finding, experiment) for finding in verdict.of_kind("descent")]


def _level(finding: Finding, experiment: ExperimentFile) -> Level:
    evidence = finding.evidence
    ranks = evidence.get("ranks")
    on = [rank for rank in ranks if isinstance(rank, int)] if isinstance(ranks, list) else []
    counted = isinstance(evidence.get("events"), int)
    return Level(
        level=str(evidence.get("level", "")),
        name=str(evidence.get("name", "")),
        steps=steps_in_words(evidence.get("steps")),
        ranks=ranks_in_words(on, experiment.ranks) if on else "every rank",
        events=_number(evidence.get("events")),
        equal=_number(evidence.get("equal")),
        differing=_number(evidence.get("differing")),
        origins=_number(evidence.get("origins")) if counted else "",
        path=str(finding.where.get("path") or ""),
    )


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else ""


def card(verdict: Verdict, experiment: ExperimentFile) -> list[tuple[str, str]]:
    """What is known of the culprit: label and text, in the order in which one asks."""
    culprit = verdict.culprit
    if verdict.verdict != "diverged" or not culprit:
        return []
    return [(name, text) for name, text in _facts(verdict, culprit, experiment) if text]


def _facts(verdict: Verdict, culprit: dict[str, Any], experiment: ExperimentFile) -> Iterator[tuple[str, str]]:
    yield "operation", operation(culprit.get("name"))
    yield "module", str(culprit.get("scope") or OUTSIDE_MODULES)
    which = [
        f"{word} {culprit[key]}"
        for key, word in (("step", "step"), ("microbatch", "micro-batch"), ("occurrence", "occurrence"))
        if culprit.get(key) is not None
    ]
    yield "when", ", ".join([*([str(culprit["phase"])] if culprit.get("phase") else []), *which])
    ranks = culprit.get("ranks")
    on = [each for each in ranks if isinstance(each, int)] if isinstance(ranks, list) else []
    where = ranks_in_words(on, experiment.ranks) if on else ""
    place = culprit.get("coordinates")
    at = ", ".join(f"{name} {number}" for name, number in place.items()) if isinstance(place, dict) else ""
    yield "where", f"{where} ({at})" if where and at else where or at
    yield "called at", str(culprit.get("call_site") or "")
    yield "role", _ROLES.get(str(culprit.get("role")), "")
    yield "why", str(culprit.get("why") or "") if culprit.get("role") != "origin" else ""
    yield "written before by", event_in_words(culprit.get("after"))
    arms = culprit.get("arms")
    yield "called in", f"arm {arms[0]} alone" if isinstance(arms, list) and len(arms) == 1 else ""
    yield "inputs", str(culprit.get("inputs") or "")
    for finding in verdict.of_kind("bytes")[:8]:
        if not isinstance(finding.evidence.get("elements"), int):
            yield "bytes", finding.what
            continue
        # A finding that names no tensor is on what the operation made.
        side = "input" if str(finding.evidence.get("tensor")).startswith("input") else "output"
        yield f"{side} that differs", "; ".join(bytes_in_words(finding))


def entry(verdict: Verdict) -> CatalogEntry | None:
    """The catalog's entry that the verdict names, with why it fits."""
    named = (verdict.culprit or {}).get("catalog")
    causes = verdict.of_kind("cause")
    found = catalog().entry(str(named)) if named else None
    if found is None:
        return None
    why = next((each.evidence.get("why") for each in causes if each.evidence.get("catalog") == named), None)
    rows = [
        ("what is seen", found.symptom),
        ("cause", found.cause),
        ("why it fits", str(why or "")),
        ("how to make sure", found.confirm),
        ("fix", found.fix),
        ("sources", ", ".join(found.sources)),
    ]
    return CatalogEntry(found.id, tuple((name, text.strip()) for name, text in rows if text))
