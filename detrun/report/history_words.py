"""The words of a history, the same on a terminal, on the page and in a summary: what a state is called, what changed,
how often it diverges."""

from __future__ import annotations

from collections.abc import Sequence

from detrun.compare.history import Break, Cell, CellState, Change, History, Rate, RecipeHistory
from detrun.records.index import Entry

STATES: dict[CellState, tuple[str, str]] = {
    "diverged": ("✗", "DIVERGED"),
    "infrastructure": ("!", "job failed"),
    "not-started": ("!", "not started"),
    "not-verified": ("?", "not verified"),
    "unfinished": ("…", "unfinished"),
    "identical": ("✓", "identical"),
}
"""A sign and a word each: neither color nor the sign alone carries the meaning."""

NOTHING = ("·", "")
MAX_CHANGES = 12


def cell(found: Cell | None) -> str:
    """`✗ DIVERGED 7`: with the step, where there is one."""
    if found is None:
        return NOTHING[0]
    sign, word = STATES[found.state]
    return f"{sign} {word}" if found.step is None else f"{sign} {word} @{found.step}"


def state(recipe: RecipeHistory, nights: Sequence[str]) -> str:
    """Where a recipe stands, in one sentence."""
    known = [night for night, each in recipe.cells.items() if each.state in ("diverged", "identical")]
    last = recipe.latest
    unsure = f"; the last night: {STATES[last.state][1]}" if last.state not in ("diverged", "identical") else ""
    if not known and not recipe.bad:
        return f"no night tells: {STATES[last.state][1]}{_because(last)}"
    if recipe.bad:
        return f"DIVERGED since {_night(recipe.breaks[-1].first_bad, nights)}{unsure}"
    if recipe.breaks:
        first = _night(recipe.breaks[0].first_bad, nights)
        times = "diverged in" if len(recipe.breaks) == 1 else f"broke {len(recipe.breaks)} times, first in"
        return f"{times} {first}; identical again in {known[-1]}{unsure}"
    count = f"in all {len(known)} nights that tell" if len(known) > 1 else "in the one night that tells"
    return f"identical {count}{unsure}{_because(last) if unsure else ''}"


def _because(last: Cell) -> str:
    return f" ({last.what})" if last.what else ""


def _night(name: str, nights: Sequence[str]) -> str:
    if name not in nights:
        return name
    return f"{name} (night {list(nights).index(name) + 1} of {len(nights)})"


def headline(found: Break) -> str:
    """What differs, and what is to blame where that is known."""
    return "; ".join(filter(None, [found.bad.what, f"origin: {found.culprit}" if found.culprit else ""]))


def last_good(found: Break) -> str:
    """What there was before it broke."""
    if found.last_good is None:
        return "there is no good night before it"
    between = ""
    if found.silent:
        between = f"; {found.silent} night{'s' if found.silent > 1 else ''} between tell neither"
    against = f" ({found.good.id})" if found.good and found.bad.baseline == found.good.id else ""
    return f"last good night: {found.last_good}{against}{between}"


def changes(found: Break) -> list[str]:
    """What is not as it was in the last good night."""
    if found.last_good is None:
        return []
    if found.changes is None:
        return ["what changed is not recorded"]
    if not found.changes:
        return ["nothing that is recorded has changed"]
    told = [change(each) for each in found.changes[:MAX_CHANGES]]
    rest = len(found.changes) - len(told)
    return [*told, f"and {rest} more"] if rest else told


def change(found: Change) -> str:
    """`numpy 2.4.6 → 2.5.0`."""
    if found.what == "the recipe":
        return "the recipe has changed"
    if found.what == "the program's files":
        return "the program's files have changed"
    before = "(none)" if found.before is None else found.before
    after = "(none)" if found.after is None else found.after
    return f"{found.what} {before} → {after}"


def rate(found: Rate) -> str:
    """`3 of 7 pairs diverged: 43% (95% interval 10% to 82%)`."""
    what = {"pair": "pair", "resume-check": "resume check"}.get(found.kind, found.kind)
    share = percent(found.diverged / found.n)
    return f"{found.diverged:,} of {plural(found.n, what)} diverged: {share} (95% interval {_span(found)})"


def _span(found: Rate) -> str:
    return f"{percent(found.low)} to {percent(found.high)}"


def plural(number: int, word: str) -> str:
    """`1 night`, `1,200 nights`."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def percent(share: float) -> str:
    """A share with as many digits as it deserves."""
    value = 100 * share
    if value in (0, 100) or 1 <= value <= 99:
        return f"{value:.0f}%"
    return f"{value:.2g}%" if value < 1 else f"{min(value, 99.9):.1f}%"


def flaky(recipe: RecipeHistory) -> str | None:
    """Whether chance alone seems to decide."""
    if recipe.flaky is None:
        return None
    if recipe.flaky == "same-nodes":
        return "flaky: both identical and diverged in the same environment, on the same nodes"
    if recipe.flaky_nodes:
        return f"flaky, or a node: equal environments, but diverged only on {', '.join(recipe.flaky_nodes)}"
    return "flaky: both identical and diverged in equal environments, on different nodes"


def title(found: History) -> str:
    """How much is in it."""
    nights, recipes = len(found.nights), len(found.recipes)
    if not recipes:
        return "no experiment yet"
    bad = sum(recipe.bad for recipe in found.recipes)
    flaky = sum(recipe.flaky is not None and not recipe.bad for recipe in found.recipes)
    unsure = sum(recipe.latest.state not in ("diverged", "identical") and not recipe.bad for recipe in found.recipes)
    told = [
        f"{bad} diverge{'s' if bad == 1 else ''}" if bad else "none diverges",
        f"{flaky} {'is' if flaky == 1 else 'are'} flaky" if flaky else "",
        f"{unsure} not verified" if unsure else "",
    ]
    size = f"{plural(nights, 'night')}, {plural(found.experiments, 'experiment')}"
    return f"of {plural(recipes, 'recipe')} {', '.join(filter(None, told))}: {size}"


def short(entry: Entry) -> str:
    """The last part of an id, which is enough to find it."""
    return entry.id.rsplit("-", 1)[-1]
