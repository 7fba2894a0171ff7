"""DeepSpeed's adapter on a made-up engine, as it is and with a part of it renamed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from detrun.recorder import live
from detrun.recorder.adapters import deepspeed
from tests.recorder.adapters.standins import Bench, kind, module

WRAPPED = ("__init__", "backward", "scale", "_take_model_step", "save_checkpoint", "load_checkpoint")
ASKED = deepspeed._QUESTIONS


def engine_module(without: str = "", **changed: Any) -> ModuleType:
    def init(self: Any, zero: int = 1) -> None:
        self.zero, self.micro_steps, self.global_steps = zero, 3, 3
        self.optimizer, self.mpu, self.data_parallel_group = SimpleNamespace(loss_scale=8.0), None, "group"

    def save(self: Any, save_dir: str, tag: str | None = None) -> str:
        return "saved"

    parts = {
        "__init__": init,
        "backward": lambda self, loss: loss * 2,
        "scale": lambda self, loss: loss * 8,
        "_take_model_step": lambda self, lr_kwargs=None: None,
        "save_checkpoint": save,
        "load_checkpoint": lambda self, load_dir: "loaded",
        "get_global_grad_norm": lambda self: 0.5,
        "was_step_applied": lambda self: True,
        "gradient_accumulation_steps": lambda self: 2,
        "zero_optimization": lambda self: self.zero > 0,
        "zero_optimization_stage": lambda self: self.zero,
        "zero_compute_grad_norm": lambda self: True,
        "fp16_enabled": lambda self: True,
        "bfloat16_enabled": lambda self: False,
        "named_parameters": lambda self: self.parameters,
        **changed,
    }
    engine = type("DeepSpeedEngine", (), {name: value for name, value in parts.items() if name != without})
    made = module("deepspeed.runtime.engine", DeepSpeedEngine=engine, ZeROOptimizer=kind(), clip_grad_norm_=len)
    if without in vars(made):
        delattr(made, without)
    return made


class Engines(Bench):
    """events: what the engine's methods told, in order."""

    def __init__(self) -> None:
        super().__init__("deepspeed")
        self.events: list[tuple[Any, ...]] = []
        self.session.settings = SimpleNamespace(attempt=0)
        self.session.told_coordinates, self.session.told_by_adapter = {}, set()
        self.observer.capture = SimpleNamespace(namers=[])
        self.observer.scaled = lambda loss, scaled: self.events.append(("scaled", loss, scaled))
        self.observer.backward_by_hand = self._backward

    @contextlib.contextmanager
    def _backward(self, loss: Any) -> Iterator[None]:
        self.events.append(("backward", loss))
        yield


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Engines:
    monkeypatch.setattr(live, "UNCOMPARED", {})
    made = Engines()
    monkeypatch.setattr(made.adapter, "track", lambda *_: None)
    monkeypatch.setattr(made.adapter, "step_begins", lambda number: made.events.append(("begins", number)))
    monkeypatch.setattr(made.adapter, "step_ends", lambda **how: made.events.append(("ends", how["skipped"])))
    return made


def test_an_engine_as_it_is_tells_loss_norm_scale_step_and_save(bench: Engines) -> None:
    made = engine_module()
    deepspeed.install(made, bench.adapter)
    engine = made.DeepSpeedEngine()
    assert engine.backward(3.0) == 6.0
    assert engine.scale(loss=2.0) == 16.0
    engine._take_model_step({})
    assert engine.save_checkpoint("/there", tag="last") == "saved"
    assert engine.save_checkpoint("/there") == "saved"
    assert engine.load_checkpoint("/there") == "loaded"
    expected = [("backward", 3.0), ("scaled", 2.0, 16.0), ("begins", None), ("ends", False)]
    assert bench.events == expected
    assert bench.told == [("grad_norm", 0.5, "adapter"), ("loss_scale", 8.0, "adapter")]
    assert bench.saved == ["/there/last", "/there/global_step3"]
    assert bench.session.told_by_adapter == {"grad_norm"}
    assert bench.lacks == []


