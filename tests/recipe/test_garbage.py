"""Whatever is in a file, reading it gives a recipe or a RecipeError with a readable text."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from detrun.errors import RecipeError
from detrun.recipe import Recipe, dump_yaml, load_recipe
from detrun.recipe.outline import _all_keys, known_keys
from tests.recipe.test_reading import FULL

KEYS = sorted({key.rpartition(".")[2] for key in _all_keys()} | {"b", "x"})
ANY = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
        st.sampled_from(["{seed}", "{", "20", "00:20:00", "kill", "torchrun", "all", "on"]),
    ),
    lambda below: st.one_of(
        st.lists(below, max_size=3), st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), below, max_size=4)
    ),
    max_leaves=12,
)  # fmt: skip


def _outcome(content: bytes, overrides: list[str] | None = None, arms: list[str] | None = None) -> Recipe | None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_bytes(content)
        try:
            return load_recipe(path, overrides or (), arms or ()).recipe
        except RecipeError as error:
            assert error.render().startswith("error: ")
            return None


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=200))
def test_bytes(content: bytes) -> None:
    _outcome(content)


@settings(max_examples=80, deadline=None)
@given(st.text(alphabet="abc:-[]{}&*!|>#'\"%@,? \n\t01.~<=", max_size=60))
def test_almost_yaml(text: str) -> None:
    _outcome(text.encode())


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.sampled_from(known_keys(())), ANY, max_size=6))
def test_wrong_values(data: dict[str, Any]) -> None:
    data.setdefault("launch", {"command": ["x"]})
    data.setdefault("steps", 3)
    recipe = _outcome(yaml.safe_dump(data).encode())
    if recipe is not None:
        assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe
        assert _outcome(dump_yaml(recipe).encode()) == recipe


@settings(max_examples=40, deadline=None)
@given(st.integers(0, len(FULL) - 1), st.text(max_size=3), st.integers(0, 5))
def test_one_slip_in_a_good_recipe(position: int, put: str, cut: int) -> None:
    text = FULL[:position] + put + FULL[position + cut :]
    _outcome(text.encode("utf-8", "surrogatepass"))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(_all_keys()) | st.text(max_size=6), st.text(max_size=12))
def test_options(key: str, value: str) -> None:
    _outcome(FULL.encode(), [f"{key}={value}"])
    _outcome(FULL.encode(), [], [f"b.env.{key}={value}"])
    _outcome(FULL.encode(), [], [f"b.args={value}"])
