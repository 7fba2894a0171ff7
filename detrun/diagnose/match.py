"""Which entries of the catalog fit the facts, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from detrun.diagnose.catalog import Entry, Sign, Wanted, catalog
from detrun.diagnose.facts import Facts
from detrun.records.verdict import Finding

ENOUGH = 3
"""From this weight on an entry fits."""


@dataclass(frozen=True)
class Match:
    """An entry that fits. why: what speaks for it, the weightiest first. strength: the weight of its signs."""

    entry: Entry
    why: tuple[str, ...]
    strength: int

    def finding(self) -> Finding:
        """What a verdict says of it."""
        evidence = {
            "catalog": self.entry.id,
            "title": self.entry.cause,
            "why": self.why[0] if self.why else "",
            "signs": list(self.why),
            "confirm": self.entry.confirm,
            "experiments": list(self.entry.experiments),
            "fix": self.entry.fix,
            "sources": list(self.entry.sources),
            "strength": self.strength,
        }
        return Finding(kind="cause", severity="info", what=self.entry.cause, evidence=evidence)


def match(facts: Facts) -> list[Match]:
    """The entries that fit, the likeliest first; of equals in the catalog's order. Empty where nothing fits."""
    known = facts.known()
    found = []
    for entry in catalog().entries:
        signs = [sign for sign in entry.signs if holds(sign, known)]
        strength = sum(sign.weight for sign in signs)
        if strength >= ENOUGH:
            speaking = sorted((sign for sign in signs if sign.weight > 0), key=lambda sign: -sign.weight)
            found.append(Match(entry, tuple(_told(sign, known) for sign in speaking), strength))
    return sorted(found, key=lambda match: -match.strength)


def holds(sign: Sign, known: Mapping[str, Any]) -> bool:
    """Whether everything that a sign wants is so."""
    return all(_is(known[name], wanted) for name, wanted in sign.wanted.items())


def _is(value: Any, wanted: Wanted) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return any(_is(item, wanted) for item in value)
    if isinstance(wanted, list):
        return any(_is(value, each) for each in wanted)
    if isinstance(wanted, dict):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        return wanted.get("min", value) <= value <= wanted.get("max", value)
    if isinstance(value, str) and isinstance(wanted, str):
        return fnmatchcase(value, wanted)
    return type(value) is type(wanted) and value == wanted


def _told(sign: Sign, known: Mapping[str, Any]) -> str:
    words = {name: _word(value) for name, value in known.items()}
    return sign.why.format_map(
        {**words, "scope": words["scope"] or "no module", "op": words["op"] or "the first event"}
    )


def _word(value: Any) -> str:
    if isinstance(value, (tuple, frozenset)):
        return ", ".join(map(str, value))
    return (
        f"{value:,}"
        if isinstance(value, int) and not isinstance(value, bool)
        else str(value if value is not None else "")
    )
