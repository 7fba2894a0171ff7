"""What any adapter can tell, tried with a framework of two functions that is made up here."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from detrun.recorder import adapters
from tests.recorder.harness import Run, run

FRAMEWORK = """
import torch

def train_step(model, optimizer, batch, overflow=False):
    loss = model(batch).square().mean()
    custom_backward(loss)
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    if not overflow:
        optimizer.step()
    optimizer.zero_grad()
    log(loss, norm)
    return loss

def custom_backward(loss):
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,), (torch.ones(()),), False, False, (), True, accumulate_grad=True
    )

def log(loss, norm):
    pass
"""

ADAPTER = """
ADAPTER = "toy"
TRIED = ("1.0",)
iteration = 0

def install(module, adapter):
    adapter.version("1.1")

    def stepping(original):
        def train_step(*args, **kwargs):
            global iteration
            adapter.paces()
            adapter.step_begins(iteration + 1)
            try:
                return original(*args, **kwargs)
            finally:
                iteration += 1
                adapter.step_ends(iteration, skipped=bool(kwargs.get("overflow")))
                adapter.metric("behind", iteration)
        return train_step

    def backing(original):
        def custom_backward(loss):
            with adapter.backward(loss):
                return original(loss)
        return custom_backward

    def logging(original):
        def log(loss, norm):
            adapter.metric("lm_loss", loss)
            adapter.metric("grad_norm", norm)
            adapter.metric("rate", 0.5 * iteration, kind="derived")
            return original(loss, norm)
        return log

    adapter.wrap(module, "train_step", stepping)
    adapter.wrap(module, "custom_backward", backing)
    adapter.wrap(module, "log", logging)
    adapter.takes(module.train_step, "overflow")
    adapter.coordinates(pp=1)
    adapter.tells("grad_norm")
"""


@contextmanager
def framework(folder: Path, source: str = FRAMEWORK, adapter: str = ADAPTER) -> Any:
    """A framework and its adapter on the path, and the adapter among the built-in ones."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "toyframework.py").write_text(source)
    (folder / "toy_adapter.py").write_text(adapter)
    sys.path.insert(0, str(folder))
    adapters.BUILT_IN["toyframework"] = "toy_adapter:install"
    try:
        yield
    finally:
        del adapters.BUILT_IN["toyframework"]
        sys.path.remove(str(folder))


def program(steps: int = 3, overflow: int = 0) -> Callable[[], None]:
    def train() -> None:
        toy = importlib.import_module("toyframework")
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        inner = [
            torch.optim.SGD([model.weight], lr=0.1),
            torch.optim.SGD([model.bias], lr=0.1),
        ]

        class Both:
            def step(self) -> None:
                for optimizer in inner:
                    optimizer.step()

            def zero_grad(self) -> None:
                for optimizer in inner:
                    optimizer.zero_grad()

        for step in range(1, steps + 1):
            toy.train_step(model, Both(), torch.ones(3, 4), overflow=step == overflow)

    return train


def merged(made: Run) -> dict[int, dict[str, Any]]:
    """Each step's metrics, of all its lines."""
    found: dict[int, dict[str, Any]] = {}
    for line in made.lines():
        found.setdefault(line["step"], {}).update(line["metrics"])
    return found


def lacks(made: Run) -> list[str]:
    (facts,) = made.cost()["adapters"]
    return facts["lacks"]


def test_an_adapter_names_metrics_and_ends_steps(tmp_path: Path) -> None:
    with framework(tmp_path / "path"):
        made = run(program(), tmp_path / "made")
    steps = made.steps()
    assert list(steps) == [1, 2, 3]
    assert all(set(line["state"]) == {"parameters", "gradients", "optimizer"} for line in steps.values())
    for number, metrics in merged(made).items():
        assert set(metrics) == {"loss", "lm_loss", "grad_norm", "rate (derived)", "behind"}
        assert metrics["lm_loss"]["source"] == "adapter"
        assert metrics["lm_loss"]["bits"] == metrics["loss"]["bits"]
        assert metrics["behind"]["value"] == number
    (facts,) = made.cost()["adapters"]
    assert facts == {"name": "toy", "tried": ["1.0"], "version": "1.1", "lacks": []}
    assert made.environment()["coordinates"] == {"pp": 1}


