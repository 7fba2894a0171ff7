"""What is wrong with a recipe, as data, and the one error a person reads: the first shown, the rest listed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import ErrorDetails

from detrun.errors import RecipeError
from detrun.recipe import outline
from detrun.recipe.document import Document, Key, Mark, dotted
from detrun.recipe.placeholders import PLACEHOLDERS
from detrun.recipe.values import found

_SHOWN = 50


@dataclass(frozen=True)
class Problem:
    """One thing wrong with the value at `key`."""

    key: Key
    what: str
    hint: str = ""


def from_pydantic(errors: Sequence[ErrorDetails], data: Any) -> list[Problem]:
    """pydantic's errors in detrun's words, one a key."""
    problems: dict[Key, Problem] = {}
    for error in errors:
        missing = error["type"] == "missing"
        key = _key(error["loc"], data, missing)
        problems.setdefault(key, _problem(error, key, data))
    return list(problems.values())


def _key(loc: tuple[int | str, ...], data: Any, missing: bool) -> Key:
    """The part of pydantic's location that exists in the data, without the names of union members."""
    key: list[int | str] = []
    value = data
    for part in loc:
        inside = isinstance(value, Mapping) and part in value
        if not inside and not (isinstance(value, list) and isinstance(part, int) and part < len(value)):
            continue
        key.append(part)
        value = value[part]
    if missing:
        key.append(loc[-1])
    return tuple(key)


def _at(data: Any, key: Key) -> Any:
    for part in key:
        data = data[part]
    return data


def _problem(error: ErrorDetails, key: Key, data: Any) -> Problem:
    name = dotted(key)
    kind = error["type"]
    if kind == "missing":
        return Problem(key, f"{name} is missing", f"add {key[-1]}. {outline.description(key)}")
    if kind == "extra_forbidden":
        return _unknown_key(key)
    if kind == "recipe":
        context = error.get("ctx", {})
        what = str(context.get("what", ""))
        return Problem(key, f"{name}: {what}" if name else what, str(context.get("hint", "")))
    value = _at(data, key)
    words, only = outline.words(key)
    near = outline.nearest(value, words) if isinstance(value, str) else None
    meant = f"did you mean {near}?" if near else ""
    if isinstance(value, str) and only:
        return Problem(key, f"{name}: {value!r} is not {outline.wanted(key)}", meant)
    what = f"found {found(value)}, wanted {outline.wanted(key)}"
    if not name:
        return Problem(
            key,
            f"the recipe is {found(value)}, wanted {outline.wanted(key)}",
            "`detrun init` writes a commented recipe.",
        )
    return Problem(key, f"{name}: {what}", meant or _hint(key, value))


def _hint(key: Key, value: Any) -> str:
    if isinstance(value, Mapping) and len(value) == 1:
        (name,) = value
        if name in PLACEHOLDERS and value[name] is None:
            return f'quote it: "{{{name}}}". Without quotes YAML reads a mapping.'
    if outline.wanted(key).startswith("a list") and isinstance(value, str | int | float):
        return f"write a list: [{value}]"
    if value is None and outline.is_text(key):
        return 'write "" for empty text, or leave the key out.'
    if isinstance(value, str) and outline.wanted(key).startswith(("a whole number", "a number")):
        try:
            float(value)
        except ValueError:
            return ""
        return "write it without quotes."
    return ""


def _unknown_key(key: Key) -> Problem:
    section, name = key[:-1], str(key[-1])
    meant = outline.guess(section, name)
    here = ", ".join(outline.known_keys(section))
    hint = f"did you mean {meant}? `detrun init` writes a commented recipe." if meant else f"known keys here: {here}"
    return Problem(key, f"{dotted(key)} is not a known key", hint)


def raise_for(problems: Sequence[Problem], document: Document, options: Mapping[Key, str]) -> None:
    """Raise one RecipeError for `problems`, if there are any. options: what the command line gave, by key."""
    if not problems:
        return
    placed = [_Placed.of(problem, document, options) for problem in problems]
    # In the order of the file; then what is missing altogether; then the command line.
    placed.sort(key=lambda one: (one.option is not None, one.mark is None, one.mark.line if one.mark else 0))
    first, rest = placed[0], placed[1:]
    lines = document.excerpt(first.mark) if first.mark and first.option is None else []
    if rest:
        lines += ["", f"and {len(rest)} more:"] if lines else [f"and {len(rest)} more:"]
        lines += [f"  {one.listed()}" for one in rest[:_SHOWN]]
        lines += [f"  … and {len(rest) - _SHOWN} more"] if len(rest) > _SHOWN else []
    raise RecipeError(first.problem.what, where=first.where(document), hint=first.problem.hint or None, excerpt=lines)


@dataclass(frozen=True)
class _Placed:
    problem: Problem
    mark: Mark | None
    option: str | None

    @classmethod
    def of(cls, problem: Problem, document: Document, options: Mapping[Key, str]) -> _Placed:
        mark, option = mark_of(document, problem.key), option_of(options, problem.key)
        if mark is None and option is None:  # a section that the command line alone has made
            option = next((text for key, text in options.items() if key[: len(problem.key)] == problem.key), None)
        return cls(problem, mark, option)

    def where(self, document: Document) -> str:
        if self.option:
            return self.option
        return f"{document.where}, line {self.mark.line}" if self.mark else document.where

    def listed(self) -> str:
        where = self.option or (f"line {self.mark.line}" if self.mark else "")
        meant = re.match(r"did you mean [^?]*\?", self.problem.hint)
        hint = f" ({meant.group()})" if meant else ""
        return f"{where}: {self.problem.what}{hint}" if where else f"{self.problem.what}{hint}"


def mark_of(document: Document, key: Key) -> Mark | None:
    """Where `key` is written, or the nearest section above it that is; None for the file as a whole."""
    while key and key not in document.marks:
        key = key[:-1]
    return document.marks.get(key)


def option_of(options: Mapping[Key, str], key: Key) -> str | None:
    """The command line option that gave the value at `key`, itself or as part of a larger one."""
    for given, option in reversed(list(options.items())):
        if key[: len(given)] == given:
            return option
    return None
