"""history.html: nights × recipes, and of each recipe what there is to know. It lies in the archive's folder, beside the
experiments whose reports it links to, and is made anew from their verdicts whenever it is asked for."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from detrun.compare.history import WORST, Break, Cell, History, RecipeHistory
from detrun.records.archive import Archive
from detrun.records.files import write_atomically
from detrun.report import history_words as words
from detrun.report.pages import environment

NAME = "history.html"
MAX_NIGHTS = 366
MAX_BREAKS = 20


def write_history(archive: Archive, found: History, now: datetime | None = None) -> Path:
    """Writes the page by rename and returns its path; ArchiveError where that fails."""
    path = archive.root / NAME
    write_atomically(path, render_history(found, archive.root, now).encode("utf-8", "backslashreplace"))
    return path


def render_history(found: History, root: Path | None = None, now: datetime | None = None) -> str:
    """The page. root: the archive, where there is one: only reports that are there are linked to."""
    nights = found.nights[-MAX_NIGHTS:]
    recipes = sorted(found.recipes, key=lambda each: (not each.bad, WORST.index(each.latest.state), each.name))
    return (
        environment()
        .get_template("history.html.j2")
        .render(
            title=words.title(found),
            state="diverged" if any(each.bad for each in recipes) else "identical" if recipes else "not-verified",
            recipes=[_recipe(each, found, root) for each in recipes],
            names=[each.name for each in found.recipes],
            rows=[
                (night, [_cell(each.cells.get(night), root) for each in found.recipes]) for night in reversed(nights)
            ],
            left_out=len(found.nights) - len(nights),
            legend=list(words.STATES.items()),
            written=f"{now or datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        )
    )


def _recipe(recipe: RecipeHistory, found: History, root: Path | None) -> dict[str, Any]:
    worst = "diverged" if recipe.bad else recipe.latest.state
    state, sign = str(worst), words.STATES[worst][0]
    if recipe.flaky and not recipe.bad:  # its last night may look well
        state, sign = "flaky", "~"
    return {
        "name": recipe.name,
        "state": state,
        "sign": sign,
        "sentence": words.state(recipe, found.nights),
        "flaky": words.flaky(recipe),
        "rates": [words.rate(each) for each in recipe.rates],
        "breaks": [_break(each, root) for each in reversed(recipe.breaks[-MAX_BREAKS:])],
        "more_breaks": max(0, len(recipe.breaks) - MAX_BREAKS),
    }


def _break(found: Break, root: Path | None) -> dict[str, Any]:
    return {
        "first_bad": found.first_bad,
        "what": words.headline(found),
        "id": found.bad.id,
        "link": link_of(found.bad.id, root),
        "last_good": words.last_good(found),
        "good_link": link_of(found.good.id, root) if found.good else None,
        "changes": words.changes(found),
    }


def _cell(found: Cell | None, root: Path | None) -> dict[str, Any]:
    if found is None:
        return {"state": "nothing", "sign": words.NOTHING[0], "word": "", "what": "", "link": None, "more": ""}
    sign, word = words.STATES[found.state]
    step = f" at step {found.step}" if found.step is not None else ""
    # Of several the worst is shown; what passed beside it is in the list of experiments.
    link = link_of(found.entries[0].id, root) if found.entries and found.state != "not-started" else None
    return {
        "state": found.state,
        "sign": sign,
        "word": f"{word}{step}",
        "what": found.what,
        "link": link,
        "more": _more(found),
    }


def _more(found: Cell) -> str:
    """How many experiments a cell stands for."""
    if len(found.entries) < 2:
        return ""
    return f"all {len(found.entries)}" if found.state == "identical" else f"worst of {len(found.entries)}"


def link_of(id: str, root: Path | None) -> str | None:
    """Where an experiment's report lies, from a page in the archive's folder; None where there is none."""
    link = f"{id}/report.html"
    return link if root is None or (root / link).is_file() else None
