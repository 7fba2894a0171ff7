"""The experiments of an archive, a line each."""

from __future__ import annotations

from collections.abc import Sequence

from detrun.records.files import one_line
from detrun.records.index import Entry
from detrun.report.answer import word

Row = dict[str, str | None]


def rows(entries: Sequence[Entry]) -> list[Row]:
    """What `--json` prints of them."""
    return [_row(entry) for entry in entries]


def _row(entry: Entry) -> Row:
    first = None
    if entry.step is not None:
        first = "before the first step" if entry.boundary == "begin" else f"step {entry.step}"
    # Of what it is may be many names long.
    culprit = str((entry.culprit or {}).get("name") or "").partition(" of ")[0].removesuffix(".default") or None
    return {"id": entry.id, "recipe": entry.recipe, "verdict": word(entry), "first": first, "culprit": culprit}


def lines(found: Sequence[Row]) -> list[str]:
    """The same in columns."""
    cells = [[one_line(row[key] or "", 1000) for key in ("id", "verdict", "first", "culprit")] for row in found]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(each, widths, strict=True)).rstrip() for each in cells]
