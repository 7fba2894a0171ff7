"""A night in words: its one line, whether it holds news, and what those are told who are not looking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from detrun.records.files import one_line
from detrun.records.nights import CHECKS, Item
from detrun.report.words import listed, plural

RecipeState = Literal["identical", "diverged", "not verified", "error"]
_HEADS = {"diverged": "DIVERGED", "error": "ERROR", "not verified": "NOT VERIFIED", "identical": "IDENTICAL"}
MOST = 5
"""Recipes of a kind that are named in one line."""

WIDEST = 160


@dataclass(frozen=True)
class Message:
    """What is to be told. changes: a line a recipe whose state changed; state: a line a recipe, as all stand. bad:
    whether any of them diverged or could not be run."""

    title: str
    changes: list[str] = field(default_factory=list)
    state: list[str] = field(default_factory=list)
    bad: bool = False


def state_of(items: Sequence[Item]) -> RecipeState:
    """A recipe's state in a night: any divergence makes it diverged, whatever else was clean."""
    checks = [item for item in items if item.kind in CHECKS]
    if any(item.verdict == "diverged" for item in checks):
        return "diverged"
    if any(item.exit_code not in (0, 3) for item in checks):
        return "error"
    return "identical" if checks and all(item.verdict == "identical" for item in checks) else "not verified"


def summary(night: str, items: Sequence[Item]) -> str:
    """One line: the worst first, and by name what is not identical."""
    groups = _groups(items)
    by_state: dict[RecipeState, list[str]] = {}
    for name, own in groups.items():
        by_state.setdefault(state_of(own), []).append(name)
    order: list[RecipeState] = ["diverged", "error", "not verified", "identical"]
    worst = next((state for state in order if state in by_state), "identical")
    parts = []
    for state in order:
        if state not in by_state:
            continue
        names = by_state[state]
        named = "" if state == "identical" and len(by_state) == 1 else f" ({_named(names, groups, state)})"
        parts.append(f"{len(names)} {state}{named}")
    left = [name for name, own in groups.items() if any(i.kind == "localize" and i.state == "left-out" for i in own)]
    shown = listed([*left[:MOST], *([f"{len(left) - MOST} more"] if len(left) > MOST else [])])
    rest = f"; not localized: {shown}" if left else ""
    return f"{_HEADS[worst]}  night {night}: {plural(len(groups), 'recipe')}: {', '.join(parts)}{rest}"


def has_news(items: Sequence[Item], before: Mapping[str, Sequence[Item]]) -> bool:
    """Whether any check came out otherwise than the night before, or had no night before."""
    for path, own in _by_path(items).items():
        now = {item.kind: item.answer for item in own if item.kind in CHECKS}
        then = {item.kind: item.answer for item in before.get(path, ()) if item.kind in CHECKS}
        if now != then:
            return True
    return False


def message(night: str, items: Sequence[Item], before: Mapping[str, Sequence[Item]]) -> Message:
    """What changed since the night before, and how everything stands."""
    changes, state, bad = [], [], False
    for path, own in _by_path(items).items():
        now = state_of(own)
        bad = bad or now != "identical"
        line = f"{own[0].recipe}: {now}"
        why = _why(own)
        state.append(line + (f" ({why})" if why else ""))
        then = state_of(before[path]) if path in before else None
        if then == now or (then is None and now == "identical"):
            continue
        was = f", was {then} the night before" if then else ", its first night"
        changes.append(line + was + (f": {why}" if why else ""))
    return Message(summary(night, items), changes, state, bad)


def _why(items: Sequence[Item]) -> str:
    """What is wrong with a recipe, in one line, with the operation where it was localized."""
    bad = next((item for item in items if item.kind in CHECKS and item.verdict == "diverged"), None)
    bad = bad or next((item for item in items if item.kind in CHECKS and item.exit_code), None)
    if bad is None:
        return ""
    found = _localized(items)
    text = f"{bad.kind}: {_reason(bad) or 'no verdict'}"
    return one_line(f"{text}; {found}" if found else text, 400)


def _reason(item: Item) -> str:
    """What an item came to, without the word and the name that stand before it already."""
    text = item.what or ""
    head, separator, rest = text.partition("  ")
    text = rest if separator and head.isupper() else text
    return text.removeprefix(f"{item.recipe}: ").removeprefix(f"{item.path}, ")


def _localized(items: Sequence[Item]) -> str | None:
    """What a localization found."""
    return next((item.what for item in items if item.kind == "localize" and item.verdict == "diverged"), None)


def _named(names: Sequence[str], groups: Mapping[str, Sequence[Item]], state: RecipeState) -> str:
    shown = []
    for name in names[:MOST]:
        text = name
        if state == "diverged":
            item = next(item for item in groups[name] if item.kind in CHECKS and item.verdict == "diverged")
            at = f" at step {item.step}" if item.step is not None else ""
            found = _localized(groups[name])
            text += f": {item.kind}{at}" + (f", {one_line(found, WIDEST)}" if found else "")
        elif state in ("error", "not verified"):
            item = next((each for each in groups[name] if each.kind in CHECKS and each.exit_code), groups[name][0])
            text += f": {item.kind}: {one_line(_reason(item), WIDEST)}"
        shown.append(text)
    if len(names) > MOST:
        shown.append(f"{len(names) - MOST} more")
    return listed(shown) if state == "identical" else "; ".join(shown)


def _by_path(items: Sequence[Item]) -> dict[str, list[Item]]:
    found: dict[str, list[Item]] = {}
    for item in items:
        found.setdefault(item.path, []).append(item)
    return found


def _groups(items: Sequence[Item]) -> dict[str, list[Item]]:
    """By the recipe's name; its file where two go by one name."""
    by_path = _by_path(items)
    names = [own[0].recipe for own in by_path.values()]
    return {
        (own[0].recipe if names.count(own[0].recipe) == 1 else f"{own[0].recipe} ({path})"): own
        for path, own in by_path.items()
    }
