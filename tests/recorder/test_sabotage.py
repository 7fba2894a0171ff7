"""What a control arm breaks, and that it says what it broke or why it could not."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader

from detrun.recorder import sabotage
from detrun.recorder.rng import UNSEEDED, RngStreams
from detrun.recorder.sabotage import Sabotage, asked, move_by_one_ulp, step_scheduler_back


class Streams(RngStreams):
    """The streams of a process in which only some were seeded."""

    def __init__(self, *seeded: str) -> None:
        super().__init__()
        self._seeded = seeded

    def digests(self) -> dict[str, str]:
        return {name: ("x" if name in self._seeded else UNSEEDED) for name in ("python", "numpy", "torch_cpu")}


class Training:
    """A model that has taken two steps."""

    def __init__(self, make: Callable[[Any], Optimizer] = lambda p: Adam(p, lr=0.1)) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        self.optimizer = make(self.model.parameters())
        self.scheduler: Any = schedulers.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        for _ in range(2):
            self.model(torch.ones(2, 3)).sum().backward()
            self.optimizer.step()
            self.scheduler.step()

    def break_it(self, kind: str, tmp_path: Path, streams: RngStreams | None = None) -> dict[str, Any]:
        made = Sabotage(
            kind,
            tmp_path,
            lambda: 3,
            optimizers=lambda: [self.optimizer],
            schedulers=lambda: [self.scheduler],
            roots=lambda: [self.model],
            streams=streams or Streams("torch_cpu"),
        )
        made.first_forward(sys._getframe(1))
        said = json.loads((tmp_path / "sabotage" / "rank00003.json").read_text())
        assert said["schema_version"] == 1
        assert said["kind"] == kind
        assert ("what" in said) is said["done"]
        assert ("why" in said) is not said["done"]
        return said


def test_a_moment_is_cleared(tmp_path: Path) -> None:
    training = Training()
    weight = training.model[0].weight
    said = training.break_it("moment", tmp_path)
    assert said["what"] == "exp_avg of 0.weight set to zero"
    entry = training.optimizer.state[weight]
    assert not entry["exp_avg"].any()
    assert entry["exp_avg_sq"].any()
    assert training.optimizer.state[training.model[0].bias]["exp_avg"].any()


def test_an_optimizer_without_moments_is_left_alone(tmp_path: Path) -> None:
    said = Training(lambda p: SGD(p, lr=0.1)).break_it("moment", tmp_path)
    assert not said["done"]
    assert "no optimizer holds" in said["why"]


def test_a_parameter_is_moved(tmp_path: Path) -> None:
    training = Training()
    before = [p.detach().clone() for p in training.model.parameters()]
    version = training.model[0].weight._version
    assert "0.weight moved by 1 ULP" in training.break_it("parameter", tmp_path)["what"]
    after = [p.detach() for p in training.model.parameters()]
    assert [int((a != b).sum()) for a, b in zip(after, before, strict=True)] == [1, 0, 0, 0]
    a, b = (float(t[0].view(-1)[0]) for t in (after, before))
    assert a == np.nextafter(np.float32(b), np.float32(0))
    assert training.model[0].weight._version == version


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("value", [1.0, -1.0, 0.0, 0.25, 448.0])
def test_one_ulp_in_every_format(dtype: torch.dtype, value: float) -> None:
    tensor = torch.full((3,), value).to(dtype)
    integers: Any = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    before = tensor.view(integers).tolist()
    move_by_one_ulp(tensor)
    after = tensor.view(integers).tolist()
    assert [b - a for a, b in zip(after, before, strict=True)] == [1 if value else -1, 0, 0]
    assert math.isfinite(float(tensor[0].float()))


def test_a_scheduler_is_held_back_with_its_rate(tmp_path: Path) -> None:
    training = Training()
    assert training.optimizer.param_groups[0]["lr"] == 0.1 / 3
    said = training.break_it("scheduler", tmp_path)
    assert said["done"]
    assert "LambdaLR" in said["what"]
    assert training.scheduler.last_epoch == 1
    assert training.optimizer.param_groups[0]["lr"] == 0.1 / 2


@pytest.mark.parametrize(
    "make",
    [
        lambda o: schedulers.StepLR(o, 2),
        lambda o: schedulers.CosineAnnealingLR(o, 9),
        lambda o: schedulers.ExponentialLR(o, 0.9),
        lambda o: schedulers.LinearLR(o, 0.1, total_iters=9),
        lambda o: schedulers.OneCycleLR(o, 0.5, total_steps=9),
        lambda o: schedulers.CosineAnnealingWarmRestarts(o, 6),
    ],
)
def test_the_rate_of_the_step_before_comes_back(make: Callable[[Any], Any]) -> None:
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    scheduler = make(optimizer)
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert step_scheduler_back(scheduler)
    assert scheduler.last_epoch == 4
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rates[4], rel=1e-12)


def test_without_a_scheduler_nothing_is_held_back(tmp_path: Path) -> None:
    training = Training()
    training.scheduler = object()
    assert "no scheduler" in training.break_it("scheduler", tmp_path)["why"]


# Random numbers


@pytest.mark.parametrize(
    ("seeded", "chosen"),
    [(("torch_cpu", "numpy"), "torch_cpu"), (("numpy", "python"), "numpy"), (("python",), "python")],
)
def test_a_seeded_stream_is_seeded_anew(seeded: tuple[str, ...], chosen: str, tmp_path: Path) -> None:
    training = Training()
    before = {"torch_cpu": torch.rand(1), "numpy": np.random.rand(), "python": random.random()}
    state = {
        "torch_cpu": torch.get_rng_state().tolist(),
        "numpy": repr(np.random.get_state()),
        "python": random.getstate(),
    }
    assert chosen in training.break_it("rng", tmp_path, Streams(*seeded))["what"]
    after = {
        "torch_cpu": torch.get_rng_state().tolist(),
        "numpy": repr(np.random.get_state()),
        "python": random.getstate(),
    }
    assert {name for name in state if state[name] != after[name]} == {chosen}
    assert before


def test_a_stream_that_the_program_draws_from_goes_first(tmp_path: Path) -> None:
    training = Training()
    torch.manual_seed(4)
    assert "numpy" in training.break_it("rng", tmp_path, Streams("torch_cpu", "numpy"))["what"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.Generator().manual_seed(2),
        lambda: np.random.default_rng(2),
        lambda: np.random.RandomState(2),
        lambda: random.Random(2),
    ],
)
def test_a_generator_of_the_programs_is_seeded_anew(make: Callable[[], Any], tmp_path: Path) -> None:
    def program() -> tuple[dict[str, Any], Any]:
        training = Training()
        noise = make()
        return training.break_it("rng", tmp_path, Streams()), noise

    def draw(generator: Any) -> Any:
        return (
            torch.rand(2, generator=generator).tolist()
            if isinstance(generator, torch.Generator)
            else random_of(generator)
        )

    def random_of(generator: Any) -> Any:
        return generator.random() if hasattr(generator, "random") else generator.rand()

    said, noise = program()
    assert said["what"] == "generator noise seeded anew"
    assert draw(noise) != draw(make())


def test_where_nothing_was_seeded_that_is_said(tmp_path: Path) -> None:
    assert "no random number stream" in Training().break_it("rng", tmp_path, Streams())["why"]


# Batches


def numbers() -> Iterator[int]:
    yield from range(10)


class Feed:
    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> int:
        self.at += 1
        return self.at - 1


class Stream:
    def __init__(self) -> None:
        self.at = 0

    def next_batch(self) -> int:
        self.at += 1
        return self.at - 1


@pytest.mark.parametrize(
    "make",
    [numbers, Feed, lambda: iter(DataLoader(range(10), batch_size=None)), lambda: iter(list(range(10)))],  # type: ignore[arg-type]
    ids=["generator", "object", "loader", "list"],
)
def test_the_programs_iterator_is_advanced_by_one(make: Callable[[], Any], tmp_path: Path) -> None:
    def program() -> tuple[dict[str, Any], list[int]]:
        training, source = Training(), make()
        batches = [int(next(source))]
        said = training.break_it("batch", tmp_path)
        batches.append(int(next(source)))
        return said, batches

    said, batches = program()
    assert batches == [0, 2]
    assert said["what"] == "one batch of source skipped"


@pytest.mark.parametrize("make", [numbers, lambda: DataLoader(range(10), batch_size=None)], ids=["generator", "loader"])  # type: ignore[arg-type]
def test_a_loops_iterator_is_advanced_by_one(make: Callable[[], Any], tmp_path: Path) -> None:
    def program() -> list[int]:
        training, batches = Training(), []
        for batch in make():
            batches.append(int(batch))
            if len(batches) == 1:
                assert training.break_it("batch", tmp_path)["done"]
        return batches

    assert program() == [0, 2, 3, 4, 5, 6, 7, 8, 9]


def test_an_attribute_of_the_trainer_is_advanced_and_a_method_is_called(tmp_path: Path) -> None:
    class Trainer:
        def __init__(self, feed: Any) -> None:
            self.data = {"train": feed}
            self.training = Training()

        def step(self) -> dict[str, Any]:
            said = self.training.break_it("batch", tmp_path)
            assert self.data
            return said

    assert Trainer(Feed()).step()["what"] == "one batch of self.data.train skipped"
    trainer = Trainer(Stream())
    assert trainer.step()["what"] == "one batch of self.data.train skipped by next_batch()"
    assert trainer.data["train"].at == 1


def test_where_no_iterator_is_found_that_is_said(tmp_path: Path) -> None:
    def program() -> dict[str, Any]:
        training, data = Training(), torch.zeros(5)
        said = training.break_it("batch", tmp_path)
        assert data is not None
        return said

    assert "no iterator over the data" in program().get("why", ""), program()


def test_an_iterator_that_raises_does_not_reach_the_program(tmp_path: Path) -> None:
    class Broken:
        def __next__(self) -> int:
            raise RuntimeError("out of data")

    def program() -> dict[str, Any]:
        training, source = Training(), Broken()
        said = training.break_it("batch", tmp_path)
        assert source
        return said

    assert program()["why"] == "RuntimeError: out of data"


# What asks for it


def test_it_is_asked_for_by_the_environment(tmp_path: Path) -> None:
    live: dict[str, Any] = dict.fromkeys(("optimizers", "schedulers", "roots"), list)
    assert asked({}, tmp_path, int, streams=Streams(), **live) is None
    made = asked({"DETRUN_SABOTAGE": '{"kind": "moment"}'}, tmp_path, int, streams=Streams(), **live)
    assert made is not None
    made.first_forward(sys._getframe())
    assert json.loads((tmp_path / "sabotage" / "rank00000.json").read_text())["done"] is False


def test_an_unknown_kind_is_told(tmp_path: Path) -> None:
    assert "known are" in Training().break_it("everything", tmp_path)["why"]
    assert set(sabotage.KINDS) == {"rng", "batch", "moment", "parameter", "scheduler"}


def test_a_strided_or_sharded_parameter_is_moved_in_place() -> None:
    whole = torch.arange(1.0, 13.0).reshape(3, 4)
    part = whole.t()[1:]
    move_by_one_ulp(part)
    assert int((whole != torch.arange(1.0, 13.0).reshape(3, 4)).sum()) == 1
    assert isinstance(part, Tensor)
