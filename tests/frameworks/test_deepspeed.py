"""DeepSpeed as it comes from PyPI, unchanged: ZeRO 1, 2 and 3 run twice, interrupted and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.frameworks import environment
from tests.frameworks.harness import HERE, SAVED, origin_of, pair_and_resume, recipe
from tests.frameworks.test_lightning import blamed, recorded
from tests.running import detrun

GIVEN = ("--out", "{out}/checkpoints", "--steps", "{steps}", "--seed", "{seed}")


def engine(folder: Path, name: str, *args: str, **more: Any) -> Path:
    """A recipe of the driver; buckets are DeepSpeed's default of 5e8 elements unless `args` say otherwise."""
    checkpoint = {
        "directory": "{out}/checkpoints",
        "pattern": "step-{step}",
        "save_every": SAVED,
        "save_args": ["--save", "{save_every}"],
        "resume_args": ["--resume"],
    }
    command = [str(HERE / "deepspeed" / "train.py"), *GIVEN, *args]
    given: dict[str, Any] = {"checkpoint": checkpoint, "env": {"DS_ACCELERATOR": "cpu"}, **more}
    return recipe(folder, name, command, path=[environment.DEEPSPEED_HOME], **given)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_is_identical_and_resumes_identically(tmp_path: Path, stage: int) -> None:
    ran = pair_and_resume(engine(tmp_path, f"zero{stage}", "--zero", str(stage)))
    assert ran.code == 0, ran.explain()
    assert ran.verdict["experiment"] == "resume-check"
    steps = recorded(tmp_path)
    assert list(steps) == [1, 2, 3, 4, 5, 6]
    for metrics in steps.values():
        # The engine's own norm, of all ranks: a float32 tensor with ZeRO 1 and 2, with ZeRO 3 a number of Python's.
        assert metrics["grad_norm"]["source"] == "adapter"
        assert metrics["grad_norm"]["dtype"] == ("float64" if stage == 3 else "float32")


@pytest.mark.full
def test_without_the_random_state_the_resume_is_at_another_random_number(tmp_path: Path) -> None:
    ran = pair_and_resume(engine(tmp_path, "no-rng", "--keep", "data"))
    assert ran.code == 1, ran.explain()
    assert "RNG stream torch_cpu" in blamed(ran)


@pytest.mark.full
def test_without_the_position_the_resume_is_at_another_batch(tmp_path: Path) -> None:
    ran = pair_and_resume(engine(tmp_path, "no-data", "--keep", "rng"))
    assert ran.code == 1, ran.explain()
    assert "batch" in blamed(ran)


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
def test_accumulation_is_one_step_and_its_losses_are_not_divided(tmp_path: Path, stage: int) -> None:
    ran = pair_and_resume(engine(tmp_path, "accumulation", "--zero", str(stage), "--accumulation", "2"))
    assert ran.code == 0, ran.explain()
    steps = recorded(tmp_path)
    assert list(steps) == [1, 2, 3, 4, 5, 6]
    for metrics in steps.values():
        mean = (metrics["loss[0]"]["value"] + metrics["loss[1]"]["value"]) / 2
        assert metrics["loss"]["value"] == pytest.approx(mean)
    assert 5 < steps[1]["loss"]["value"] < 6.5  # ln 256, and not half of it


@pytest.mark.full
def test_an_overflow_is_a_skipped_step(tmp_path: Path) -> None:
    ran = detrun(
        "pair",
        str(engine(tmp_path, "fp16", "--precision", "fp16", "--scale-power", "24")),
        "--json",
        cwd=tmp_path,
        timeout=600,
    )
    assert ran.code == 0, ran.explain()
    steps = recorded(tmp_path)
    assert list(steps) == [1, 2, 3, 4, 5, 6]
    assert steps[1]["grad_norm"]["value"] == float("inf") or steps[1]["grad_norm"]["value"] == "inf"
    assert steps[1]["loss_scale"]["value"] < 2**24
    assert 5 < steps[1]["loss"]["value"] < 6.5  # before it was scaled


def test_a_fault_of_one_bit_is_localized(tmp_path: Path) -> None:
    culprit = origin_of(engine(tmp_path, "nudged", nudge="body.layers.1.linear1@call=3,rank=1"))
    assert "body.layers.1.linear1" in str(culprit["scope"])
    assert culprit["step"] == 3
    assert culprit["rank"] == 1