def test_a_skipped_step_is_a_step_and_its_state_is_there(tmp_path: Path) -> None:
    with framework(tmp_path / "path"):
        made = run(program(overflow=2), tmp_path / "made")
    steps = made.steps()
    assert list(steps) == [1, 2, 3]
    assert [line.get("skipped", False) for line in steps.values()] == [False, True, False]
    assert steps[2]["state"]["parameters"] == steps[1]["state"]["parameters"]
    assert steps[3]["state"]["parameters"] != steps[2]["state"]["parameters"]


def test_the_framework_s_own_number_counts_after_a_resume(tmp_path: Path) -> None:
    with framework(tmp_path / "path", adapter=ADAPTER.replace("iteration = 0", "iteration = 4")):
        made = run(program(), tmp_path / "made", DETRUN_ATTEMPT="1")
    assert list(made.steps()) == [5, 6, 7]


@pytest.mark.parametrize("renamed", ["train_step", "custom_backward", "log"])
def test_a_renamed_function_is_a_lack(renamed: str, tmp_path: Path) -> None:
    source = FRAMEWORK.replace(f"{renamed}(", f"{renamed}_v2(")
    with framework(tmp_path / "path", source):

        def train() -> None:
            toy = importlib.import_module("toyframework")
            toy.train_step = getattr(toy, "train_step", None) or toy.train_step_v2
            program()()

        made = run(train, tmp_path / "made")
    assert f"toyframework.{renamed}" in lacks(made)


def test_a_renamed_parameter_is_a_lack(tmp_path: Path) -> None:
    adapter = ADAPTER.replace('"overflow")', '"overflow", "scaler")')
    with framework(tmp_path / "path", adapter=adapter):
        made = run(program(), tmp_path / "made")
    assert lacks(made) == ["parameter scaler of toyframework.train_step"]


def test_an_adapter_that_cannot_be_imported_is_a_lack(tmp_path: Path) -> None:
    with framework(tmp_path / "path", adapter="import not_there\n"):
        made = run(program(), tmp_path / "made")
    assert len(lacks(made)) == 1
    assert "ModuleNotFoundError" in lacks(made)[0]


def test_no_adapter_is_imported_without_its_framework(tmp_path: Path) -> None:
    known = adapters.loaded()  # other tests of this process import them by themselves

    def train() -> list[str]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return adapters.loaded()

    made = run(train, tmp_path)
    assert made.result == known
    assert made.cost()["adapters"] == []


def test_every_built_in_adapter_is_also_an_entry_point() -> None:
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    for name, target in adapters.BUILT_IN.items():
        assert f'"{name}" = "{target}"' in project


def test_a_stream_and_tracked_state_are_captured(tmp_path: Path) -> None:
    adapter = ADAPTER.replace(
        "    adapter.coordinates(pp=1)\n",
        "    import torch\n    generator = torch.Generator().manual_seed(5)\n"
        '    adapter.stream("expert", lambda: generator)\n    module.generator = generator\n',
    )

    def train(draws: int) -> Callable[[], None]:
        def inner() -> None:
            toy = importlib.import_module("toyframework")
            torch.rand(draws, generator=toy.generator)
            program()()

        return inner

    with framework(tmp_path / "path", adapter=adapter):
        one = run(train(1), tmp_path / "one")
        two = run(train(2), tmp_path / "two")
    assert one.steps()[1]["rng"] != two.steps()[1]["rng"]
    assert json.dumps(one.steps()[1]["state"]) == json.dumps(two.steps()[1]["state"])
