"""The history on a terminal or in a pipe: nights × recipes, and of each recipe what there is to know."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from detrun.compare.history import WORST, Break, History, Rate, RecipeHistory
from detrun.records.files import one_line
from detrun.report import history_words as words
from detrun.report.wrapping import Labelled, wrapped

MAX_NIGHTS = 31
MIN_COLUMN, MAX_COLUMN = 15, 28
_STYLES = {"diverged": "bold red", "identical": "green"}
_UNSURE = "yellow"


def render(found: History, console: Console, options: str = "") -> None:
    """Prints it. options: what a later command has to be given to find the archive from here."""
    for line in lines(found, console.width, options):
        for piece in wrapped(line, console.width if console.is_terminal else None):
            console.print(piece, soft_wrap=True, highlight=False, markup=False, emoji=False)


def lines(found: History, width: int = 80, options: str = "") -> Iterator[Text]:
    """Its lines; tables of as many recipes as the width holds, one below the other."""
    yield Text(words.title(found), style="bold")
    if not found.recipes:
        return
    nights = found.nights[-MAX_NIGHTS:]
    yield from _tables(found.recipes, nights, width)
    if len(nights) < len(found.nights):
        yield Text(f"the newest {len(nights)} of {len(found.nights)} nights; history.html shows more, --json all")
    for recipe in sorted(found.recipes, key=lambda each: (not each.bad, WORST.index(each.latest.state), each.name)):
        yield Text()
        yield from _recipe(recipe, found.nights, options)


def _tables(recipes: Sequence[RecipeHistory], nights: Sequence[str], width: int) -> Iterator[Text]:
    first = max(len("night"), *map(len, nights)) + 2
    columns = [min(MAX_COLUMN, max(MIN_COLUMN, len(one_line(each.name)))) + 2 for each in recipes]
    start = 0
    while start < len(recipes):
        end, used = start + 1, first + columns[start]
        while end < len(recipes) and used + columns[end] <= width + 2:
            used += columns[end]
            end += 1
        yield Text()
        yield from _table(recipes[start:end], columns[start:end], nights, first)
        start = end


def _table(recipes: Sequence[RecipeHistory], columns: Sequence[int], nights: Sequence[str], first: int) -> list[Text]:
    heads = [textwrap.wrap(one_line(each.name), size - 2) for each, size in zip(recipes, columns, strict=True)]
    rows = []
    for level in range(max(map(len, heads))):
        row = ("night" if not level else "").ljust(first)
        row += "".join(
            (head[level] if level < len(head) else "").ljust(size) for head, size in zip(heads, columns, strict=True)
        )
        rows.append(Text(row.rstrip(), style="bold"))
    for night in nights:
        line = Text(night.ljust(first))
        for recipe, size in zip(recipes, columns, strict=True):
            cell = recipe.cells.get(night)
            style = "" if cell is None else _STYLES.get(cell.state, _UNSURE)
            line.append(words.cell(cell).ljust(size), style=style)
        line.rstrip()
        rows.append(line)
    return rows


def _recipe(recipe: RecipeHistory, nights: Sequence[str], options: str) -> Iterator[Text]:
    yield Text.assemble((one_line(recipe.name), "bold"), "  ", one_line(words.state(recipe, nights), 1000))
    if recipe.breaks:
        for text in _break(recipe.breaks[-1] if recipe.bad else recipe.breaks[0]):
            yield Labelled.of("  ", one_line(text, 2000), 2)
        if recipe.bad and len(recipe.breaks) > 1:
            yield Labelled.of("  ", f"it broke {len(recipe.breaks)} times; first in {recipe.breaks[0].first_bad}", 2)
    for rate in recipe.rates:
        yield Labelled.of("  ", words.rate(rate), 2)
    if flaky := words.flaky(recipe):
        yield Labelled.of("  ", one_line(flaky, 1000), 2)
    if recipe.breaks and (recipe.bad or recipe.flaky):
        worst = [cell.entries[0] for cell in recipe.cells.values() if cell.state == "diverged"] or [
            recipe.breaks[-1].bad
        ]
        command = " ".join(part for part in ("detrun report", words.short(worst[-1]), options) if part)
        yield Labelled.of("  ", command, 2)


def _break(found: Break) -> list[str]:
    told = [headline] if (headline := words.headline(found)) else []
    told.append(words.last_good(found))
    changes = words.changes(found)
    if changes:
        told.append(f"since then: {'; '.join(changes)}")
    return told


def document(found: History) -> dict[str, Any]:
    """The history as `--json` prints it."""
    return {
        "schema_version": 1,
        "nights": list(found.nights),
        "experiments": found.experiments,
        "recipes": {recipe.name: _recipe_document(recipe) for recipe in found.recipes},
    }


def _recipe_document(recipe: RecipeHistory) -> dict[str, Any]:
    return {
        "bad": recipe.bad,
        "state": recipe.latest.state,
        "first_bad_night": recipe.breaks[0].first_bad if recipe.breaks else None,
        "nights": {
            night: {
                "state": cell.state,
                "step": cell.step,
                "what": cell.what,
                "experiments": [entry.id for entry in cell.entries],
            }
            for night, cell in recipe.cells.items()
        },
        "breaks": [_break_document(each) for each in recipe.breaks],
        "rates": {rate.kind: _rate_document(rate) for rate in recipe.rates},
        "flaky": recipe.flaky,
        "flaky_nodes": list(recipe.flaky_nodes),
    }


def _break_document(found: Break) -> dict[str, Any]:
    changes = found.changes
    return {
        "first_bad_night": found.first_bad,
        "experiment": found.bad.id,
        "what": found.bad.what,
        "culprit": found.culprit,
        "last_good_night": found.last_good,
        "last_good_experiment": found.good.id if found.good else None,
        "nights_between": found.silent,
        "changes": None
        if changes is None
        else [{"what": each.what, "before": each.before, "after": each.after} for each in changes],
    }


def _rate_document(rate: Rate) -> dict[str, Any]:
    return {"diverged": rate.diverged, "n": rate.n, "value": rate.diverged / rate.n, "interval": [rate.low, rate.high]}
