"""Placeholders in a recipe's text: `{seed}`, `{out}` and the like; `{{` and `}}` stand for a brace.

A scanner of our own and not `str.format`: a placeholder is a bare name from the list below, with no attribute,
index, conversion or format behind it, so that a recipe stays data.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from detrun.errors import RecipeError

PLACEHOLDERS: dict[str, str] = {
    "seed": "the recipe's seed",
    "steps": "how many steps an arm trains",
    "out": "the arm's own folder for what it writes, shared by its attempts",
    "checkpoint": "the checkpoint to resume from; only in checkpoint.resume_args",
    "save_every": "checkpoint.save_every",
    "arm": "a, b, c, …",
    "attempt": "0, or how often the arm was resumed",
    "nodes": "launch.nodes",
    "ranks": "ranks of an arm, over all its nodes",
    "recipe_dir": "the folder that holds the recipe",
}


@dataclass(frozen=True)
class Fault:
    """What is wrong with a placeholder, and what to write instead."""

    what: str
    hint: str


class _Misspelt(Exception):  # noqa: N818  never leaves this module
    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.what)
        self.fault = fault


def expand(text: str, values: Mapping[str, object]) -> str:
    """`text` with every placeholder replaced by its value and `{{`, `}}` by a brace.

    Raises RecipeError for a brace that stands alone and for a name that has no value in `values`.
    """
    try:
        return "".join(part if literal else _value(part, values) for literal, part in _parts(text))
    except _Misspelt as misspelt:
        raise RecipeError(f"{misspelt.fault.what} in {text!r}", hint=misspelt.fault.hint) from None


def check(text: str, allowed: Mapping[str, str] = PLACEHOLDERS) -> Fault | None:
    """The first thing wrong with the placeholders in `text`, or None. allowed: names that may stand here."""
    try:
        for literal, part in _parts(text):
            if not literal and part not in allowed:
                return _unknown(part, allowed)
    except _Misspelt as misspelt:
        return misspelt.fault
    return None


def escape(text: str) -> str:
    """`text` with its braces doubled: `expand(escape(text), {})` is `text`."""
    return text.replace("{", "{{").replace("}", "}}")


def _value(name: str, values: Mapping[str, object]) -> str:
    if name in values:
        return str(values[name])
    if name in PLACEHOLDERS:
        raise _Misspelt(Fault(f"{{{name}}} has no value here", f"{{{name}}} is {PLACEHOLDERS[name]}."))
    raise _Misspelt(_unknown(name, values))


def _unknown(name: str, allowed: Mapping[str, object]) -> Fault:
    what = f"{{{name}}} is not a placeholder"
    if name in PLACEHOLDERS:
        return Fault(f"{{{name}}} has no value here", f"{{{name}}} is {PLACEHOLDERS[name]}.")
    near = difflib.get_close_matches(name.strip().lower(), allowed, n=1)
    if near:
        return Fault(what, f"did you mean {{{near[0]}}}?")
    known = " ".join(f"{{{known}}}" for known in allowed)
    return Fault(what, f"write {{{{ and }}}} for braces; placeholders here: {known}")


def _parts(text: str) -> Iterator[tuple[bool, str]]:
    """(True, literal text) and (False, a placeholder's name), in order."""
    position = 0
    while position < len(text):
        brace = min(
            (found for found in (text.find("{", position), text.find("}", position)) if found >= 0),
            default=-1,
        )
        if brace < 0:
            yield True, text[position:]
            return
        if brace > position:
            yield True, text[position:brace]
        character = text[brace]
        if text[brace + 1 : brace + 2] == character:
            yield True, character
            position = brace + 2
            continue
        end = text.find("}", brace + 1)
        if character == "}" or end < 0:
            raise _Misspelt(Fault(f"a {character} stands alone", f"write {character * 2} for a brace."))
        yield False, text[brace + 1 : end]
        position = end + 1
