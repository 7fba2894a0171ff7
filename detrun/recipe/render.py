"""A recipe as text: the commented one that `detrun init` writes, and a resolved one with everything written out."""

from __future__ import annotations

from importlib.resources import files

import yaml

from detrun.recipe.schema import Recipe


def template(name: str) -> str:
    """The commented recipe that runs as it is, under `name` (a recipe's name, taken as it is)."""
    text = files("detrun.recipe").joinpath("template.yaml").read_text(encoding="utf-8")
    return text.replace("name: my-training", f'name: "{name}"' if _reads_as_other(name) else f"name: {name}", 1)


def dump_yaml(recipe: Recipe) -> str:
    """The recipe with every default and override written out; `load_recipe` reads it back as the same recipe."""
    data = recipe.model_dump(mode="json")
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000))


def _reads_as_other(text: str) -> bool:
    """Whether YAML would read a plain `text` as a number, a boolean or null."""
    return not isinstance(yaml.safe_load(text), str)


class _Dumper(yaml.SafeDumper):
    """Block style, but a list of single values on one line, and no aliases."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002  PyYAML's signature
        return True


def _represent_list(dumper: _Dumper, data: list[object]) -> yaml.Node:
    flat = not any(isinstance(item, dict | list) for item in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flat)


_Dumper.add_representer(list, _represent_list)
