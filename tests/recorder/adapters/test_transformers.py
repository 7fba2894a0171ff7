"""The adapters of transformers and accelerate, on made-up parts of them, as they are and with one of them renamed."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from detrun.recorder.adapters import accelerate, transformers
from detrun.recorder.draft import EACH
from tests.recorder.adapters.standins import Bench, kind, module


def trainer_module(without: str = "", **changed: Any) -> ModuleType:
    def save(self: Any, model: Any, trial: Any) -> None:
        self.saved = True

    def log(self: Any, logs: dict[str, float], start_time: float | None = None) -> None:
        logs["epoch"] = 1.0

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> str:
        return "loss"

    parts = {"_save_checkpoint": save, "log": log, "training_step": training_step, **changed}
    trainer = kind(**{name: value for name, value in parts.items() if name != without})
    made = module("transformers.trainer", Trainer=trainer, PREFIX_CHECKPOINT_DIR="checkpoint")
    if without == "PREFIX_CHECKPOINT_DIR":
        del made.PREFIX_CHECKPOINT_DIR
    return made


def trainer_of(made: ModuleType, step: int) -> Any:
    trainer = made.Trainer()
    trainer.state = SimpleNamespace(global_step=step)
    trainer.args = SimpleNamespace(output_dir="/there")
    return trainer


def test_the_trainer_as_it_is_tells_its_saves_its_log_and_where_it_goes_on() -> None:
    bench, made = Bench(), trainer_module()
    transformers.install_trainer(made, bench.adapter)
    trainer = trainer_of(made, 3)
    assert trainer.training_step(None, {}) == "loss"
    trainer.state.global_step = 4
    trainer.training_step(None, {})
    trainer._save_checkpoint(None, trial=None)
    trainer._save_checkpoint(None, trial="a search")
    logs = {"loss": 2.0, "grad_norm": 1.0, "note": "text"}
    trainer.log(logs)
    assert bench.session.closed == 3
    assert bench.saved == ["/there/checkpoint-4", None]
    assert bench.told == [("logged_loss", 2.0, "derived"), ("logged_grad_norm", 1.0, "derived")]
    assert logs["epoch"] == 1.0
    assert bench.lacks == []


@pytest.mark.parametrize("renamed", ["training_step", "_save_checkpoint", "log"])
def test_a_renamed_part_of_the_trainer_is_a_lack(renamed: str) -> None:
    bench = Bench()
    transformers.install_trainer(trainer_module(renamed), bench.adapter)
    assert bench.lacks == [f"transformers.trainer.Trainer.{renamed}"]


def test_other_renamed_things_are_lacks() -> None:
    bench = Bench()
    transformers.install_trainer(trainer_module("PREFIX_CHECKPOINT_DIR"), bench.adapter)
    assert bench.lacks == ["transformers.trainer.PREFIX_CHECKPOINT_DIR"]
    bench = Bench()
    transformers.install_trainer(trainer_module(log=lambda self, values: None), bench.adapter)
    assert len(bench.lacks) == 1
    assert "parameter logs" in bench.lacks[0]


def test_a_state_without_its_step_is_a_lack_and_the_training_goes_on() -> None:
    bench, made = Bench(), trainer_module()
    transformers.install_trainer(made, bench.adapter)
    trainer = trainer_of(made, 0)
    trainer.state = SimpleNamespace(step=3)
    assert trainer.training_step(None, {}) == "loss"
    assert len(bench.lacks) == 1
    assert "global_step" in bench.lacks[0]


def outputs_module(name: str = "aux_loss") -> ModuleType:
    output = kind(__dataclass_fields__={name: None})
    return module("transformers.modeling_outputs", MoeCausalLMOutputWithPast=output)


def test_a_routing_loss_that_a_model_returns_is_told() -> None:
    bench = Bench()
    transformers.install_outputs(outputs_module(), bench.adapter)
    (ended,) = bench.observer.when_forward_ended
    aux = torch.tensor(0.25)
    ended(None, {"loss": torch.tensor(1.0), "aux_loss": aux, "z_loss": None})
    ended(None, torch.tensor(1.0))
    assert bench.told == [("load_balancing_loss", aux, EACH)]
    assert bench.lacks == []


def test_a_routing_loss_of_another_name_is_a_lack() -> None:
    bench = Bench()
    transformers.install_outputs(outputs_module("balance"), bench.adapter)
    assert bench.lacks == ["transformers.modeling_outputs.MoeCausalLMOutputWithPast.aux_loss"]


def accelerator_module(without: str = "", **changed: Any) -> ModuleType:
    def clip(self: Any, parameters: Any, max_norm: Any, norm_type: int = 2) -> Any:
        return torch.tensor(float(len(list(parameters))))

    def save_state(self: Any, output_dir: Any = None, safe_serialization: bool = True) -> str:
        return output_dir or "chosen"

    def load_state(self: Any, input_dir: Any = None) -> None:
        pass

    parts = {"clip_grad_norm_": clip, "save_state": save_state, "load_state": load_state, **changed}
    accelerator = kind(**{name: value for name, value in parts.items() if name != without})
    return module("accelerate.accelerator", Accelerator=accelerator)


def test_the_accelerator_clips_and_saves() -> None:
    bench, made = Bench(), accelerator_module()
    accelerate.install(made, bench.adapter)
    accelerator = made.Accelerator()
    assert accelerator.clip_grad_norm_((tensor for tensor in torch.zeros(2)), 1.0) == 2.0
    assert accelerator.clip_grad_norm_(torch.zeros(5), max_norm=1.0) == 1.0
    assert accelerator.save_state("/there") == "/there"
    assert accelerator.save_state() == "chosen"
    accelerator.load_state("/there")
    assert bench.clipped == [2.0, 1.0]
    assert bench.saved == ["/there"]
    assert bench.lacks == []


@pytest.mark.parametrize("renamed", ["clip_grad_norm_", "save_state", "load_state"])
def test_a_renamed_part_of_the_accelerator_is_a_lack(renamed: str) -> None:
    bench = Bench()
    accelerate.install(accelerator_module(renamed), bench.adapter)
    assert bench.lacks == [f"accelerate.accelerator.Accelerator.{renamed}"]
