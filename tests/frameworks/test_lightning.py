"""Lightning's Trainer and Fabric as they come from PyPI, unchanged: run twice, interrupted and resumed."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.harness import HERE, KILLED, SAVED, origin_of, pair_and_resume, recipe
from tests.running import Ran, detrun

DRIVERS = HERE / "lightning"
GIVEN = ("--out", "{out}", "--steps", "{steps}", "--seed", "{seed}")


def saves(pattern: str | None) -> dict[str, Any]:
    return {
        "directory": "{out}/checkpoints",
        "pattern": pattern,
        "save_every": SAVED,
        "save_args": ["--save-every", "{save_every}"],
        "resume_args": ["--resume", "{checkpoint}"],
    }


def trainer(folder: Path, name: str, *args: str, launcher: str = "none", **more: Any) -> Path:
    """A recipe of the Trainer, which starts its own second rank where no launcher does."""
    command = [str(DRIVERS / "trainer.py"), *GIVEN, *args]
    file = recipe(folder, name, command, **{"checkpoint": saves("step={step}.ckpt"), **more})
    file.write_text(file.read_text().replace("launcher: torchrun", f"launcher: {launcher}"))
    return file


def fabric(folder: Path, name: str, *args: str, **more: Any) -> Path:
    command = [str(DRIVERS / "fabric.py"), *GIVEN, *args]
    return recipe(folder, name, command, **{"checkpoint": saves("step-{step}.ckpt"), **more})


def recorded(folder: Path, kind: str = "pair", arm: str = "a", rank: int = 1) -> dict[int, dict[str, Any]]:
    """Each step's metrics of the first attempt of an arm."""
    (made,) = folder.glob(f".detrun/*-{kind}-*")
    found: dict[int, dict[str, Any]] = {}
    for line in (made / f"arms/{arm}/attempt-0/metrics/rank{rank:05d}.jsonl").read_text().splitlines():
        entry = json.loads(line)
        found.setdefault(entry["step"], {}).update(entry["metrics"])
    return found


def blamed(ran: Ran) -> str:
    """The first culprit, and what else was not the same after the restore."""
    culprit = ran.verdict["culprit"]
    assert culprit["phase"] == "restore", ran.explain()
    return " | ".join([culprit["name"], *culprit.get("others", [])])


def test_by_default_the_trainer_resumes_at_another_batch_and_random_number(tmp_path: Path) -> None:
    ran = pair_and_resume(trainer(tmp_path, "trainer"))
    assert ran.code == 1, ran.explain()
    assert "RNG stream torch_cpu" in blamed(ran)
    assert "the data loader's position" in blamed(ran)
    steps = recorded(tmp_path)
    assert list(steps) == [1, 2, 3, 4, 5, 6]
    assert all(metrics["lm_loss"]["bits"] == metrics["loss"]["bits"] for metrics in steps.values())
    assert {metrics["lm_loss"]["source"] for metrics in steps.values()} == {"adapter"}


def test_with_the_random_numbers_kept_the_data_alone_is_wrong(tmp_path: Path) -> None:
    file = trainer(tmp_path, "trainer-rng", "--keep-rng")
    ran = detrun("resume-check", str(file), "--json", cwd=tmp_path, timeout=600)
    assert ran.code == 1, ran.explain()
    assert ran.verdict["culprit"]["kind"] == "data"
    assert "RNG" not in blamed(ran)


def test_with_a_loader_that_knows_where_it_is_and_random_numbers_it_is_identical(tmp_path: Path) -> None:
    ran = pair_and_resume(trainer(tmp_path, "trainer-exact", "--keep-rng", "--stateful"))
    assert ran.code == 0, ran.explain()
    assert ran.verdict["verdict"] == "identical"


def test_fabric_is_identical_if_the_loop_keeps_the_random_numbers(tmp_path: Path) -> None:
    ran = pair_and_resume(fabric(tmp_path, "fabric-rng", "--keep-rng"))
    assert ran.code == 0, ran.explain()
    assert ran.verdict["verdict"] == "identical"


def test_fabric_without_them_names_the_stream(tmp_path: Path) -> None:
    ran = detrun("resume-check", str(fabric(tmp_path, "fabric")), "--json", cwd=tmp_path, timeout=600)
    assert ran.code == 1, ran.explain()
    assert blamed(ran).startswith("the RNG stream torch_cpu")
    assert "data" not in blamed(ran)


def test_a_fault_of_one_bit_is_localized(tmp_path: Path) -> None:
    file = trainer(tmp_path, "nudged", nudge="embedding@call=3,rank=1")
    culprit = origin_of(file)
    assert "embedding" in str(culprit["scope"])
    assert culprit["step"] == 3
    assert culprit["rank"] == 1


@pytest.mark.full
def test_lightning_s_slurm_plug_in_saves_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """Its handler saves where the signal finds the program. Here that is behind the optimizer and before Lightning
    counted the step: the checkpoint holds a step's weights and the number of the one before, which is taken twice."""
    scontrol = tmp_path / "bin" / "scontrol"  # rank 0 calls it to have the job queued again, which ends the job
    scontrol.parent.mkdir()
    scontrol.write_text("#!/bin/sh\nkill -KILL $PPID\n")
    scontrol.chmod(scontrol.stat().st_mode | stat.S_IXUSR)
    file = trainer(
        tmp_path,
        "preempted",
        *("--slurm", str(scontrol.parent), "--keep-rng", "--stateful"),
        launcher="torchrun",
        interrupt={"kind": "signal", "at_step": KILLED, "signal": "USR1"},
        checkpoint={"directory": "{out}/checkpoints", "resume_args": ["--resume", "{checkpoint}"]},
    )
    ran = detrun("resume-check", str(file), "--json", cwd=tmp_path, timeout=600)
    assert ran.code == 1, ran.explain()
    first, second = ran.verdict["arms"][1]["attempts"]
    assert first["remark"] == f"interrupted by plan (signal) after step {KILLED}"
    assert second["resumed_from"]["path"].endswith("hpc_ckpt_1.ckpt")
    assert second["resumed_from"]["step"] == KILLED
    said = [found["what"] for found in ran.verdict["findings"] if found["kind"] == "first-step"]
    assert said == [f"arm b, every rank: records begin at step {KILLED}, and it was to go on from step {KILLED}"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "args", "required"),
    [
        ("manual", ["--manual"], {"loss", "grad_norm", "lm_loss"}),
        ("accumulated", ["--accumulate", "2"], {"loss", "loss[0]", "loss[1]", "lm_loss", "lm_loss[1]"}),
        ("half", ["--precision", "16-mixed"], {"loss", "grad_norm", "lm_loss"}),
        ("unclipped", ["--no-clip"], {"loss", "grad_norm", "lm_loss"}),
        ("alone", ["--devices", "1"], {"loss", "grad_norm", "lm_loss"}),
    ],
)
def test_other_ways_to_train(name: str, args: list[str], required: set[str], tmp_path: Path) -> None:
    keeping = {} if name == "manual" else {"checkpoint": saves("step={step}.ckpt")}
    file = trainer(tmp_path, name, "--keep-rng", "--stateful", *args, ranks=1 if name == "alone" else 2, **keeping)
    ran = pair_and_resume(file)
    assert ran.code == 0, ran.explain()
    steps = recorded(tmp_path, rank=0)
    assert list(steps) == [1, 2, 3, 4, 5, 6]
    assert all(required <= set(metrics) for metrics in steps.values()), steps[1].keys()