def test_an_overflow_is_a_skipped_step_and_a_resumed_engine_says_its_number(bench: Engines) -> None:
    bench.session.settings.attempt = 1
    made = engine_module(was_step_applied=lambda self: False, get_global_grad_norm=lambda self: float("inf"))
    deepspeed.install(made, bench.adapter)
    engine = made.DeepSpeedEngine()
    engine._take_model_step({})
    assert bench.events == [("begins", 4), ("ends", True)]
    assert ("grad_norm", float("inf"), "adapter") in bench.told


@pytest.mark.parametrize("renamed", [*WRAPPED[1:], *ASKED])
def test_a_renamed_method_is_a_lack(bench: Engines, renamed: str) -> None:
    deepspeed.install(engine_module(renamed), bench.adapter)
    assert any(lack.endswith(f"DeepSpeedEngine.{renamed}") for lack in bench.lacks), bench.lacks


@pytest.mark.parametrize("renamed", ["DeepSpeedEngine", "ZeROOptimizer", "clip_grad_norm_"])
def test_a_renamed_part_of_the_module_is_a_lack(bench: Engines, renamed: str) -> None:
    deepspeed.install(engine_module(renamed), bench.adapter)
    assert bench.lacks == [f"deepspeed.runtime.engine.{renamed}"]


def test_other_arguments_are_lacks(bench: Engines) -> None:
    made = engine_module(save_checkpoint=lambda self, folder, tag=None: None, backward=lambda self, value: value)
    deepspeed.install(made, bench.adapter)
    assert any("parameter save_dir" in lack for lack in bench.lacks)
    assert made.DeepSpeedEngine().backward(value=3.0) == 3.0
    assert any("the loss among the arguments" in lack for lack in bench.lacks)


def test_a_renamed_attribute_is_a_lack_and_the_step_goes_on(bench: Engines) -> None:
    made = engine_module(get_global_grad_norm=lambda self: None)
    deepspeed.install(made, bench.adapter)
    engine = made.DeepSpeedEngine()
    del engine.optimizer.loss_scale
    engine._take_model_step({})
    assert bench.events[-1] == ("ends", False)
    assert sorted(bench.lacks) == [
        "a gradient norm in DeepSpeedEngine.get_global_grad_norm()",
        "deepspeed.runtime.engine.DeepSpeedEngine.optimizer.loss_scale",
    ]


def test_flat_partitions_are_named_by_the_parameters_in_them(bench: Engines) -> None:
    made = engine_module()
    deepspeed.install(made, bench.adapter)
    names = bench.observer.capture.namers[0]
    first, second = SimpleNamespace(), SimpleNamespace(_hp_mapping=None)
    first._hp_mapping = SimpleNamespace(
        hp_fragment_address=SimpleNamespace(start=4, numel=6), lp_fragment_address=SimpleNamespace(start=10, numel=6)
    )
    flat = torch.zeros(12)
    engine = made.DeepSpeedEngine(1)
    engine.parameters = [("emb.weight", first), ("head.bias", second)]
    engine.optimizer = SimpleNamespace(single_partition_of_fp32_groups=[flat], bit16_groups=[[first, second]])
    assert names() == {id(flat): [("emb.weight[10:16]", 4, 6)]}

    first.ds_tensor, second.ds_tensor = SimpleNamespace(ds_numel=8), SimpleNamespace(ds_numel=4)
    engine.zero = 3
    engine.optimizer = SimpleNamespace(fp32_partitioned_groups_flat=[flat], fp16_groups=[[first, second]])
    assert names() == {id(flat): [("emb.weight[0:8]", 0, 8), ("head.bias[0:4]", 8, 4)]}
    assert bench.lacks == []
    del engine.optimizer.fp16_groups
    assert names() == {}
    assert bench.lacks == ["SimpleNamespace.fp16_groups"]
