"""An earlier experiment's recipe, to be launched again as it was asked, or with one thing changed."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from detrun.errors import RecordError
from detrun.recipe import LoadedRecipe, Recipe
from detrun.recipe.document import parse, read_text
from detrun.records.jobs import ExperimentFile
from detrun.records.layout import ExperimentFolder


def recipe_of(folder: ExperimentFolder, experiment: ExperimentFile) -> LoadedRecipe:
    """The recipe as that experiment ran it: what --set and --arm had changed is in it.

    Relative paths start where they started then. Raises RecordError where experiment.json holds no recipe that this
    version knows.
    """
    try:
        recipe = Recipe.model_validate(experiment.recipe)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        what = f"its recipe cannot be run by this version: {key}: {first['msg']}"
        raise RecordError(what, where=str(folder.experiment_file)) from None
    path = Path(experiment.recipe_path) if experiment.recipe_path else folder.path / "recipe.yaml"
    copy = folder.path / "recipe.yaml"
    text = read_text(copy, str(copy))
    return LoadedRecipe(recipe, path, dict(experiment.recipe_lines), text, {}, parse(text, str(path)))
