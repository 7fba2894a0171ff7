"""A resumed run is bitwise the one that went on; each restore fault breaks that as it says, at its exact step."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from .conftest import TINY, Run
from .observed import Trace, differing, observe

STEPS = 7
SAVED = 4
"""The checkpoint that the tests resume from; step 5 is the first one resumed."""
CONFIGURATIONS = {
    "plain": [],
    "all": ["--low-precision", "fp8", "--expert-bias", "0.01", "--loss-scaling", "--prefetch", "2"],
    "mxfp8": ["--low-precision", "mxfp8"],
    "nvfp4": ["--low-precision", "nvfp4"],
}

UPDATE = {"gradients", "optimizer", "parameters"}
LOSSES = {"metric:loss", "metric:lm_loss", "metric:load_balancing_loss", "metric:mtp_loss"}
METRICS = {*LOSSES, "metric:grad_norm"}
LATER = {"ema", "quantized", "buffers"}
"""What follows the parameters within their step."""
STREAMS = {"rng:python", "rng:numpy", "loader:python", "loader:numpy"}
POSITION = {"loader:position", "loader:crop_generator", *STREAMS}


class Shows(NamedTuple):
    """What differs at the first resumed step, and at which step a metric does for the first time."""

    least: set[str]
    beside: set[str]
    metrics: set[int | None]


UPDATED_WRONGLY = {"parameters", "ema"}
"""All that differs in a step whose gradients are right."""
RETRAINED = {*UPDATE, *METRICS, *LATER}
FAULTS = {
    ("plain", "resume-nudge-parameter"): Shows(UPDATE, {"ema", *METRICS}, {5, 6, 7}),
    ("plain", "resume-lose-moments"): Shows({"optimizer", *UPDATED_WRONGLY}, set(), {6}),
    ("plain", "resume-round-moment"): Shows({"optimizer", *UPDATED_WRONGLY}, set(), {6}),
    ("plain", "resume-round-moment@parameter=norm.weight,moment=exp_avg"): Shows(
        {"optimizer", *UPDATED_WRONGLY}, set(), {6}
    ),
    ("plain", "resume-optimizer-step"): Shows({"optimizer", *UPDATED_WRONGLY}, set(), {6}),
    ("plain", "resume-hyper-parameter"): Shows(UPDATED_WRONGLY, set(), {6}),
    ("plain", "resume-schedule-twice"): Shows({"schedule", "rates", *UPDATED_WRONGLY}, set(), {6}),
    ("plain", "resume-lose-ema"): Shows({"ema"}, set(), {None}),
    ("plain", "resume-lose-stream@stream=python"): Shows({"rng:python"}, {"batch", *RETRAINED}, {6}),
    ("plain", "resume-lose-stream@stream=numpy"): Shows({"rng:numpy", "batch", *UPDATE}, RETRAINED, {5}),
    ("plain", "resume-lose-stream@stream=torch"): Shows({"rng:torch_cpu", *UPDATE, *LOSSES}, RETRAINED, {5}),
    ("plain", "resume-lose-stream@stream=order_generator"): Shows({"loader:order_generator"}, set(), {None}),
    ("plain", "resume-lose-stream@stream=crop_generator"): Shows({"loader:crop_generator", "batch"}, RETRAINED, {5}),
    ("plain", "resume-extra-draw"): Shows({"rng:torch_cpu", *UPDATE, *METRICS}, RETRAINED, {5}),
    ("plain", "resume-restart-data"): Shows({"loader:position", "batch", *METRICS}, {*RETRAINED, *POSITION}, {5}),
    ("plain", "resume-skip-batch"): Shows({"loader:position", "batch", *METRICS}, {*RETRAINED, *POSITION}, {5}),
    ("plain", "resume-repeat-batch"): Shows({"loader:position", "batch", *METRICS}, {*RETRAINED, *POSITION}, {5}),
    ("all", "resume-skip-batch"): Shows({"loader:position", "batch", *METRICS}, {*RETRAINED, *POSITION}, {5}),
    ("all", "resume-repeat-batch"): Shows({"loader:position", "batch", *METRICS}, {*RETRAINED, *POSITION}, {5}),
    ("all", "resume-count-prefetched"): Shows({"loader:position", "batch", *METRICS}, {*RETRAINED, *POSITION}, {5}),
    ("all", "resume-lose-buffer"): Shows({"buffers", *UPDATE}, RETRAINED, {5}),
    ("all", "resume-lose-buffer@buffer=mtp.projection.weight_scaling.scale"): Shows(
        {"buffers", *UPDATE}, RETRAINED, {5}
    ),
    ("all", "resume-reset-scaler"): Shows({"scaler", "metric:loss_scale"}, set(), {5}),
    ("all", "resume-lose-amax"): Shows({"buffers", "quantized"}, set(), {6}),
    ("all", "resume-requantize"): Shows({"quantized", *UPDATE, "metric:loss"}, RETRAINED, {5}),
    ("mxfp8", "resume-requantize"): Shows({"quantized", *UPDATE, "metric:loss"}, RETRAINED, {5}),
    ("nvfp4", "resume-requantize"): Shows({"quantized", *UPDATE, "metric:loss"}, RETRAINED, {5}),
}


class Reference(NamedTuple):
    trace: Trace
    checkpoints: Path
    options: list[str]


def train(options: Iterable[str], out: Path, *more: str) -> Trace:
    run = ["--steps", str(STEPS), "--seed", "1", "--out", str(out), "--threads", "1"]
    return observe([*run, *TINY, *options, *more])


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    """One uninterrupted run a configuration, with the checkpoints of steps 2, 4 and 6."""
    made = {}
    for name, options in CONFIGURATIONS.items():
        out = tmp_path_factory.mktemp(name)
        made[name] = Reference(train(options, out, "--save-every", "2"), out / "checkpoints", options)
    return made


def resume(reference: Reference, out: Path, *faults: str) -> Trace:
    given = [argument for fault in faults for argument in ("--fault", fault)]
    return train(reference.options, out, "--resume", str(reference.checkpoints / f"step-{SAVED}"), *given)


def first_metric(reference: Trace, resumed: Trace) -> int | None:
    moved = (s for s in sorted(resumed) if any(name.startswith("metric:") for name in differing(reference, resumed, s)))
    return next(moved, None)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_resumed_run_is_the_uninterrupted_one(name: str, references: dict[str, Reference], tmp_path: Path) -> None:
    reference = references[name]
    assert sorted(reference.trace) == list(range(1, STEPS + 1))
    assert resume(reference, tmp_path) == {step: reference.trace[step] for step in range(SAVED + 1, STEPS + 1)}


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_a_restore_fault_shows_what_it_says_where_it_says(
    name: str, fault: str, references: dict[str, Reference], tmp_path: Path
) -> None:
    reference = references[name]
    resumed = resume(reference, tmp_path, fault)
    assert sorted(resumed) == list(range(SAVED + 1, STEPS + 1))
    expected = FAULTS[name, fault]
    found = differing(reference.trace, resumed, SAVED + 1)
    assert expected.least <= found <= expected.least | expected.beside
    assert first_metric(reference.trace, resumed) in expected.metrics


def test_without_a_resume_no_restore_fault_does_anything(references: dict[str, Reference], tmp_path: Path) -> None:
    for name, reference in references.items():
        faults = [argument for where, fault in FAULTS if where == name for argument in ("--fault", fault)]
        assert train(reference.options, tmp_path, *faults) == reference.trace


@pytest.mark.parametrize(
    ("name", "fault", "batch_of"),
    [
        ("plain", "resume-skip-batch", 6),
        ("plain", "resume-skip-batch@batches=2", 7),
        ("plain", "resume-repeat-batch", 4),
        ("all", "resume-skip-batch", 6),
        ("all", "resume-repeat-batch", 4),
        ("all", "resume-count-prefetched", 7),
    ],
)
def test_shifted_data_is_that_of_another_step(
    name: str, fault: str, batch_of: int, references: dict[str, Reference], tmp_path: Path
) -> None:
    reference = references[name]
    assert resume(reference, tmp_path, fault)[SAVED + 1]["batch"] == reference.trace[batch_of]["batch"]


def test_a_resume_that_takes_another_checkpoint_begins_elsewhere(
    references: dict[str, Reference], tmp_path: Path
) -> None:
    reference = references["plain"]
    assert resume(reference, tmp_path, "resume-previous") == {s: reference.trace[s] for s in range(3, STEPS + 1)}
    assert resume(reference, tmp_path, "resume-ignored") == reference.trace


@pytest.mark.parametrize(
    ("options", "fault", "says"),
    [
        ([], "resume-reset-scaler", "needs --loss-scaling"),
        ([], "resume-lose-amax", "needs --low-precision fp8"),
        ([], "resume-requantize", "needs --low-precision"),
        ([], "resume-count-prefetched", "needs --prefetch"),
        ([], "resume-lose-buffer", "there is none without --expert-bias"),
        (["--expert-bias", "0.1"], "resume-lose-buffer@buffer=x", "use one of blocks.1.mixer.router.expert_bias"),
        (["--ema", "0"], "resume-lose-ema", "there is none with --ema 0"),
        ([], "resume-nudge-parameter@parameter=x", "the model has no such parameter"),
        ([], "resume-round-moment@moment=x", "use exp_avg or exp_avg_sq"),
        ([], "resume-lose-stream@stream=x", "there are python, numpy, torch, order_generator"),
        ([], "resume-ignored@rank=0", "is no option; resume-ignored takes none"),
    ],
)
def test_a_fault_that_cannot_act_is_refused(
    options: list[str], fault: str, says: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*options, "--fault", fault) == {}
    assert says in capsys.readouterr().err


def test_there_is_no_checkpoint_before_the_first(
    references: dict[str, Reference], run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    first = references["plain"].checkpoints / "step-2"
    assert run("--resume", str(first), "--fault", "resume-previous") == {}
    assert "has no checkpoint before step-2" in capsys.readouterr().err


def test_another_configuration_refuses_the_checkpoint(
    references: dict[str, Reference], run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = str(references["plain"].checkpoints / "step-4")
    for options in (["--low-precision", "fp8"], ["--loss-scaling"], ["--expert-bias", "0.1"], ["--prefetch", "1"]):
        assert run("--resume", plain, *options) == {}
        assert "does not fit this" in capsys.readouterr().err
