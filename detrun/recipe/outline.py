"""The recipe's JSON Schema, walked by key path: known keys, what a value has to be, where a lost key belongs.

Derived from the models in schema.py once a process, so that messages, editors and the reference say the same.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from typing import Any

from detrun.recipe.document import Key
from detrun.recipe.schema import Recipe
from detrun.recipe.values import OPTION_SCHEMA

Node = dict[str, Any]


def recipe_schema() -> Node:
    """JSON Schema (2020-12) of a recipe file, for editors and for the reference."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **deepcopy(_schema()),
        "title": "detrun recipe",
    }


@cache
def _schema() -> Node:
    schema = Recipe.model_json_schema(mode="validation")
    for properties, key in ((schema["properties"], "interrupt"), (schema["$defs"]["Metrics"]["properties"], "also")):
        several = properties[key]
        described = {about: several.pop(about) for about in ("title", "description", "default")}
        properties[key] = {"anyOf": [several["items"], several, {"type": "null"}], **described}
    return schema


def _choices(node: Node) -> list[Node]:
    """A node's alternatives, references followed; null is left out."""
    if "$ref" in node:
        return _choices(_schema()["$defs"][node["$ref"].rsplit("/", 1)[-1]])
    if "anyOf" in node:
        return [choice for part in node["anyOf"] for choice in _choices(part) if choice.get("type") != "null"]
    return [node]


def node_at(key: Key) -> Node | None:
    """The schema of the value at `key`, or None where no such key is known."""
    nodes: list[Node] = [_schema()]
    for part in key:
        choices = [choice for node in nodes for choice in _choices(node)]
        nodes = [below for choice in choices if (below := _below(choice, part)) is not None]
    return nodes[0] if nodes else None


def _below(node: Node, part: str | int) -> Node | None:
    if isinstance(part, int):
        return node.get("items")
    if part in node.get("properties", {}):
        return dict(node["properties"][part])
    for below in node.get("patternProperties", {}).values():
        return dict(below)
    extra = node.get("additionalProperties")
    return dict(extra) if isinstance(extra, dict) else None


def is_text(key: Key) -> bool:
    """Whether the value at `key` is text and nothing else: a plain number there is the text it was written as."""
    node = node_at(key)
    return node is not None and all(_says_text(choice) for choice in _choices(node))


def _says_text(node: Node) -> bool:
    kinds = node.get("type")
    return (
        "enum" not in node
        and "const" not in node
        and (kinds == "string" or (isinstance(kinds, list) and "string" in kinds))
    )


def is_switch(key: Key) -> bool:
    """Whether true, false and null mean something of their own at `key` (an option of sbatch or srun)."""
    node = node_at(key)
    return node is not None and node.get("type") == OPTION_SCHEMA["type"]


def known_keys(key: Key) -> list[str]:
    """The keys known in the section at `key`; empty where any name may stand."""
    node = node_at(key)
    return [name for choice in _choices(node or {}) for name in choice.get("properties", {})]


def required_keys(key: Key) -> list[str]:
    """The keys that the section at `key` cannot do without."""
    return [name for choice in _choices(node_at(key) or {}) for name in choice.get("required", [])]


def description(key: Key) -> str:
    """The line that explains `key`; empty for an unknown key."""
    node = node_at(key) or {}
    lines = [node.get("description"), *(choice.get("description") for choice in _choices(node))]
    return next((line for line in lines if line), "")


def words(key: Key) -> tuple[list[str], bool]:
    """The fixed words that may stand at `key`, and whether nothing else may."""
    choices = _choices(node_at(key) or {})
    listed = [_words(choice) for choice in choices]
    return [word for some in listed for word in some], bool(listed) and all(listed)


def _words(node: Node) -> list[str]:
    return list(node.get("enum", [node["const"]] if "const" in node else []))


def wanted(key: Key) -> str:
    """What the value at `key` has to be, in words: `a whole number of at least 1`."""
    return wanted_by(node_at(key) or {})


def wanted_by(node: Node) -> str:
    """What a schema node asks for, in words."""
    return " or ".join(dict.fromkeys(_wanted(choice) for choice in _choices(node)))


def _wanted(node: Node) -> str:
    listed = _words(node)
    if listed:
        return "one of " + ", ".join(listed) if len(listed) > 1 else listed[0]
    kind = node.get("type")
    if kind in ("integer", "number"):
        noun = "a whole number" if kind == "integer" else "a number"
        if "exclusiveMinimum" in node:
            return f"{noun} above {node['exclusiveMinimum']:g}"
        bounds = f" of at least {node['minimum']}" if "minimum" in node else ""
        return noun + bounds + (f" and at most {node['maximum']:,}" if "maximum" in node else "")
    if kind == "array":
        return f"a list of {_plural(wanted_by(node.get('items', {})))}"
    if kind == "object":
        return "a mapping of keys"
    if kind == OPTION_SCHEMA["type"]:
        return "text, a number, a list, true, false or null"
    return "text" if kind == "string" or (isinstance(kind, list) and "string" in kind) else "a value"


def _plural(words: str) -> str:
    return {"text": "texts", "a mapping of keys": "mappings"}.get(
        words, words.replace("a whole number", "whole numbers")
    )


def nearest(word: str, words: list[str]) -> str | None:
    """The word that was most likely meant; dashes, underscores and case do not count."""
    by_plain = {_plain(known): known for known in words}
    near = difflib.get_close_matches(_plain(word), by_plain, n=1)
    return by_plain[near[0]] if near else None


def _plain(word: str) -> str:
    return word.lower().replace("-", "_").strip()


def guess(section: Key, name: str) -> str | None:
    """The key most likely meant by the unknown `name` in `section`: its name here, or its dotted path elsewhere."""
    here = known_keys(section)
    same = [known for known in here if _plain(known) == _plain(name)]
    if same:
        return same[0]
    elsewhere = [path for path in _all_keys() if _plain(path.rpartition(".")[2]) == _plain(name)]
    if elsewhere:
        return elsewhere[0]
    return nearest(name, here) or _near_elsewhere(name)


def _near_elsewhere(name: str) -> str | None:
    by_last = {path.rpartition(".")[2]: path for path in reversed(_all_keys())}
    near = difflib.get_close_matches(_plain(name), by_last, n=1, cutoff=0.8)
    return by_last[near[0]] if near else None


@cache
def _all_keys() -> list[str]:
    """Every key with a fixed name, dotted, in the order of the models."""
    return list(_walk(_schema(), ""))


def _walk(node: Node, above: str) -> Iterator[str]:
    for choice in _choices(node):
        for name, below in choice.get("properties", {}).items():
            path = f"{above}{name}"
            yield path
            yield from _walk(below, f"{path}.")
        if "items" in choice:
            yield from _walk(choice["items"], above)
        for below in choice.get("patternProperties", {}).values():
            yield from _walk(below, f"{above}b.")
