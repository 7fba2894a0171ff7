"""`detrun validate`: read and check a recipe, and say so."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from detrun.cli.common import ArmOption, SetOption
from detrun.errors import ExitCode

if TYPE_CHECKING:
    from detrun.recipe import Recipe


def validate(
    recipe: Annotated[Path, typer.Argument(help="The recipe.", metavar="RECIPE")] = Path("detrun.yaml"),
    overrides: SetOption = None,
    arms: ArmOption = None,
    show: Annotated[
        bool, typer.Option("--print", help="Print the recipe with every default and override written out.")
    ] = False,
) -> int:
    """Checks a recipe: its keys, values, placeholders and interruptions. Nothing is launched."""
    from detrun.experiments.source_checks import check_patterns
    from detrun.recipe import check_interrupts, check_supported, dump_yaml, load_recipe

    loaded = load_recipe(recipe, overrides or (), arms or ())
    check_supported(loaded)
    check_patterns(loaded)
    check_interrupts(loaded)
    if not loaded.workdir.is_dir():
        typer.echo(f"note: launch.workdir: {loaded.workdir} is not a folder on this machine", err=True)
    sys.stdout.write(dump_yaml(loaded.recipe) if show else f"ok  {recipe}: {_summary(loaded.recipe)}\n")
    return ExitCode.OK


def _summary(recipe: Recipe) -> str:
    """What would be launched, on one line."""
    nodes = f" on {recipe.launch.nodes} nodes" if recipe.launch.nodes > 1 else ""
    parts = [
        f"{_count(recipe.total_ranks, 'rank')}{nodes} × {_count(recipe.steps, 'step')}",
        f"started by {recipe.launch.launcher}" if recipe.launch.launcher != "none" else "started as it is",
        f"{_count(len(recipe.metrics.required), 'required metric')}",
    ]
    if recipe.arms:
        parts.append(f"arms with settings of their own: {', '.join(recipe.arms)}")
    return f"{recipe.name}, " + ", ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
