"""`detrun history`: night after night, recipe by recipe, from the verdicts alone."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from detrun.cli.common import ArchiveOption, JsonOption, archive_option, open_archive, say


def history(
    recipes: Annotated[
        list[str] | None,
        typer.Option("--recipe", help="Only this recipe, by its name. May be given again.", metavar="NAME"),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", help="Only nights from then on: 2026-11-01, 7d or 2w.", metavar="TIME"),
    ] = None,
    archive: ArchiveOption = None,
    opened: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Shows nights × recipes: since when a recipe diverges, what changed then, and how often it diverges.

    A night is bad for a recipe if any experiment of it diverged. What was not verified is neither good nor bad. Writes
    history.html and index.html into the archive. The exit code is 0 whatever the history says.
    """
    from detrun.errors import ArchiveError
    from detrun.experiments.history import history_of, write_pages
    from detrun.records.layout import ExperimentFolder
    from detrun.report.browser import open_page
    from detrun.report.history_screen import document, render

    store = open_archive(archive)
    found, entries = history_of(store, recipes or (), since)
    if as_json:
        json.dump(document(found), sys.stdout, indent=1)
        sys.stdout.write("\n")
    elif not found.recipes:
        say(f"no experiments in {store.root}")
    else:
        render(found, Console(), archive_option(ExperimentFolder(store.root / "any")))
    if not entries:
        return 0
    try:
        page = write_pages(store, found, entries)
    except ArchiveError as error:
        say(f"no page was written: {error}")
        return 0
    say(f"page: {page}")
    if opened and not open_page(page):
        say("no browser could be opened here; the page is a file that any browser shows")
    return 0
