"""index.html: the archive's experiments, the newest first, with a box to filter them and links to their reports."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from detrun.compare.history import state_of
from detrun.errors import ArchiveError
from detrun.records.archive import Archive
from detrun.records.files import write_atomically
from detrun.records.index import Entry, read_index
from detrun.report import history_page
from detrun.report.history_words import STATES
from detrun.report.pages import environment

NAME = "index.html"
MAX_ROWS = 3000
"""More make a page that is slow to filter; `detrun list` knows them all."""


def update_index_page(archive: Archive) -> Path | None:
    """Writes index.html anew from the verdicts; None where the archive cannot be read or written.

    It is a convenience: no verdict is lost because of it.
    """
    try:
        return write_index(archive, read_index(archive))
    except ArchiveError:
        return None


def write_index(archive: Archive, entries: Sequence[Entry], now: datetime | None = None) -> Path:
    """Writes the page by rename and returns its path; ArchiveError where that fails. entries: oldest first."""
    path = archive.root / NAME
    write_atomically(path, render_index(entries, archive.root, now).encode("utf-8", "backslashreplace"))
    return path


def render_index(entries: Sequence[Entry], root: Path | None = None, now: datetime | None = None) -> str:
    """The page. root: the archive, where there is one: only reports that are there are linked to."""
    shown = list(reversed(entries[-MAX_ROWS:]))
    history = history_page.NAME if root is None or (root / history_page.NAME).is_file() else None
    return (
        environment()
        .get_template("index.html.j2")
        .render(
            rows=[_row(entry, root) for entry in shown],
            count=len(entries),
            left_out=len(entries) - len(shown),
            history=history,
            states=[
                STATES[state] for state in ("diverged", "infrastructure", "not-verified", "unfinished", "identical")
            ],
            written=f"{now or datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        )
    )


def _row(entry: Entry, root: Path | None) -> dict[str, Any]:
    state = state_of(entry)
    if state is None:  # it answers another question: that it is done is all there is to say
        sign, word = ("✓", "done") if entry.verdict == "identical" else STATES["not-verified"]
    else:
        sign, word = STATES[state]
    culprit = entry.culprit.get("name") if entry.culprit else None
    return {
        "id": entry.id,
        "link": history_page.link_of(entry.id, root),
        "kind": entry.experiment,
        "recipe": entry.recipe,
        "state": state or "nothing",
        "sign": sign,
        "word": f"{word} at step {entry.step}" if entry.step is not None else word,
        "culprit": str(culprit or "").partition(" of ")[0],
        "what": entry.what,
        "created": f"{entry.created:%Y-%m-%d %H:%M}",
        "night": entry.night,
    }
