"""The recipe's patterns of log lines: whether they can be read, and their copies in an experiment's folder, which a
later reader has even where the recipe's folder is gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from detrun.errors import RecordError
from detrun.recipe import LoadedRecipe
from detrun.records.files import write_atomically
from detrun.records.layout import ExperimentFolder
from detrun.records.sources.patterns import Pattern, is_file, load_pattern


def check_patterns(loaded: LoadedRecipe) -> None:
    """Raises RecipeError for a pattern that is not there, or says nothing of what it is wanted for."""
    names: dict[str, str] = {}
    for key, source, name in _patterns(loaded):
        try:
            pattern = _load(loaded, name)
        except RecordError as error:
            where = f"{error.where} " if error.where else ""
            raise loaded.error(key, f"{key}: {where}{error.what}", error.hint) from None
        if source == "log" and pattern.log is None:
            raise loaded.error(key, f"{key}: {name} says nothing of log lines", "it needs log: {head: …, field: …}.")
        if is_file(name) and names.setdefault(Path(name).name, name) != name:
            raise loaded.error(key, f"{key}: two files are called {Path(name).name}", "give one of them another name.")


def keep_patterns(loaded: LoadedRecipe, folder: ExperimentFolder) -> None:
    """Copies the recipe's own patterns into an experiment's folder."""
    for _, _, name in _patterns(loaded):
        if is_file(name):
            path = loaded.recipe_dir / Path(name).expanduser()
            write_atomically(folder.patterns_dir / path.name, path.read_bytes())


def _load(loaded: LoadedRecipe, name: str) -> Pattern:
    return load_pattern(str(loaded.recipe_dir / Path(name).expanduser()) if is_file(name) else name)


def _patterns(loaded: LoadedRecipe) -> Iterator[tuple[str, str, str]]:
    """(key, source, pattern) of each that the recipe names."""
    metrics = loaded.recipe.metrics
    if metrics.pattern is not None:
        yield "metrics.pattern", metrics.source, metrics.pattern
    for index, also in enumerate(metrics.also):
        if also.pattern is not None:
            yield f"metrics.also.{index}.pattern", also.source, also.pattern
