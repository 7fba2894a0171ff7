"""A window of steps that cannot hold what is looked for is refused, not traced."""

from __future__ import annotations

from pathlib import Path

import pytest

from detrun.experiments.localize import Baseline, LocalizeOptions, _missed
from detrun.experiments.trace import TraceOptions, plan_trace
from detrun.recipe import LoadedRecipe, load_recipe
from detrun.records.jobs import ExperimentFile
from detrun.records.layout import ExperimentFolder
from detrun.records.verdict import FirstDivergence, Verdict
from tests.records_factory import make_experiment
from tests.running import write_recipe


def baseline(folder: Path, step: int) -> Baseline:
    """A pair that parted at a step."""
    made = make_experiment(folder)
    first = FirstDivergence(step=step, boundary="end", stream="gradients", ranks=[0], arms=["a", "b"])
    verdict = Verdict(id="x", experiment="pair", recipe="x", verdict="diverged", exit_code=1, first_divergence=first)
    experiment = ExperimentFile.read(made.folder.experiment_file)
    return Baseline(ExperimentFolder(made.folder.path), experiment, verdict, resumed=False)


def recipe(folder: Path, **keys: object) -> LoadedRecipe:
    return load_recipe(write_recipe(folder, launch={"launcher": "none", "ranks_per_node": 1}, steps=9, **keys))


@pytest.mark.parametrize(
    ("steps", "every", "said"),
    [
        (None, 1, ""),
        ((3, 3), 1, ""),
        ((1, 9), 1, ""),
        ((1, 2), 1, "the arms part at step 3, after steps 1 to 2"),
        ((4, 6), 1, "the arms part at step 3, before steps 4 to 6"),
        ((1, 2), 4, ""),  # the state was last seen to be equal at the start
    ],
)
def test_a_window_beside_the_step_that_parts(
    steps: tuple[int, int] | None, every: int, said: str, tmp_path: Path
) -> None:
    loaded = recipe(tmp_path, metrics={"required": ["loss"], "state_every": every})
    assert _missed(loaded, LocalizeOptions(steps=steps), baseline(tmp_path, 3)) == said


def test_a_byte_budget_is_what_was_asked_for(tmp_path: Path) -> None:
    options = TraceOptions(byte_budget=1000)
    plan = plan_trace(recipe(tmp_path), ExperimentFolder(tmp_path / "x"), "local", options, {})
    assert '"byte_budget": 1000,' in str(plan)
