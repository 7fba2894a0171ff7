"""The lines of a text file that one attempt wrote, each with its number in the whole file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from detrun.records.files import read_plain
from detrun.records.sources.reading import Part

MAX_FILE_BYTES = 1 << 30

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


@dataclass(frozen=True, slots=True)
class Line:
    """number: counted from 1 in the file. torn: it has no end, so that nobody knows whether it is whole."""

    number: int
    text: str
    torn: bool = False


def lines_of(part: Part) -> Iterator[Line]:
    """The lines between a part's bounds. Raises RecordError where the file cannot be read."""
    raw = read_plain(part.path, MAX_FILE_BYTES)
    number = raw.count(b"\n", 0, part.start)
    pieces = raw[part.start : part.end].split(b"\n")
    tail = pieces.pop()
    for piece in pieces:
        number += 1
        yield Line(number, piece.decode("utf-8", "replace").rstrip("\r"))
    if tail.strip():
        yield Line(number + 1, tail.decode("utf-8", "replace"), torn=True)


def head_of(part: Part, limit: int = 1 << 20) -> str:
    """The first line of the whole file, whoever wrote it. Raises RecordError where it cannot be read."""
    raw = read_plain(part.path, MAX_FILE_BYTES)
    return raw[:limit].split(b"\n", 1)[0].decode("utf-8", "replace").rstrip("\r")


def without_colours(text: str) -> str:
    """The text without a terminal's escape sequences; what a carriage return was to overwrite stands apart."""
    return _ANSI.sub("", text).replace("\r", " ")


def as_step(value: object) -> int | None:
    """A step as a source has it: a whole number, or the text of one (`12`, `12.0`, `1.2e1`)."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if not isinstance(value, str) or len(value) > 40:
        return None
    text = value.strip()
    if re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        return int(text)
    if re.fullmatch(r"[0-9]{1,18}\.0*|[0-9](?:\.[0-9]{1,17})?[eE]\+?[0-9]{1,2}", text):
        number = float(text)
        return int(number) if number.is_integer() else None
    return None
