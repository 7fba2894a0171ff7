"""The recipe room: reads a YAML file into a frozen `Recipe`, with errors that name file, line and remedy.

loaded = load_recipe(Path("detrun.yaml"), overrides=["steps=10"], arms=["b.args=--lr 1e-3"])
loaded.recipe.launch.command, loaded.lines["launch.command"]
"""

from detrun.recipe.load import (
    LoadedRecipe,
    check_interrupts,
    check_launchable,
    check_recorded,
    check_supported,
    load_recipe,
)
from detrun.recipe.outline import recipe_schema
from detrun.recipe.placeholders import PLACEHOLDERS, escape, expand
from detrun.recipe.render import dump_yaml, template
from detrun.recipe.schema import (
    Arm,
    Checkpoint,
    Interrupt,
    Launch,
    Limits,
    Metrics,
    Recipe,
    Slurm,
    Watchdog,
)
from detrun.recipe.values import plain_name

__all__ = [
    "PLACEHOLDERS",
    "Arm",
    "Checkpoint",
    "Interrupt",
    "Launch",
    "Limits",
    "LoadedRecipe",
    "Metrics",
    "Recipe",
    "Slurm",
    "Watchdog",
    "check_interrupts",
    "check_launchable",
    "check_recorded",
    "check_supported",
    "dump_yaml",
    "escape",
    "expand",
    "load_recipe",
    "plain_name",
    "recipe_schema",
    "template",
]
