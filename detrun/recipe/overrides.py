"""What the command line adds to a recipe: `--set key.path=value`, `--arm b.env.KEY=VALUE`, `--arm b.args='…'`.

Both work on the data before it is checked, so that a wrong override is told as a wrong line is, by its option.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Sequence
from typing import Any

from detrun.errors import RecipeError
from detrun.recipe import outline
from detrun.recipe.document import Document, Key, dotted, parse


def apply(data: Any, overrides: Sequence[str], arms: Sequence[str], sources: dict[Key, str]) -> dict[Key, str]:
    """Change `data` and `sources` in place; returns the option that gave each key.

    Raises RecipeError for an option that cannot be read.
    """
    given: dict[Key, str] = {}
    if not isinstance(data, dict):
        return given
    for override in overrides:
        key = _set(data, override, sources)
        given[key] = f"--set {override}"
    for arm in arms:
        for key in _arm(data, arm, sources):
            given[key] = f"--arm {arm}"
    return given


def _split(text: str, option: str, example: str) -> tuple[str, str]:
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise RecipeError(
            f"{text!r} is not a key, an equals sign and a value",
            where=f"{option} {text}",
            hint=f"for example {option} {example}",
        )
    return path.strip(), value


def _set(data: dict[str, Any], override: str, sources: dict[Key, str]) -> Key:
    path, value = _split(override, "--set", "launch.nodes=2")
    where = f"--set {override}"
    parts = path.split(".")
    if not all(parts):
        raise RecipeError(
            f"{path!r} has an empty part between its dots",
            where=where,
            hint="for example --set launch.nodes=2",
        )
    holder, key = _holder(data, parts, where)
    _forget(sources, key)
    last: Any = key[-1]
    holder[last] = _value(value, key, where, sources)
    return key


def _holder(data: Any, parts: list[str], where: str) -> tuple[Any, Key]:
    """What holds the last part, made where it is missing, and the path with list indices as numbers."""
    key: Key = ()
    for position, part in enumerate(parts):
        if isinstance(data, list):
            if not re.fullmatch(r"[0-9]{1,6}", part) or int(part) >= len(data):
                raise RecipeError(
                    f"{dotted(key)} is a list of {len(data)}; {part} is none of its items",
                    where=where,
                    hint="items are counted from 0.",
                )
            step: str | int = int(part)
        elif isinstance(data, dict):
            step = part
        else:
            raise RecipeError(f"{dotted(key)} is a single value and has no key {part}", where=where)
        key = (*key, step)
        if position == len(parts) - 1:
            return data, key
        if isinstance(data, dict) and data.get(part) is None:
            data[part] = {}
        data = data[step]
    raise AssertionError("a path has at least one part")


def _value(text: str, key: Key, where: str, sources: dict[Key, str]) -> Any:
    """The value after the equals sign: YAML; where text is wanted, what is no YAML text is taken as it stands."""
    if not text.strip():
        return text if outline.is_text(key) else None
    try:
        document: Document | None = parse(text, where)
    except RecipeError as error:
        if not outline.is_text(key):
            hint = "the value is read as YAML: a list is [a, b], and a text with : # { } [ ] , in it wants quotes."
            raise RecipeError(error.what, where=where, hint=hint) from None
        document = None
    if outline.is_text(key) and (document is None or isinstance(document.data, dict | list)):
        return text
    if document is None:
        return text
    sources.update({(*key, *below): source for below, source in document.sources.items()})
    return document.data


def _forget(sources: dict[Key, str], key: Key) -> None:
    for known in [known for known in sources if known[: len(key)] == key]:
        del sources[known]


def _arm(data: dict[str, Any], text: str, sources: dict[Key, str]) -> list[Key]:
    path, value = _split(text, "--arm", "b.env.KEY=VALUE")
    where = f"--arm {text}"
    arm, _, what = path.partition(".")
    if not re.fullmatch(r"[a-z]{1,2}", arm):
        raise RecipeError(
            f"{arm!r} is not an arm",
            where=where,
            hint="arms are called a, b, c, …: a is the reference, b the first repeat.",
        )
    kind, _, name = what.partition(".")
    if kind == "env" and name:
        holder = _section(data, ("arms", arm, "env"), where)
        holder[name] = value
        key: Key = ("arms", arm, "env", name)
        sources.pop(key, None)
        return [key]
    if kind == "args" and not name:
        return _append(data, arm, value, where)
    near = difflib.get_close_matches(kind, ["env", "args"], n=1)
    forms = {"env": f"{arm}.env.KEY=VALUE", "args": f"{arm}.args='…'"}
    hint = f"write {forms[near[0]]}" if near else f"write {forms['env']} or {forms['args']}"
    raise RecipeError(f"{path}: an arm takes env.KEY or args", where=where, hint=hint)


def _append(data: dict[str, Any], arm: str, value: str, where: str) -> list[Key]:
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise RecipeError(
            f"arguments cannot be split: {str(error).lower()}", where=where, hint="close the quote."
        ) from None
    holder = _section(data, ("arms", arm), where)
    args = holder.setdefault("args", [])
    if args is None:
        args = holder["args"] = []
    if not isinstance(args, list):
        return []  # wrong in the file already, which is what will be told
    first = len(args)
    args.extend(words)
    return [("arms", arm, "args", first + index) for index in range(len(words))]


def _section(data: Any, key: tuple[str, ...], where: str) -> Any:
    """The mapping at `key`, made where it is missing."""
    holder: Any = data
    for position, part in enumerate(key):
        if holder.get(part) is None:
            holder[part] = {}
        holder = holder[part]
        if not isinstance(holder, dict):
            raise RecipeError(f"{dotted(key[: position + 1])} in the recipe is not a mapping of keys", where=where)
    return holder
