"""Every fault that can be planted in a restore of the built-in program is named: component, name, rank, first step."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.running import Ran, detrun

pytestmark = pytest.mark.slow

STEPS, EVERY, KILLED = 16, 6, 9
FIRST = EVERY + 1
"""The first step after the restore."""


@dataclass(frozen=True)
class Named:
    """What a verdict has to say of a fault: the culprit's kind, texts its name holds, the first step that differs (in a
    metric or batch; None: in none), and the ranks."""

    fault: str
    kind: str
    names: tuple[str, ...]
    first: int | None = FIRST
    ranks: tuple[int, ...] = (0, 1)
    says: str = ""


FAULTS = [
    # The change of the last bit of one weight is seen in the gradients of the first step, in a metric one step later.
    Named("resume-nudge-parameter", "parameter", ("norm.weight",), FIRST + 1, says="up to 1 ULP"),
    Named("resume-lose-buffer", "buffer", ("bias",)),
    Named("resume-lose-moments", "optimizer", ("exp_avg", "exp_avg_sq", "step"), FIRST + 1),
    Named("resume-lose-moments@rank=1", "optimizer", ("exp_avg",), FIRST + 1, (1,)),
    Named("resume-round-moment", "optimizer", ("exp_avg_sq", "head.weight"), FIRST + 1),
    Named("resume-optimizer-step", "optimizer", ("step",), FIRST + 1),
    Named("resume-hyper-parameter", "optimizer", ("lr",), FIRST + 1),
    Named("resume-schedule-twice", "scheduler", ("last_epoch",), FIRST + 1),
    Named("resume-reset-scaler", "scaler", ("scale",)),
    Named("resume-lose-ema", "ema", ("ema",), None),
    # Two batches were drawn ahead before the save.
    Named("resume-lose-stream@stream=python", "rng", ("python",), FIRST + 2),
    Named("resume-lose-stream@stream=numpy", "rng", ("numpy",), FIRST + 2),
    Named("resume-lose-stream@stream=torch", "rng", ("torch_cpu",)),
    Named("resume-lose-stream@stream=order_generator", "rng", ("order_generator",), FIRST + 2),
    Named("resume-lose-stream@stream=crop_generator", "rng", ("crop_generator",)),
    Named("resume-rank0-rng", "rng", ("python", "numpy", "torch_cpu"), ranks=(1,), says="it is the state of rank 0"),
    Named("resume-extra-draw", "rng", ("torch_cpu",), says="ahead"),
    Named("resume-restart-data", "data", ("loader",)),
    Named("resume-skip-batch@batches=2", "data", ("loader",), says="2 steps ahead"),
    Named("resume-count-prefetched", "data", ("loader",), says="2 steps ahead"),
    Named("resume-repeat-batch", "data", ("loader",), says="1 step behind"),
]


def recipe(folder: Path, *args: str) -> Path:
    program = [
        sys.executable,
        "-m",
        "detrun.workloads.hybrid",
        "--steps",
        "{steps}",
        "--seed",
        "{seed}",
        "--out",
        "{out}",
    ]
    document = {
        "name": "built-in",
        "cluster": "local",
        "launch": {"command": program, "args": list(args), "ranks_per_node": 2, "env": {"OMP_NUM_THREADS": "1"}},
        "steps": STEPS,
        "metrics": {"required": ["loss", "lm_loss", "load_balancing_loss", "mtp_loss", "grad_norm"]},
        "checkpoint": {
            "pattern": "step-{step}",
            "save_every": EVERY,
            "save_args": ["--save-every", "{save_every}"],
            "resume_args": ["--resume", "{checkpoint}"],
        },
        "interrupt": {"kind": "kill", "at_step": KILLED},
    }
    path = folder / "built-in.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and a clean resume check, whose reference serves all others."""
    folder = tmp_path_factory.mktemp("faults")
    recipe(folder, "--expert-bias", "0.001", "--loss-scaling", "--prefetch", "2")
    ran = resume_check(folder)
    assert ran.code == 0, ran.explain()
    assert ran.verdict["verdict"] == "identical"
    return folder


