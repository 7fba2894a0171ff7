"""Lightning's Trainer and Fabric as they come from PyPI, unchanged: twice the same, and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.harness import HERE, SAVED, origin_of, pair_and_resume, recipe
from tests.running import Ran, detrun

DRIVERS = HERE / "lightning"
GIVEN = ("--out", "{out}", "--steps", "{steps}", "--seed", "{seed}")


def trainer(folder: Path, name: str, *args: str, **more: Any) -> Path:
    """A recipe of the Trainer, which starts its own second rank."""
    file = recipe(folder, name, [str(DRIVERS / "trainer.py"), *GIVEN, *args], **{"checkpoint": saves("step={step}.ckpt"), **more})
    return without_launcher(file)


def fabric(folder: Path, name: str, *args: str, **more: Any) -> Path:
    command = [str(DRIVERS / "fabric.py"), *GIVEN, *args]
    return recipe(folder, name, command, **{"checkpoint": saves("step-{step}.ckpt"), **more})


def saves(pattern: str) -> dict[str, Any]:
    return {
        "directory": "{out}/checkpoints",
        "pattern": pattern,
        "save_every": SAVED,
        "save_args": ["--save-every", "{save_every}"],
        "resume_args": ["--resume", "{checkpoint}"],
    }


def without_launcher(file: Path) -> Path:
    file.write_text(file.read_text().replace("launcher: torchrun", "launcher: none"))
    return file


def culprits(ran: Ran) -> tuple[str, list[str]]:
    """The kind of the first culprit, and of all that were not the same after the restore."""
    verdict = ran.verdict
    return verdict["culprit"]["kind"], sorted({each["kind"] for each in verdict["state"]["different"]})


def metrics_of(folder: Path, rank: int) -> dict[int, dict[str, Any]]:
    """Each step's metrics of arm a of the newest pair."""
    (pair,) = folder.glob(".detrun/*-pair-*")
    found: dict[int, dict[str, Any]] = {}
    for line in (pair / f"arms/a/attempt-0/metrics/rank{rank:05d}.jsonl").read_text().splitlines():
        entry = json.loads(line)
        found.setdefault(entry["step"], {}).update(entry["metrics"])
    return found


def test_trainer_s_default_loses_data_position_and_rng(tmp_path: Path) -> None:
    ran = pair_and_resume(trainer(tmp_path, "trainer"))
    assert ran.code == 1, ran.explain()


def test_trainer_with_a_stateful_loader_and_rng_is_identical(tmp_path: Path) -> None:
    ran = pair_and_resume(trainer(tmp_path, "trainer-exact", "--keep-rng", "--stateful"))
    assert ran.code == 0, ran.explain()
