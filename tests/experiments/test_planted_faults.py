"""The recipe that is shipped, with each fault planted in one arm: found at its exact step, as what it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.running import Ran, detrun

pytestmark = pytest.mark.slow

RECIPE = Path(__file__).parents[2] / "recipes" / "hybrid-cpu.yaml"
SMALL = ["--width", "32", "--sequence-length", "32", "--batch-size", "2"]
ONE_RANK = ["--set", "launch.launcher=none", "--set", "launch.ranks_per_node=1"]


def pair(folder: Path, *more: str, steps: int = 7, json: bool = True, ranks: int = 1) -> Ran:
    arguments = ["pair", str(RECIPE), "--set", "cluster=local", "--set", f"steps={steps}", "--set", "checkpoint=null"]
    arguments += [
        "--set",
        f"launch.args={SMALL}",
        *(["--json"] if json else []),
        *(ONE_RANK if ranks == 1 else []),
        *more,
    ]
    return detrun(*arguments, cwd=folder, env={"PATH": os.environ["PATH"]})


def planted(folder: Path, fault: str, **keys: Any) -> Ran:
    return pair(folder, f"--arm=b.args=--fault {fault}", **keys)


def differing(ran: Ran) -> tuple[int, set[str], set[str]]:
    """First step, the metrics that differ at it, and the state components that do."""
    first = ran.verdict["first_divergence"]
    metrics = {name for name, found in first["metrics"].items() if found["step"] == first["step"]}
    return first["step"], metrics, {found["component"] for found in first["state"]}


def test_a_clean_pair(tmp_path: Path) -> None:
    ran = pair(tmp_path, ranks=2)
    assert ran.code == 0, ran.explain()


@pytest.mark.parametrize("step", [1, 4, 7])
def test_one_ulp_in_one_operator(tmp_path: Path, step: int) -> None:
    ran = planted(tmp_path, f"nudge@step={step},rank=1", ranks=2)
    assert ran.code == 1, ran.explain()
    assert differing(ran)[0] == step


def test_a_bit_that_no_metric_ever_shows(tmp_path: Path) -> None:
    ran = planted(tmp_path, "weight-bit@step=3", json=False)
    assert ran.code == 1, ran.explain()
    assert "DIVERGED at step 3" in ran.out
    assert "Invisible in the metrics: equal in all 7 steps" in ran.out


def test_a_racing_sum_of_the_load_balancing_loss(tmp_path: Path) -> None:
    ran = planted(tmp_path, "race-aux-loss@step=3")
    assert ran.code == 1, ran.explain()
    step, metrics, _ = differing(ran)
    assert step == 3
    assert "load_balancing_loss" in metrics


def test_a_reordered_reduction_leaves_the_losses_of_its_step(tmp_path: Path) -> None:
    ran = planted(tmp_path, "reorder-reduction@step=3", ranks=2)
    assert ran.code == 1, ran.explain()
    step, metrics, state = differing(ran)
    assert step == 3
    assert "gradients" in state
    assert not metrics & {"loss", "lm_loss", "mtp_loss"}


def test_a_difference_invisible_at_six_digits(tmp_path: Path) -> None:
    ran = planted(tmp_path, "small@step=3")
    assert ran.code == 1, ran.explain()
    first = ran.verdict["first_divergence"]
    assert first["step"] == 3
    assert first["metrics"]["loss"]["equal_to_decimals"] >= 6


def test_nan_in_one_arm_and_the_same_nan_in_both(tmp_path: Path) -> None:
    ran = planted(tmp_path, "nan@step=3")
    assert ran.code == 1, ran.explain()
    assert differing(ran)[0] == 3
    (tmp_path / "both").mkdir()
    both = pair(tmp_path / "both", "--arm=a.args=--fault nan@step=3", "--arm=b.args=--fault nan@step=3")
    assert both.code == 0, both.explain()


def test_minus_zero_is_not_plus_zero(tmp_path: Path) -> None:
    ran = planted(tmp_path, "negative-zero@step=3")
    assert ran.code == 1, ran.explain()
    step, metrics, state = differing(ran)
    assert (step, metrics, state) == (3, {"router_z_loss"}, set())


def test_a_divergence_that_goes_away_again_is_still_one(tmp_path: Path) -> None:
    ran = planted(tmp_path, "heal@step=3", json=False)
    assert ran.code == 1, ran.explain()
    assert "DIVERGED at step 3" in ran.out
    assert "All 4 later steps agree again in everything recorded" in ran.out


def test_data_that_follows_the_hash_seed(tmp_path: Path) -> None:
    fault = ["--arm=a.args=--fault hash-order@step=2", "--arm=b.args=--fault hash-order@step=2"]
    pinned = pair(tmp_path, *fault)
    assert pinned.code == 0, pinned.explain()
    (tmp_path / "free").mkdir()
    free = pair(tmp_path / "free", *fault, "--set", "pin=none", json=False)
    assert free.code == 1, free.explain()
    assert "DIVERGED at step 2" in free.out and "batch" in free.out


def test_data_that_follows_a_folders_order(tmp_path: Path) -> None:
    ran = planted(tmp_path, "directory-order@step=2", json=False)
    assert ran.code == 1, ran.explain()
    assert "DIVERGED at step 2" in ran.out and "batch" in ran.out


def test_one_draw_too_many(tmp_path: Path) -> None:
    ran = planted(tmp_path, "extra-draw@step=3")
    assert ran.code == 1, ran.explain()
    assert differing(ran)[0] == 3


def test_replicas_that_part_within_both_arms_are_a_warning(tmp_path: Path) -> None:
    fault = ["--arm=a.args=--fault replica-drift@step=3", "--arm=b.args=--fault replica-drift@step=3"]
    ran = pair(tmp_path, *fault, ranks=2)
    assert ran.code == 0, ran.explain()
    assert "replicas" in {finding["kind"] for finding in ran.verdict["findings"]}


def test_an_abort_after_the_last_step(tmp_path: Path) -> None:
    ran = planted(tmp_path, "die-at-exit@rank=1", ranks=2)
    assert ran.code == 0, ran.explain()


@pytest.mark.parametrize(("fault", "code"), [("die@step=3,rank=1", 4), ("crash@step=3", 4), ("early-exit@step=3", 3)])
def test_a_run_that_ends_too_soon(tmp_path: Path, fault: str, code: int) -> None:
    ran = planted(tmp_path, fault, ranks=2 if "rank" in fault else 1)
    assert ran.code == code, ran.explain()
    assert ran.verdict["verdict"] == "not-verified"
