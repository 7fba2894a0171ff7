"""Each framework is stopped in its own way and goes on where it saved; half a checkpoint is never gone on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.harness import KILLED, SAVED
from tests.frameworks.test_lightning import trainer as lightning
from tests.frameworks.test_megatron import LAYERS, megatron
from tests.frameworks.test_transformers import trainer as transformers
from tests.running import detrun


def resumed_from(folder: Path) -> dict[str, Any]:
    """Where attempt 1 of arm b went on, by the newest experiment."""
    newest = max(folder.glob(".detrun/*-resume-check-*"), key=lambda path: path.stat().st_mtime)
    document = json.loads((newest / "arms/b/attempt-1/job.json").read_text())["resumed_from"]
    assert isinstance(document, dict)
    return document


@pytest.mark.full
def test_megatron_saves_and_leaves_at_a_signal_and_at_its_own_exit(tmp_path: Path) -> None:
    file = megatron(tmp_path, "stopped", *LAYERS, interrupt={"kind": "signal", "at_step": KILLED})
    ran = detrun("resume-check", str(file), "--arm", "b.args=--exit-signal-handler", cwd=tmp_path, timeout=600)
    assert ran.code == 0, ran.explain()
    assert resumed_from(tmp_path)["step"] == KILLED

    options = ("--set", "interrupt.kind=stop", "--arm", f"b.args=--exit-interval {KILLED}")
    ran = detrun("resume-check", str(file), *options, cwd=tmp_path, timeout=600)
    assert ran.code == 0, ran.explain()
    assert resumed_from(tmp_path)["step"] == KILLED


CUT_SHORT = {"kind": "kill-during-save", "at_step": KILLED}
MAKERS = {"megatron": lambda folder, **more: megatron(folder, "cut", *LAYERS, **more)}
MAKERS["lightning"] = lambda folder, **more: lightning(folder, "cut", "--keep-rng", "--stateful", **more)
MAKERS["transformers"] = lambda folder, **more: transformers(folder, "cut", **more)


@pytest.mark.full
@pytest.mark.parametrize("name", MAKERS)
def test_half_a_checkpoint_is_never_gone_on_from(name: str, tmp_path: Path) -> None:
    ran = detrun("resume-check", str(MAKERS[name](tmp_path, interrupt=CUT_SHORT)), cwd=tmp_path, timeout=600)
    assert ran.code == 0, ran.explain()
    assert resumed_from(tmp_path)["step"] == SAVED
