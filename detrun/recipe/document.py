"""A YAML file as plain data that still knows, for every key and item, the line and column it was written at.

Read with PyYAML's composer and its BaseLoader, which build nodes and no objects; the values are made here. Scalars
follow YAML 1.2's core rules, as editors do: only true and false are booleans, `no` and `on` are text, and 00:20:00
is text too and not, as in YAML 1.1, the number 1200. Tags, duplicate keys, and aliases that multiply without end are
refused.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from detrun.errors import RecipeError

Key = tuple[str | int, ...]

MAX_BYTES = 1 << 20
MAX_VALUES = 50_000  # what a file may hold once its aliases are written out
MAX_DEPTH = 60

_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_NULL = re.compile(r"|~|null|Null|NULL")
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


@dataclass(frozen=True)
class Mark:
    """Where a key or an item is written: line and column counted from 1, and its width in characters."""

    line: int
    column: int
    width: int


@dataclass(frozen=True)
class Document:
    """What a file says. `marks` and `sources` are by key path, list items by their index.

    sources: a plain scalar as it is written, for those that are no text: `1e-3`, `True`, `010`.
    """

    where: str
    text: str
    data: Any
    marks: Mapping[Key, Mark] = field(default_factory=dict)
    sources: Mapping[Key, str] = field(default_factory=dict)

    def excerpt(self, mark: Mark) -> list[str]:
        """The line that `mark` is on and a line of ^ below it."""
        return excerpt(self.text, mark)


def dotted(key: Key) -> str:
    """A key path as a person writes it: `launch.env.HOME`, `interrupt.0.kind`."""
    return ".".join(str(part) for part in key)


def excerpt(text: str, mark: Mark) -> list[str]:
    """The line of `text` that `mark` is on, numbered, with ^ below the place; a long line is cut around it."""
    lines = _lines(text)
    line = lines[mark.line - 1].replace("\t", " ") if mark.line <= len(lines) else ""
    column, width = mark.column - 1, max(mark.width, 1)
    if len(line) > 100:
        cut = max(0, column - 40)
        line, column = ("…" if cut else "") + line[cut : cut + 100], column - cut + (1 if cut else 0)
    width = max(1, min(width, len(line) - column))
    head = f"{mark.line} | "
    return [head + line, " " * (len(head) + column) + "^" * width]


def _lines(text: str) -> list[str]:
    """Lines as YAML counts them."""
    return re.split("\r\n|[\n\r\x85\u2028\u2029]", text)


def read_text(path: Path, where: str) -> str:
    """A recipe file's text. Raises RecipeError for a missing, unreadable, binary, empty or oversized file."""
    try:
        # Opening a named pipe waits for a writer, which may never come; those in /dev have theirs: `<(…)`.
        if path.is_fifo() and path.absolute().parts[1:2] not in (("dev",), ("proc",)):
            raise RecipeError(f"{where} is a pipe, not a recipe", hint="write it to a file first.")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise RecipeError(f"{where} does not exist", hint=_nearby(path)) from None
    except IsADirectoryError:
        raise RecipeError(f"{where} is a folder, not a recipe", hint=_inside(path)) from None
    except PermissionError:
        raise RecipeError(f"{where} may not be read by this user", hint=f"chmod u+r {where}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise RecipeError(f"{where} cannot be read: {reason}") from None
    if len(content) > MAX_BYTES:
        raise RecipeError(f"{where} is larger than 1 MiB, too large for a recipe", hint="is it the right file?")
    if b"\0" in content:
        raise RecipeError(f"{where} is a binary file, not YAML", hint="is it the right file?")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise RecipeError(
            f"byte 0x{content[error.start]:02x} is not UTF-8",
            where=f"{where}, line {line}",
            hint="save the file as UTF-8.",
        ) from None


def _nearby(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml")]
    except OSError:
        names = []
    by_stem = {name.rpartition(".")[0]: name for name in sorted(names)}
    near = difflib.get_close_matches(path.stem, by_stem, n=1)
    if near:
        return f"did you mean {path.with_name(by_stem[near[0]])}?"
    return "`detrun init` writes a commented recipe."


def _inside(path: Path) -> str:
    try:
        recipes = sorted(entry for entry in path.iterdir() if entry.suffix in (".yaml", ".yml") and entry.is_file())
    except OSError:
        recipes = []
    return f"did you mean {recipes[0]}?" if recipes else "`detrun init` writes a commented recipe."


def parse(text: str, where: str) -> Document:
    """YAML text as a Document. Raises RecipeError, with the line, for all that is not one plain document."""
    try:
        node = yaml.compose(text, Loader=yaml.BaseLoader)
    except RecursionError:
        raise RecipeError(f"nested more than {MAX_DEPTH} deep", where=where) from None
    except yaml.YAMLError as error:
        _refuse(text, where, error)
    if node is None:
        raise RecipeError(f"{where} is empty", hint="`detrun init` writes a commented recipe.")
    builder = _Builder(text, where)
    data = builder.value(node, (), ())
    return Document(where, text, data, builder.marks, builder.sources)


def _refuse(text: str, where: str, error: yaml.YAMLError) -> NoReturn:
    if isinstance(error, yaml.reader.ReaderError):
        number = text.count("\n", 0, error.position) + 1
        code = error.character if isinstance(error.character, int) else ord(error.character)
        raise RecipeError(
            f"character U+{code:04X} may not stand in YAML",
            where=f"{where}, line {number}",
            hint="remove it.",
        ) from None
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        raise RecipeError("not readable as YAML", where=where) from None
    place = error.problem_mark
    if "quoted scalar" in (error.context or "") and error.context_mark:
        place = error.context_mark  # where the quote was opened; that it is not closed shows at the file's end only
    mark = Mark(place.line + 1, place.column + 1, 1)
    lines = _lines(text)
    line = lines[mark.line - 1] if mark.line <= len(lines) else ""
    hint = "a text that holds any of : # { } [ ] , & * ! | > % @ wants quotes."
    if "\t" in (error.problem or "") or "\t" in line[: len(line) - len(line.lstrip())]:
        hint = "YAML is indented with spaces; this line has a tab."
    elif place is error.context_mark and "end of stream" in (error.problem or ""):
        hint = "close the quote."
    elif re.search(r"[:-] +\{[a-z_]+\}", line):
        hint = 'a text that begins with a placeholder wants quotes: "{out}/…"'
    elif "single document" in (error.context or ""):
        hint = "one recipe a file: remove what follows the line ---."
    raise RecipeError(
        f"not readable as YAML: {_problem(error)}",
        where=f"{where}, line {mark.line}",
        hint=hint,
        excerpt=excerpt(text, mark) if line else (),
    ) from None


def _problem(error: yaml.MarkedYAMLError) -> str:
    """The parser's words on one line."""
    parts = [part for part in (error.context, error.problem) if part]
    return " ".join(", ".join(parts).split()) or "no reason given"


class _Builder:
    """Turns YAML nodes into values, keeping marks and sources; counts, so that aliases cannot blow it up."""

    def __init__(self, text: str, where: str) -> None:
        self.text = text
        self.where = where
        self.marks: dict[Key, Mark] = {}
        self.sources: dict[Key, str] = {}
        self._count = 0

    def value(self, node: yaml.Node, key: Key, above: tuple[int, ...]) -> Any:
        self._count += 1
        if self._count > MAX_VALUES:
            self._fail(
                node,
                f"holds more than {MAX_VALUES:,} values once its aliases are written out",
                "write it without aliases.",
            )
        if id(node) in above:
            self._fail(node, "an alias that holds itself", "write it without the alias.")
        if len(above) > MAX_DEPTH:
            self._fail(node, f"nested more than {MAX_DEPTH} deep")
        above = (*above, id(node))
        if isinstance(node, yaml.MappingNode):
            self._plain_tag(node, "map")
            return self._mapping(node, key, above)
        if isinstance(node, yaml.SequenceNode):
            self._plain_tag(node, "seq")
            items = []
            for index, item in enumerate(node.value):
                below: Key = (*key, index)
                self.marks[below] = _mark(item)
                items.append(self.value(item, below, above))
            return items
        return self._scalar(node, key)

    def _mapping(self, node: yaml.MappingNode, key: Key, above: tuple[int, ...]) -> dict[str, Any]:
        data: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            name = self._key(key_node)
            below: Key = (*key, name)
            if name in lines:
                first = lines[name]
                self._fail(
                    key_node,
                    f"{dotted(below)} is given twice, first in line {first}",
                    "keep one of them.",
                )
            lines[name] = key_node.start_mark.line + 1
            self.marks[below] = _mark(key_node)
            data[name] = self.value(value_node, below, above)
        return data

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode) or (node.style is None and node.value == ""):
            self._fail(node, "a key has to be plain text", "a text that begins with { or [ wants quotes.")
        if node.style is None and node.value == "<<":
            self._fail(node, "merge keys (<<) are not read", "write the keys out, or use an alias for a whole value.")
        self._plain_tag(node, "str")
        return str(node.value)

    def _scalar(self, node: yaml.Node, key: Key) -> Any:
        self._plain_tag(node, "str")
        text = str(node.value)
        if not isinstance(node, yaml.ScalarNode) or node.style is not None:
            return text
        try:
            value = _plain(text)
        except ValueError:  # Python refuses to read a number of more than 4300 digits
            self._fail(node, "a number with too many digits")
        if not isinstance(value, str) and value is not None:
            self.sources[key] = text
        return value

    def _plain_tag(self, node: yaml.Node, kind: str) -> None:
        if node.tag != f"tag:yaml.org,2002:{kind}" or self.text.startswith("!", node.start_mark.index):
            self._refuse_tag(node)

    def _refuse_tag(self, node: yaml.Node) -> NoReturn:
        tag = str(node.tag).replace("tag:yaml.org,2002:", "!!")
        self._fail(node, f"the tag {tag} is not read: a recipe is plain data and never runs code", "remove the tag.")

    def _fail(self, node: yaml.Node, what: str, hint: str | None = None) -> NoReturn:
        mark = _mark(node)
        raise RecipeError(what, where=f"{self.where}, line {mark.line}", hint=hint, excerpt=excerpt(self.text, mark))


def _mark(node: yaml.Node) -> Mark:
    start, end = node.start_mark, node.end_mark
    width = end.column - start.column if end.line == start.line else 1
    return Mark(start.line + 1, start.column + 1, max(width, 1))


def _plain(text: str) -> Any:
    """A plain scalar by YAML 1.2's core rules."""
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        return int(text, base)
    if _FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text
