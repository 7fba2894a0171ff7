"""What is made from the models: the JSON Schema, the commented recipe, the reference page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from detrun.recipe import Recipe, recipe_schema, template
from detrun.recipe.outline import _all_keys, description, is_text
from detrun.recipe.reference import updated
from tests.recipe.conftest import SMALL, Load
from tests.recipe.test_reading import FULL

ROOT = Path(__file__).parents[2]


def test_the_reference_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
    assert page == updated(page), "run: python -m detrun.recipe.reference docs/recipe.md"


def test_examples_of_the_reference_page_are_valid(load: Load) -> None:
    page = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
    first, second = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    load(first)
    load(SMALL + second)


def test_every_key_is_described() -> None:
    keys = [tuple(key.split(".")) for key in _all_keys()]
    assert [key for key in keys if not description(key)] == []


def test_text_keys_are_known_from_the_schema() -> None:
    """A number there is the text it was written as; a key that is missing here would lose digits."""
    texts = {key for key in _all_keys() if is_text(tuple(key.split(".")))}
    assert texts == {
        "name", "launch.workdir", "checkpoint.directory", "checkpoint.pattern", "slurm.partition",
        "slurm.account", "slurm.qos", "slurm.constraint", "archive", "metrics.path", "metrics.pattern", "metrics.step",
        "metrics.also.path", "metrics.also.pattern", "metrics.also.step",
    }  # fmt: skip
    assert is_text(("launch", "env", "X")) and is_text(("arms", "b", "args", 0)) and is_text(("slurm", "extra", "mem"))


def test_the_schema_is_one_and_accepts_recipes() -> None:
    schema = recipe_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for text in (SMALL, template("x"), FULL.replace("00:20:00", '"00:20:00"')):
        assert list(validator.iter_errors(yaml.safe_load(text))) == []
    assert list(validator.iter_errors({"steps": 0, "launch": {"command": ["x"]}}))
    assert list(validator.iter_errors({"steps": 1, "launch": {"command": ["x"], "nods": 1}}))


def test_the_commented_recipe_is_valid_and_holds_the_defaults(load: Load) -> None:
    recipe = load(template("mine")).recipe
    shown = recipe.model_dump(mode="json")
    default = load(SMALL).recipe.model_dump(mode="json")
    shown["launch"]["ranks_per_node"], shown["launch"]["launcher"] = 1, "none"
    shown["launch"]["command"], default["name"] = default["launch"]["command"], "mine"
    assert shown == default


def test_the_commented_recipe_explains_every_key() -> None:
    text = re.sub(r"^# ?", "", template("x"), flags=re.MULTILINE)
    for key in _all_keys():
        name = key.rpartition(".")[2]
        assert re.search(rf"(^ *|[{{ ]){name}: ", text, flags=re.MULTILINE) or f"\n{name}:" in text, key


def test_what_the_commented_recipe_comments_out_is_valid(load: Load) -> None:
    text = re.sub(r"^# ((?:  |checkpoint:|interrupt:|archive:).*)$", r"\1", template("x"), flags=re.MULTILINE)
    head, _, rest = text.partition("\nname: ")
    recipe = load("name: " + rest, ["interrupt.kind=stop"], ["b.args=--fused"]).recipe
    assert head
    assert recipe.checkpoint is not None and recipe.checkpoint.save_every == 10
    assert recipe.interrupt[0].at_step == 14
    assert recipe.archive == ".detrun"


@pytest.mark.parametrize("name", ["mine", "2024", "true", "1e3", "a.b_c-d", "null"])
def test_the_commented_recipe_takes_any_name(load: Load, name: str) -> None:
    assert load(template(name)).recipe.name == name


def test_models_can_be_made_in_code() -> None:
    data: dict[str, Any] = {"steps": 3, "launch": {"command": ["x", 1]}, "interrupt": None}
    recipe = Recipe.model_validate(data)
    assert recipe.launch.command == ("x", "1")
    assert recipe.interrupt == ()
