"""`detrun history`: reads what an archive's experiments and nights came to, and writes the pages that show it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

from detrun.compare.history import History, Lost, history
from detrun.errors import UsageError
from detrun.records.archive import Archive
from detrun.records.files import one_line
from detrun.records.index import Entry, read_index
from detrun.records.nights import read_nights
from detrun.report import history_page, index_page

_AGO = re.compile(r"([0-9]{1,4})([dw])")


def history_of(
    archive: Archive, recipes: Sequence[str] = (), since: str | None = None, now: datetime | None = None
) -> tuple[History, list[Entry]]:
    """The history of an archive, and the entries it was made of, oldest first.

    recipes: only these, by name. since: a date, or so many days or weeks ago (`7d`, `2w`). Raises UsageError where a
    recipe is not there or the time cannot be read, ArchiveError where the archive cannot be.
    """
    start = moment_of(since, now) if since else None
    entries = read_index(archive)
    lost = lost_of(archive)
    if recipes:
        known = {entry.recipe for entry in entries} | {item.recipe for item in lost}
        for name in recipes:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else "detrun list shows what there is"
                raise UsageError(f"no experiment is of a recipe {one_line(name)!r}", where=str(archive.root), hint=hint)
        wanted = set(recipes)
        chosen = [entry for entry in entries if entry.recipe in wanted]
        return history(chosen, [item for item in lost if item.recipe in wanted], start), entries
    return history(entries, lost, start), entries


def moment_of(text: str, now: datetime | None = None) -> datetime:
    """`2026-11-01`, a whole ISO time, `7d` or `2w`; in UTC where it says nothing else. UsageError for any other."""
    now = now or datetime.now(timezone.utc)
    if match := _AGO.fullmatch(text):
        days = int(match[1]) * (7 if match[2] == "w" else 1)
        # Whole days: the night of 7 days ago is in, however late it is today.
        return (now - timedelta(days=days)).replace(hour=0, minute=0, second=0, microsecond=0)
    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        raise UsageError(f"--since {one_line(text)!r} is no time", hint="a date, 2026-11-01, or 7d or 2w") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)


def lost_of(archive: Archive) -> list[Lost]:
    """What nights could not start, so that there is no experiment of it."""
    found = []
    for night in read_nights(archive):
        try:
            created = moment_of(night.created)
        except UsageError:
            continue
        for item in night.items:
            if item.state == "error" and item.experiment is None:
                kind = "" if item.kind == "pair" else f"{item.kind}: "
                what = one_line(f"{kind}{item.what or 'it could not be started'}", 300)
                found.append(Lost(night.night, item.recipe, what, created))
    return found


def write_pages(archive: Archive, found: History, entries: Sequence[Entry]) -> Path:
    """Writes history.html and index.html into the archive; returns the first. ArchiveError where that fails."""
    page = history_page.write_history(archive, found)
    index_page.write_index(archive, entries)  # last: it links to the other
    return page


def write_history(archive: Archive) -> Path:
    """Reads the archive and writes both pages anew, of everything; returns history.html."""
    return write_pages(archive, *history_of(archive))
