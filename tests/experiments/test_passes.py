"""Experiments that run inside another one's folder."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from detrun.experiments.again import recipe_of
from detrun.experiments.checks import PairOptions, plan_pair
from detrun.experiments.passes import run_pass
from detrun.experiments.start import Question
from detrun.launch.local import LocalCluster
from detrun.recipe import LoadedRecipe, load_recipe
from detrun.records.archive import Archive
from detrun.records.jobs import ExperimentFile
from detrun.records.layout import ExperimentFolder
from detrun.records.verdict import Verdict
from tests.running import write_recipe

pytestmark = pytest.mark.slow


class Parent:
    """An experiment's folder, and what is said while it runs its passes."""

    def __init__(self, folder: Path, **keys: object) -> None:
        launch = {"launcher": "none", "ranks_per_node": 1}
        self.recipe: LoadedRecipe = load_recipe(write_recipe(folder, launch=launch, steps=3, **keys))
        self.folder = Archive(folder / ".detrun").create("plain", "outer")
        self.said: list[str] = []
        self.cluster = LocalCluster()
        self.planned: list[str] = []

    def run(self, name: str, loaded: LoadedRecipe | None = None) -> tuple[ExperimentFolder, Verdict]:
        recipe = loaded or self.recipe

        def plan(place: ExperimentFolder):
            self.planned.append(place.path.name)
            return plan_pair(recipe, place, "local", PairOptions(), dict(os.environ))

        question = Question("pair")
        return run_pass(recipe, self.folder, name, self.cluster, question, plan, ["detrun"], self.said.append)


def test_a_pass_is_an_experiment_of_its_own_and_runs_once(tmp_path: Path) -> None:
    parent = Parent(tmp_path)
    place, verdict = parent.run("first")
    assert place.path == parent.folder.path / "passes" / "1-first"
    assert verdict.verdict == "identical"
    assert verdict.id == f"{parent.folder.id}@1-first"
    again, same = parent.run("first")
    assert (again, same.to_json()) == (place, verdict.to_json())
    assert parent.planned == ["1-first"]
    assert [experiment.id for experiment in Archive(tmp_path / ".detrun").list()] == [parent.folder.id]


def test_a_pass_whose_command_was_stopped_is_waited_for_and_not_started_again(tmp_path: Path) -> None:
    parent = Parent(tmp_path)
    place, verdict = parent.run("first")
    place.verdict_file.unlink()
    _, again = parent.run("first")
    assert again.verdict == verdict.verdict
    assert parent.planned == ["1-first"]
    assert "taken up" in " ".join(parent.said)


def test_of_two_commands_at_once_one_waits_and_nothing_runs_twice(tmp_path: Path) -> None:
    parent = Parent(tmp_path)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(parent.run, ["first", "first"])
    assert first[0] == second[0]
    assert parent.planned == ["1-first"]
    assert any("another command is at" in text for text in parent.said)


def test_a_pass_that_was_never_written_is_made_anew(tmp_path: Path) -> None:
    parent = Parent(tmp_path)
    half = parent.folder.pass_folder(1, "first")
    half.jobs_dir.mkdir(parents=True)
    place, verdict = parent.run("first")
    assert (place.path.name, verdict.verdict) == ("1-first", "identical")


def test_an_experiment_runs_again_as_it_was_asked_for(tmp_path: Path) -> None:
    parent = Parent(tmp_path, args=["--nudge-at", "2"], arms={"b": {"env": {"A": "1"}}})
    place, _ = parent.run("first")
    shutil.rmtree(place.path / "arms")
    loaded = recipe_of(place, ExperimentFile.read(place.experiment_file))
    assert loaded.recipe == parent.recipe.recipe
    assert (loaded.workdir, loaded.recipe_dir) == (parent.recipe.workdir, parent.recipe.recipe_dir)
