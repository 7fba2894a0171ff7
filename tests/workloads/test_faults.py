"""Each fault changes what it says, at exactly its step and not before."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from detrun.workloads.hybrid import fault as fault_module
from detrun.workloads.hybrid.fault_table import KINDS, describe_faults

from .conftest import STEPS, TINY, Run
from .observed import Trace, differing, first_difference, observe
from .test_resume import FAULTS as RESUME_FAULTS

UPDATE = {"gradients", "optimizer", "parameters"}
LOSSES = {"metric:loss", "metric:lm_loss", "metric:load_balancing_loss", "metric:mtp_loss"}
DATA = {"batch", *UPDATE, *LOSSES, "metric:grad_norm"}

AT_STEP_4 = {
    # fault -> (what differs at step 4 at least, what may differ beside it)
    "nudge": (UPDATE, {*LOSSES, "metric:grad_norm"}),
    "nudge-hidden": (UPDATE, {*LOSSES, "metric:grad_norm"}),
    "swap-tokens": (UPDATE, {*LOSSES, "metric:grad_norm"}),
    "race-aux-loss": ({*UPDATE, "metric:load_balancing_loss"}, {"metric:loss", "metric:grad_norm"}),
    "reorder-reduction": (UPDATE, {"metric:grad_norm"}),
    "weight-bit": ({"parameters"}, set()),
    "nan": ({*UPDATE, "metric:loss", "metric:grad_norm"}, set()),
    "negative-zero": ({"metric:router_z_loss"}, set()),
    "heal": ({"metric:mtp_loss"}, set()),
    "small": ({*LOSSES, "metric:grad_norm"}, set()),
    "hash-order": ({*DATA, "loader:order", "loader:position"}, set()),
    "directory-order": ({*DATA, "loader:order", "loader:position"}, set()),
    "wrong-token": (DATA, set()),
    "extra-draw": ({"rng:torch_cpu", *UPDATE, *LOSSES, "metric:grad_norm"}, set()),
}


def tiny(out: Path, *arguments: str, steps: int = STEPS) -> Trace:
    return observe(["--steps", str(steps), "--seed", "1", "--out", str(out), *TINY, *arguments])


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return tiny(tmp_path_factory.mktemp("reference"), "--threads", "1")


@pytest.mark.parametrize("name", AT_STEP_4)
def test_a_fault_changes_what_it_says_at_its_step(name: str, run: Run, reference: Trace) -> None:
    faulty = run("--fault", f"{name}@step=4")
    assert sorted(faulty) == sorted(reference)
    assert first_difference(reference, faulty) == 4
    least, beside = AT_STEP_4[name]
    # A last bit may be rounded away in the weights' average.
    assert least <= differing(reference, faulty, 4) <= least | beside | {"ema"}


def test_a_weight_bit_never_shows_in_a_metric_and_never_goes_away(run: Run) -> None:
    reference, faulty = run(steps=12), run("--fault", "weight-bit@step=2", steps=12)
    assert all(differing(reference, faulty, step) - {"ema"} == {"parameters"} for step in range(2, 13))


def test_healed_metrics_are_equal_again(run: Run, reference: Trace) -> None:
    for name in ("heal", "negative-zero"):
        faulty = run("--fault", f"{name}@step=4")
        assert all(not differing(reference, faulty, step) for step in range(5, STEPS + 1))


def test_small_is_equal_to_six_decimals(run: Run, reference: Trace) -> None:
    faulty = run("--fault", "small@step=4")
    for step in range(4, STEPS + 1):
        for name in {*LOSSES, "metric:grad_norm"}:
            assert faulty[step][name] != reference[step][name]
            assert printed(faulty[step][name]) == printed(reference[step][name])


def printed(bits: str) -> str:
    return f"{struct.unpack('<f', bytes.fromhex(bits))[0]:.6f}"


def test_nan_repeats_itself(run: Run) -> None:
    assert run("--fault", "nan@step=4") == run("--fault", "nan@step=4")


def test_two_racing_runs_and_two_directory_orders_part_at_their_step(run: Run) -> None:
    first, second = (run("--fault", "directory-order@step=4") for _ in range(2))
    assert first_difference(first, second) == 4
    races = [run("--fault", "race-aux-loss@step=2") for _ in range(4)]
    assert any(first_difference(races[0], other) is not None for other in races[1:])


def test_a_nudge_hits_one_element_by_one_ulp(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from detrun.workloads.hybrid import numeric_faults

    moved: list[tuple[torch.Tensor, torch.Tensor]] = []

    def watch(tensor: torch.Tensor, index: int, flip: int = 0, add: int = 0) -> None:
        before = tensor.detach().clone()
        fault_module.change_bits(tensor, index, flip, add)
        moved.append((before, tensor.detach().clone()))

    monkeypatch.setattr(numeric_faults, "change_bits", watch)
    run("--fault", "nudge@step=2", "--fault", "nudge-hidden@step=3,module=blocks.2", steps=4)
    assert len(moved) == 2
    for before, after in moved:
        distance = after.view(torch.int32) - before.view(torch.int32)
        assert int((distance != 0).sum()) == 1
        assert int(distance.sum()) == 1


def test_crash_and_early_exit_end_where_they_say(run: Run) -> None:
    assert sorted(run("--fault", "crash@step=4")) == [1, 2, 3]
    assert sorted(run("--fault", "early-exit@step=4")) == [1, 2, 3, 4]


def test_slow_changes_nothing(run: Run, reference: Trace) -> None:
    assert run("--fault", "slow@step=5,seconds=0.01") == reference


def test_saves_that_draw_show_in_the_step_after(run: Run, reference: Trace) -> None:
    assert first_difference(reference, run("--fault", "save-draws", "--save-every", "3")) == 4


def test_every_fault_is_listed_and_tested() -> None:
    names = [kind.name for kind in KINDS]
    assert len(set(names)) == len(names)
    assert all(f"{kind.name}  [" in describe_faults() for kind in KINDS)
    here = {*AT_STEP_4, "save-draws", "crash", "early-exit", "slow"}
    resumed = {*(fault.partition("@")[0] for _, fault in RESUME_FAULTS), "resume-previous", "resume-ignored"}
    of_ranks = {"replica-drift", "stall", "die", "die-at-exit", "resume-rank0-rng"}
    assert here | resumed | of_ranks == set(names)
