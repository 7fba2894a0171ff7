"""A folder to write recipes in, and the text of the error that reading one gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from detrun.errors import RecipeError
from detrun.recipe import LoadedRecipe, load_recipe

SMALL = """\
launch:
  command: [python, train.py]
steps: 30
"""

Load = Callable[..., LoadedRecipe]
Refused = Callable[..., str]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """load(text, overrides, arms): writes `recipe.yaml` and reads it."""
    monkeypatch.chdir(tmp_path)

    def load(text: str, overrides: Sequence[str] = (), arms: Sequence[str] = ()) -> LoadedRecipe:
        Path("recipe.yaml").write_text(text, encoding="utf-8")
        return load_recipe(Path("recipe.yaml"), overrides, arms)

    return load


@pytest.fixture
def refused(load: Load) -> Refused:
    """refused(text, overrides, arms): the rendered error."""

    def refused(text: str, overrides: Sequence[str] = (), arms: Sequence[str] = ()) -> str:
        with pytest.raises(RecipeError) as caught:
            load(text, overrides, arms)
        assert caught.value.exit_code == 2
        return caught.value.render()

    return refused
