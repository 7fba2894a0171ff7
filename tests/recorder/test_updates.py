"""Steps of a program that updates its parameters by its own code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from detrun.fingerprint.host import digest_tensors
from detrun.recorder import by_hand as steps_by_hand
from detrun.recorder import updates
from tests.recorder import programs
from tests.recorder.harness import run

Update = Callable[[torch.nn.Parameter], None]


def in_place(parameter: torch.nn.Parameter) -> None:
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=0.1)


def through_data(parameter: torch.nn.Parameter) -> None:
    parameter.data.add_(parameter.grad, alpha=-0.1)


def replaced(parameter: torch.nn.Parameter) -> None:
    parameter.data = parameter.data - 0.1 * parameter.grad


def by_hand(update: Update, window: int = 1, cleared_first: bool = True) -> dict[str, Any]:
    programs.seed()
    net = programs.Net()
    seen: dict[str, Any] = {"parameters": [], "initial": digest_tensors(list(net.parameters()))}
    for step in range(1, 4):
        for part in range(window):
            if cleared_first and part == 0:
                net.zero_grad()
            net(programs.batch(step * window + part)).square().mean().backward()
        for parameter in net.parameters():
            update(parameter)
        if not cleared_first:
            net.zero_grad(set_to_none=False)
        seen["parameters"].append(digest_tensors(list(net.parameters())))
    return seen


@pytest.fixture(autouse=True)
def _no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_by_hand, "program_records", lambda: False)  # other tests' modules do


@pytest.mark.parametrize("update", [in_place, through_data, replaced])
@pytest.mark.parametrize("cleared_first", [True, False])
def test_a_step_ends_where_the_parameters_were_updated(update: Update, cleared_first: bool, tmp_path: Path) -> None:
    done = run(lambda: by_hand(update, cleared_first=cleared_first), tmp_path)
    lines = done.lines()
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["state"]["parameters"] for line in lines] == done.result["parameters"]
    assert all({"loss", "grad_norm"} <= set(line["metrics"]) and line["batch"] for line in lines)
    assert done.environment()["initial"]["parameters"] == done.result["initial"]


def test_accumulated_micro_batches_are_one_step(tmp_path: Path) -> None:
    lines = run(lambda: by_hand(in_place, window=3), tmp_path).lines()
    assert [(line["step"], line["microbatches"]) for line in lines] == [(1, 3), (2, 3), (3, 3)]


def test_a_save_after_the_update_is_one_of_the_step(tmp_path: Path) -> None:
    def program() -> None:
        net = programs.Net()
        for step in range(1, 3):
            net.zero_grad()
            net(programs.batch(step)).square().mean().backward()
            for parameter in net.parameters():
                in_place(parameter)
            torch.save(net.state_dict(), tmp_path / f"{step}.pt")

    done = run(program, tmp_path, DETRUN_STATE_AT="")
    assert [line["step"] for line in done.lines()] == [1, 2]
    assert {path.name for path in (tmp_path / "state").iterdir()} >= {"end-00000001", "begin-00000002", "end-00000002"}


@pytest.mark.parametrize(
    ("source", "found"),
    [("import detrun", True), ("from detrun import record as r", True), ("def f():\n    import detrun", True), ("", 0)],
)
def test_a_program_that_may_name_its_steps_is_left_to_do_so(
    source: str, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("trainer")
    exec(source, vars(module))
    monkeypatch.setattr(updates, "program_modules", lambda: [("trainer", module)])
    assert updates.program_records() == found
