"""transformers' Trainer as it comes from PyPI, unchanged: run twice, interrupted and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.harness import HERE, KILLED, SAVED, origin_of, pair_and_resume, recipe
from tests.frameworks.test_lightning import recorded
from tests.running import detrun

GIVEN = ("--out", "{out}", "--steps", "{steps}", "--seed", "{seed}")


def trainer(folder: Path, name: str, *args: str, **more: Any) -> Path:
    checkpoint = {
        "directory": "{out}/checkpoints",
        "pattern": "checkpoint-{step}",
        "save_every": SAVED,
        "save_args": ["--save-every", "{save_every}"],
        "resume_args": ["--resume", "{checkpoint}"],
    }
    given: dict[str, Any] = {"checkpoint": checkpoint, **more}
    return recipe(folder, name, [str(HERE / "transformers" / "train.py"), *GIVEN, *args], **given)


def test_gpt2_is_identical_and_resumes_identically(tmp_path: Path) -> None:
    ran = pair_and_resume(trainer(tmp_path, "gpt2"))
    assert ran.code == 0, ran.explain()
    assert ran.verdict["verdict"] == "identical"
    steps = recorded(tmp_path)
    assert list(steps) == [1, 2, 3, 4, 5, 6]
    for metrics in steps.values():
        assert {"loss", "grad_norm", "logged_loss (derived)", "logged_grad_norm (derived)"} <= set(metrics)
        # What it logs is its own gradient norm, taken from float32 into a Python number.
        assert metrics["logged_grad_norm (derived)"]["value"] == pytest.approx(metrics["grad_norm"]["value"], rel=1e-6)


@pytest.mark.full
def test_workers_and_accumulation(tmp_path: Path) -> None:
    ran = pair_and_resume(trainer(tmp_path, "workers", "--workers", "2", "--accumulate", "2"))
    assert ran.code == 0, ran.explain()
    assert all({"loss", "loss[0]", "loss[1]"} <= set(metrics) for metrics in recorded(tmp_path).values())


@pytest.mark.full
def test_a_mixture_of_experts_yields_its_load_balancing_loss(tmp_path: Path) -> None:
    required = {"metrics": {"required": ["loss", "grad_norm", "load_balancing_loss"]}}
    ran = pair_and_resume(trainer(tmp_path, "mixtral", "--model", "mixtral", **required))
    assert ran.code == 0, ran.explain()
    assert {each["load_balancing_loss"]["source"] for each in recorded(tmp_path).values()} == {"adapter"}


def test_a_death_at_the_interpreter_s_exit_is_a_remark(tmp_path: Path) -> None:
    ran = detrun("pair", str(trainer(tmp_path, "abort", "--abort-at-exit")), "--json", cwd=tmp_path, timeout=600)
    assert ran.code == 0, ran.explain()
    remarks = [arm["attempts"][0]["remark"] for arm in ran.verdict["arms"]]
    assert all("every step recorded" in remark for remark in remarks), remarks


@pytest.mark.full
def test_an_early_end_with_exit_code_0_is_not_verified(tmp_path: Path) -> None:
    ran = detrun("pair", str(trainer(tmp_path, "early", "--leave-at", "4")), "--json", cwd=tmp_path, timeout=600)
    assert ran.code == 3, ran.explain()


def test_a_fault_of_one_bit_is_localized(tmp_path: Path) -> None:
    culprit = origin_of(trainer(tmp_path, "nudged", nudge="h.1.mlp.c_fc@call=3,rank=1"))
    assert "h.1.mlp.c_fc" in str(culprit["scope"])
    assert culprit["step"] == 3
    assert culprit["rank"] == 1


@pytest.mark.full
def test_a_signal_saves_and_ends(tmp_path: Path) -> None:
    file = trainer(
        tmp_path,
        "signal",
        "--jit-checkpoint",
        "--slow",
        ranks=1,  # each rank's handler waits by a clock of its own, and two of them may not meet
        interrupt={"kind": "signal", "at_step": KILLED, "signal": "TERM"},
        steps=14,
    )
    ran = detrun("resume-check", str(file), "--json", cwd=tmp_path, timeout=600)
    assert ran.code == 0, ran.explain()
