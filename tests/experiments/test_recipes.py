"""The recipes that a user copies: each is valid as it stands, with its container block, and with every line that its
comments offer; and each can be submitted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from detrun.experiments.dry_run import dry_run_resume
from detrun.experiments.resume import ResumeOptions
from detrun.recipe import LoadedRecipe, load_recipe
from detrun.records.archive import Archive
from tests.experiments.test_dry_run import hold_against_golden, plain_environment, update

__all__ = ["plain_environment", "update"]

RECIPES = Path(__file__).parents[2] / "recipes"
CLUSTER = sorted(path for path in RECIPES.glob("*.yaml") if "cluster: slurm" in path.read_text())
SETUP = re.compile(r"^  # Without containers:.*\n  setup: .*\n", re.MULTILINE)
CONTAINER = re.compile(r"^  # (container:|  (?:image|mounts|python): )", re.MULTILINE)
OFFERED = re.compile(r"\{kind: [^}]*\}")


def written(name: str, text: str, folder: Path) -> Path:
    (folder / "code").mkdir(exist_ok=True)
    path = folder / f"{name}.yaml"
    path.write_text(re.sub(r"^  workdir: \S+", "  workdir: code", text, flags=re.MULTILINE))
    return path


def with_container(text: str) -> str:
    """As the comments say: the container's lines in place of `setup`."""
    changed = CONTAINER.sub(r"  \1", SETUP.sub("", text))
    assert "\n  container:\n" in changed and "setup:" not in changed
    return changed


def loaded(path: Path, folder: Path, container: bool, *overrides: str) -> LoadedRecipe:
    text = path.read_text()
    return load_recipe(written(path.stem, with_container(text) if container else text, folder), overrides)


def test_there_is_one_for_each_training_that_detrun_knows() -> None:
    assert {path.stem for path in CLUSTER} >= {
        "deepspeed", "lightning", "megatron-bridge", "megatron-gpt", "megatron-hybrid", "megatron-moe-mtp", "torchrun",
        "torchtitan-deepseek-v3", "torchtitan-llama3", "transformers-trainer",
    }  # fmt: skip


@pytest.mark.parametrize("container", [False, True], ids=["setup", "container"])
@pytest.mark.parametrize("path", CLUSTER, ids=lambda path: path.stem)
def test_it_is_valid_and_can_be_submitted(path: Path, container: bool, tmp_path: Path, plain_environment: None) -> None:
    recipe = loaded(path, tmp_path, container, "placement=allocation")
    assert recipe.recipe.name == path.stem
    assert recipe.recipe.checkpoint is not None and recipe.recipe.checkpoint.save_every
    assert bool(recipe.recipe.slurm.container) == container != bool(recipe.recipe.slurm.setup)
    shown = dry_run_resume(recipe, Archive(tmp_path / "archive"), ResumeOptions())
    assert ("--container-image=" in shown) == container
    # Every arm saves at the same steps; only what comes after an interruption is told where to go on.
    for text in recipe.recipe.checkpoint.save_args:
        assert shown.count(re.sub(r"\{.*", "", text)) >= 3


@pytest.mark.parametrize("path", CLUSTER, ids=lambda path: path.stem)
def test_every_interruption_that_its_comments_offer_is_one(path: Path, tmp_path: Path) -> None:
    for offered in dict.fromkeys(OFFERED.findall(path.read_text())):
        assert loaded(path, tmp_path, False, f"interrupt={offered}").recipe.interrupt


@pytest.mark.parametrize("path", CLUSTER, ids=lambda path: path.stem)
def test_every_source_that_its_comments_offer_is_one(path: Path, tmp_path: Path) -> None:
    text = re.sub(r"^  # (also: .*)", r"  \1", path.read_text(), flags=re.MULTILINE)
    assert load_recipe(written(path.stem, text, tmp_path)).recipe.metrics.source == "recorder"


@pytest.mark.parametrize(("name", "container"), [("megatron-moe-mtp", True), ("lightning", False)])
def test_what_would_be_submitted(
    name: str, container: bool, tmp_path: Path, plain_environment: None, update: bool
) -> None:
    recipe = loaded(RECIPES / f"{name}.yaml", tmp_path, container)
    shown = dry_run_resume(recipe, Archive(tmp_path / "archive"), ResumeOptions())
    hold_against_golden(f"recipe-{name}", shown, tmp_path, update)