def resume_check(folder: Path, *arguments: str) -> Ran:
    return detrun("resume-check", "built-in.yaml", "--json", *arguments, cwd=folder)


def said(verdict: dict[str, Any]) -> str:
    return " ".join(finding["what"] for finding in verdict["findings"] if finding["kind"] == "restore")


def check(named: Named, ran: Ran) -> None:
    assert ran.code == 1, ran.explain()
    verdict = ran.verdict
    culprit = verdict["culprit"]
    assert culprit is not None, ran.explain()
    assert culprit["kind"] == named.kind, ran.explain()
    assert all(name in culprit["name"] for name in named.names), culprit["name"]
    assert tuple(culprit["ranks"]) == named.ranks
    assert culprit["step"] == EVERY
    assert named.says in said(verdict), said(verdict)
    first = verdict["first_divergence"]
    seen = min((metric["step"] for metric in first["metrics"].values()), default=None)
    assert seen == named.first
    assert first["step"] == (named.first or first["step"])


@pytest.mark.parametrize("named", FAULTS, ids=lambda named: named.fault)
def test_a_fault_at_restore_is_named(named: Named, place: Path) -> None:
    ran = resume_check(place, "--arm", f"b.args=--fault {named.fault}")
    check(named, ran)


@pytest.mark.parametrize(
    ("low_precision", "named"),
    [
        ("fp8", Named("resume-lose-amax", "buffer", ("amax",), FIRST + 1)),
        ("fp8", Named("resume-requantize", "precision", ("weight",))),
        ("mxfp8", Named("resume-requantize", "precision", ("weight", "scale"))),
        ("nvfp4", Named("resume-requantize", "precision", ("weight", "scale"))),
    ],
    ids=lambda value: value if isinstance(value, str) else value.fault,
)
def test_low_precision_weights_rebuilt_another_way_are_named(low_precision: str, named: Named, tmp_path: Path) -> None:
    recipe(tmp_path, "--low-precision", low_precision)
    clean = resume_check(tmp_path)
    assert clean.code == 0, clean.explain()
    check(named, resume_check(tmp_path, "--arm", f"b.args=--fault {named.fault}"))


@pytest.mark.parametrize(
    ("fault", "said_so"), [("resume-ignored", "step 0"), ("resume-previous", "step 6, not from step 12")]
)
def test_a_run_that_came_back_elsewhere_is_told_so(fault: str, said_so: str, place: Path) -> None:
    again = ["--set", f"interrupt.at_step={2 * EVERY + 2}"] if fault == "resume-previous" else []
    ran = resume_check(place, "--arm", f"b.args=--fault {fault}", *again)
    assert ran.code == 3, ran.explain()
    reasons = " ".join(ran.verdict["not_verified"])
    assert said_so in reasons
    assert ran.verdict["first_divergence"] is None, "from where it came back, it is the reference's trajectory"


def test_an_arm_that_never_saves_tells_that_saving_changes_the_run(place: Path) -> None:
    faulty = ["--arm", "a.args=--fault save-draws", "--arm", "b.args=--fault save-draws"]
    ran = resume_check(place, "--observer", *faulty)
    assert ran.code == 3, ran.explain()
    assert any(f"parts from the reference at step {FIRST}" in reason for reason in ran.verdict["not_verified"])


def test_the_self_test_sees_what_is_broken_on_purpose(place: Path) -> None:
    ran = resume_check(place, "--self-test")
    assert ran.code == 0, ran.explain()
    told = [finding for finding in ran.verdict["findings"] if finding["kind"] == "self-test"]
    assert told, ran.explain()
    assert len(told[0]["evidence"]["seen"]) == 5, told
    assert told[0]["evidence"]["unseen"] == told[0]["evidence"]["untried"] == []
