"""Lines of a screen, wrapped at words where a terminal is too narrow for them; nothing is ever cut off."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

from rich.text import Text

GAP = "     "
"""Between short facts that stand side by side: the first place to break at."""

_GAPS = re.compile(f"{GAP}+")


class Labelled(Text):
    """A line with a label before its text; where it is wrapped, the rest stands below the text."""

    hang = 0

    @classmethod
    def of(cls, label: str, text: str, width: int, style: str = "") -> Labelled:
        """A label, padded to `width` columns, and the text beside it."""
        line = cls(f"{label:<{width}}{text}".rstrip(), style=style)
        line.hang = width
        return line


def wrapped(line: Text, width: int | None) -> list[Text]:
    """The rows of a line on a screen of `width` columns; None: it is left whole."""
    plain = line.plain
    if width is None or len(plain) <= width:
        return [line]
    if isinstance(line, Labelled) and line.hang < width // 2:
        return _below_its_text(line, width)
    if GAP in plain.strip():
        return [Text(row) for row in _rows_of_facts(plain, width, "  ")]
    text = plain.lstrip(" ")
    indent = plain[: len(plain) - len(text)]
    # Given apart, since textwrap leaves white space out before a word that is too long for its line.
    pieces = _words(text, width, f"{indent}  ", indent)
    spans = line.divide([len(pieces[0])])
    return [spans[0], *(Text(piece, style=line.style) for piece in pieces[1:])]


def _below_its_text(line: Labelled, width: int) -> list[Text]:
    label, text = line.plain[: line.hang], line.plain[line.hang :]
    rows = list(_rows_of_facts(text, width - line.hang, "  "))
    return [
        Text(f"{label if not number else ' ' * line.hang}{row}", style=line.style) for number, row in enumerate(rows)
    ]


def _rows_of_facts(plain: str, width: int, indent: str) -> Iterator[str]:
    """Facts side by side while there is room, each row wrapped at words where one alone has none."""
    row = ""
    for fact in _GAPS.split(plain):
        joined = f"{row}{GAP}{fact}" if row else fact
        if row and len(joined) > width:
            yield from _words(row, width, indent)
            row = fact
        else:
            row = joined
    yield from _words(row, width, indent)


def _words(text: str, width: int, indent: str, first: str = "") -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
