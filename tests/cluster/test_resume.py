"""An arm interrupted on a real Slurm cluster, two nodes with two ranks each: it really ends, and really goes on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from detrun.experiments.follow import Pace
from detrun.launch.slurm import SlurmCluster as Slurm
from tests.cluster.conftest import SlurmCluster
from tests.experiments.resuming import SAVES, Arms, plain_recipe, run_resume

PACE = Pace(look=0.3, poll=1.0, at_rest=4.0, grace=8.0)


@pytest.fixture
def recipe(mended_cluster: SlurmCluster, tmp_path: Path) -> Iterator[Any]:
    def make(args: list[str] | None = None, **keys: Any) -> Path:
        keys["launch"] = {"nodes": 2, "ranks_per_node": 2, **keys.get("launch", {})}
        keys["slurm"] = {"time": "00:05:00", "partition": "debug"}
        return plain_recipe(tmp_path, args, cluster="slurm", **keys)

    yield make
    for node in mended_cluster.nodes:
        mended_cluster.run_slurm("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)


def check(path: Path, interrupt: str, *overrides: str) -> Arms:
    return run_resume(path, Slurm(), [f"interrupt={interrupt}", *overrides], pace=PACE)


def resumed(arms: Arms, step: int, kind: str) -> None:
    """Interrupted by plan, resumed after `step`, with the bits of the undisturbed arm."""
    first, second = arms.job("b", 0), arms.job("b", 1)
    assert first.state == "interrupted" and first.interruption is not None, arms.explain()
    assert first.interruption.kind == kind
    assert second.state == "done", arms.explain()
    assert second.resumed_from is not None and second.resumed_from.step == step, arms.explain()
    for rank in range(4):
        assert arms.steps("b", 1, rank) == list(range(step + 1, 11))
    assert arms.metrics("b", 1, 10) == arms.metrics("a", 0, 10)
    assert str(second.started) >= str(first.ended)


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_killed_in_the_second_arms_job_on_the_first_ones_nodes(recipe: Any, launcher: str) -> None:
    arms = check(recipe(launch={"launcher": launcher}), "{kind: kill, at_step: 5}")
    resumed(arms, 3, "kill")
    a, b = arms.job("a", 0), arms.job("b", 0)
    assert sorted(a.nodes) == sorted(b.nodes) and a.jobs != b.jobs
    assert b.jobs == arms.job("b", 1).jobs
    assert b.interruption is not None and b.interruption.ranks == [0, 1, 2, 3]


def test_all_ranks_of_one_node_killed_in_one_allocation(recipe: Any) -> None:
    arms = check(recipe(placement="allocation"), "{kind: kill, at_step: 5, node: 1}")
    resumed(arms, 3, "kill")
    first = arms.job("b", 0)
    assert first.interruption is not None and first.interruption.ranks == [2, 3]
    assert arms.job("a", 0).jobs == first.jobs


def test_a_signal_that_the_program_answers_with_a_save(recipe: Any) -> None:
    arms = check(recipe(["--leave-on", "USR1"]), "{kind: signal, at_step: 5, signal: USR1}")
    resumed(arms, 5, "signal")
    assert arms.job("b", 0).exit_code == 0


def test_killed_during_a_save(recipe: Any) -> None:
    arms = check(recipe(["--pad", "60"], placement="allocation"), "{kind: kill-during-save, at_step: 5}")
    first = arms.job("b", 0)
    assert first.interruption is not None, arms.explain()
    cut = first.interruption.step
    resumed(arms, cut - 3, "kill-during-save")
    assert first.interruption.detail["bytes"] > 0


def test_a_requeued_job_goes_on_where_it_was(recipe: Any) -> None:
    """The program saves at the signal that comes with it. The allocation's arms are two jobs then."""
    arms = check(recipe(["--leave-on", "TERM"], placement="allocation"), "{kind: requeue, at_step: 5}")
    resumed(arms, 5, "requeue")
    first = arms.job("b", 0)
    assert first.jobs == arms.job("b", 1).jobs != arms.job("a", 0).jobs


def test_a_node_that_fails_under_the_job(recipe: Any) -> None:
    fail = '[scontrol, update, "NodeName={node}", State=DOWN, Reason=test]'
    arms = check(recipe(), f"{{kind: node-failure, at_step: 5, command: {fail}}}")
    resumed(arms, 3, "node-failure")
    first, second = arms.job("b", 0), arms.job("b", 1)
    assert first.jobs == second.jobs
    assert first.nodes[-1] not in second.nodes


@pytest.mark.slow
def test_a_job_that_runs_into_its_time_limit(recipe: Any) -> None:
    arms = check(recipe(["--leave-on", "TERM"]), "{kind: timeout, at_step: 5}")
    resumed(arms, 5, "timeout")
    assert arms.job("b", 0).jobs != arms.job("b", 1).jobs


def test_the_recipe_that_comes_with_detrun_on_two_nodes(recipe: Any, tmp_path: Path) -> None:
    path = tmp_path / "hybrid.yaml"
    shutil.copy(Path(__file__).parents[2] / "recipes" / "hybrid-cpu.yaml", path)
    overrides = ["launch.nodes=2", "steps=10", "checkpoint.save_every=3", "cluster=slurm"]
    arms = check(path, "{kind: kill, at_step: 5}", *overrides)
    resumed(arms, 3, "kill")


def test_a_program_that_finds_its_checkpoint_itself(recipe: Any) -> None:
    path = recipe(["--resume", "auto"], checkpoint={**SAVES, "resume_args": []})
    resumed(check(path, "{kind: stop, at_step: 5}"), 3, "stop")
