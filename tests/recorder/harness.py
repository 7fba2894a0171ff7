"""Runs a program in a forked child, recorded or not, and reads back what it left. torch is imported once only."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer would import it, in every child again

torch.set_num_threads(1)

TESTS = Path(__file__).resolve().parents[1]


@dataclass
class Run:
    attempt: Path
    result: Any

    def lines(self, rank: int = 0) -> list[dict[str, Any]]:
        path = self.attempt / "metrics" / f"rank{rank:05d}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def steps(self) -> dict[int, dict[str, Any]]:
        return {line["step"]: line for line in self.lines() if set(line) - {"v", "step", "metrics"}}

    def environment(self) -> dict[str, Any]:
        return json.loads((self.attempt / "environment" / "rank00000.json").read_text())

    def cost(self) -> dict[str, Any]:
        return json.loads((self.attempt / "recorder" / "rank00000.json").read_text())


def run(program: Callable[[], Any], attempt: Path, *, recorded: bool = True, **env: str) -> Run:
    """Run `program` in a child. Raises AssertionError with the child's traceback if it fails."""
    attempt.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_child, args=(program, attempt, recorded, env))
    child.start()
    child.join(120)
    result = attempt / "result"
    assert child.exitcode == 0, result.read_text() if result.exists() else f"exit code {child.exitcode}"
    return Run(attempt, pickle.loads(result.read_bytes()))


def _child(program: Callable[[], Any], attempt: Path, recorded: bool, env: dict[str, str]) -> None:
    _leave_other_tests_behind(program)
    try:
        os.environ.update({"DETRUN_ATTEMPT_DIR": str(attempt), "DETRUN_STATE_EVERY": "1", **env})
        if recorded:
            import detrun.recorder

            detrun.recorder.install()
            assert detrun.recorder._session is not None
        else:
            del os.environ["DETRUN_ATTEMPT_DIR"]
        (attempt / "result").write_bytes(pickle.dumps(program()))
    except BaseException:
        (attempt / "result").write_text(traceback.format_exc())
        raise


def _leave_other_tests_behind(program: Callable[[], Any]) -> None:
    """What this worker ran before is no part of the program: the recorder looks at what a program's modules hold."""
    while isinstance(program, partial):
        program = program.func
    own = getattr(program, "__module__", "")
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        others = (file is not None and TESTS in Path(file).parents) or name.startswith("detrun.workloads")
        helps = name.startswith("tests.recorder") and ".test_" not in name
        if others and name != own and not helps:
            del sys.modules[name]
