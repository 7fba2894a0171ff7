"""The table of all keys in docs/recipe.md, made from the models: `python -m detrun.recipe.reference docs/recipe.md`.

A test holds the page against it, so that the page cannot go stale.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from detrun.recipe import outline
from detrun.recipe.document import Key, dotted
from detrun.recipe.placeholders import PLACEHOLDERS

BEGIN = "<!-- made by python -m detrun.recipe.reference; do not edit below -->"
END = "<!-- made by python -m detrun.recipe.reference; do not edit above -->"


def reference() -> str:
    """All keys and all placeholders as Markdown: a heading and a table a section."""
    lines = ["### Top level", "", *_table(())]
    for section in _sections():
        title = dotted(section).replace(".b", ".<arm>").replace(".0", "")
        about = outline.description(section)
        lines += ["", f"### {title}", "", about, "", *_table(section)]
    lines += ["", "### Placeholders", "", "| placeholder | value |", "| --- | --- |"]
    lines += [f"| `{{{name}}}` | {_cell(about)} |" for name, about in PLACEHOLDERS.items()]
    return "\n".join(lines) + "\n"


def updated(page: str) -> str:
    """The page with what lies between its two marks made anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{reference()}\n{END}{after}"


def _sections() -> Iterator[Key]:
    yield from (("launch",), ("metrics",), ("metrics", "also"), ("checkpoint",), ("interrupt",), ("arms", "b"))
    yield from (("slurm",), ("watchdog",), ("limits",))


def _table(section: Key) -> Iterator[str]:
    yield "| key | value | default | meaning |"
    yield "| --- | --- | --- | --- |"
    for name in dict.fromkeys(outline.known_keys(section)):
        key = (*section, name)
        yield f"| `{name}` | {_cell(_kind(key))} | {_default(section, key)} | {_cell(outline.description(key))} |"


def _kind(key: Key) -> str:
    if outline.known_keys(key):
        return "a section"
    if key == ("arms",):
        return "a section an arm"
    return outline.wanted(key)


def _default(section: Key, key: Key) -> str:
    if str(key[-1]) in outline.required_keys(section):
        return "required"
    # These two depend on the rest; their descriptions say how.
    if key in (("name",), ("launch", "launcher")):
        return "see there"
    default = (outline.node_at(key) or {}).get("default", {})
    return "" if outline.known_keys(key) else f"`{_yaml(default)}`"


def _yaml(value: Any) -> str:
    """A default as it would be written in a recipe, on one line."""
    if isinstance(value, list):
        return "[" + ", ".join(map(str, value)) + "]"
    return value if isinstance(value, str) else json.dumps(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        page = Path(argument)
        page.write_text(updated(page.read_text(encoding="utf-8")), encoding="utf-8")
