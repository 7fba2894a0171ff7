"""Lightning's adapter, on made-up parts of Lightning, as they are and with one of them renamed."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from detrun.recorder.adapters import lightning
from detrun.recorder.adapters.words import is_about_time
from detrun.recorder.draft import EACH
from tests.recorder.adapters.standins import Bench, kind, module


def trainer_module(**changed: Any) -> ModuleType:
    def save_checkpoint(self: Any, filepath: Any, weights_only: Any = None) -> None:
        self.written = filepath

    parts = {"save_checkpoint": save_checkpoint, "global_step": 0, "training": True, "sanity_checking": False}
    parts = {name: value for name, value in {**parts, **changed}.items() if value is not None}
    return module("pytorch_lightning.trainer.trainer", Trainer=kind(**parts))


def loop_module(name: str = "advance") -> ModuleType:
    loop = kind(**{name: lambda self, fetcher: fetcher})
    return module("pytorch_lightning.loops.training_epoch_loop", _TrainingEpochLoop=loop)


class LightningModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logged: dict[str, Any] = {}
        self._trainer = SimpleNamespace(training=True, sanity_checking=False)

    def log(self, name: str, value: Any, prog_bar: bool = False) -> None:
        self.logged[name] = value


def core_module() -> ModuleType:
    made = type("LightningModule", (LightningModule,), {"log": LightningModule.__dict__["log"]})
    return module("pytorch_lightning.core.module", LightningModule=made)


def fabric_module(**changed: Any) -> ModuleType:
    def save(self: Any, path: Any, state: Any, filter: Any = None) -> None:
        pass

    def load(self: Any, path: Any, state: Any = None) -> str:
        return "rest"

    def clip_gradients(self: Any, module: Any, optimizer: Any, clip_val: Any = None, max_norm: Any = None) -> Any:
        return None if max_norm is None else torch.tensor(3.0)

    parts = {"save": save, "load": load, "clip_gradients": clip_gradients, **changed}
    kept = {name: value for name, value in parts.items() if value is not None}
    return module("lightning_fabric.fabric", Fabric=kind(**kept))


def test_the_trainer_as_it_is_lacks_nothing_and_tells_where_it_saves() -> None:
    bench, made = Bench(), trainer_module()
    lightning.install_trainer(made, bench.adapter)
    trainer = made.Trainer()
    trainer.save_checkpoint("/there/step=3.ckpt")
    trainer.save_checkpoint(filepath="s3://bucket/step=6.ckpt")
    trainer.strategy = SimpleNamespace(checkpoint_io=kind()())
    type(trainer.strategy.checkpoint_io).__name__ = "AsyncCheckpointIO"
    trainer.save_checkpoint("/there/step=9.ckpt")
    assert bench.lacks == []
    assert bench.saved == ["/there/step=3.ckpt", "s3://bucket/step=6.ckpt", None]
    assert trainer.written == "/there/step=9.ckpt"


@pytest.mark.parametrize("renamed", ["save_checkpoint", "global_step", "training", "sanity_checking"])
def test_a_renamed_part_of_the_trainer_is_a_lack(renamed: str) -> None:
    bench = Bench()
    lightning.install_trainer(trainer_module(**{renamed: None}), bench.adapter)
    assert bench.lacks == [f"pytorch_lightning.trainer.trainer.Trainer.{renamed}"]


def test_a_renamed_parameter_is_a_lack() -> None:
    bench = Bench()
    lightning.install_trainer(trainer_module(save_checkpoint=lambda self, where: None), bench.adapter)
    assert len(bench.lacks) == 1
    assert "parameter filepath" in bench.lacks[0]


def test_the_loop_tells_once_where_it_goes_on() -> None:
    bench, made = Bench(), loop_module()
    lightning.install_loop(made, bench.adapter)
    loop = made._TrainingEpochLoop()
    loop.trainer = SimpleNamespace(lightning_module=SimpleNamespace(automatic_optimization=True), global_step=7)
    assert loop.advance("fetcher") == "fetcher"
    loop.trainer.global_step = 8
    loop.advance("fetcher")
    assert bench.session.numbering.done == bench.session.closed == 7
    assert bench.session.in_step
    assert bench.lacks == []


def test_with_manual_optimization_the_trainer_s_number_counts_optimizers() -> None:
    bench, made = Bench(), loop_module()
    lightning.install_loop(made, bench.adapter)
    loop = made._TrainingEpochLoop()
    loop.trainer = SimpleNamespace(lightning_module=SimpleNamespace(automatic_optimization=False), global_step=8)
    loop.advance(None)
    assert bench.session.closed == 0


def test_a_renamed_loop_and_a_trainer_without_a_number_are_lacks() -> None:
    bench = Bench()
    lightning.install_loop(loop_module("proceed"), bench.adapter)
    assert bench.lacks == ["pytorch_lightning.loops.training_epoch_loop._TrainingEpochLoop.advance"]
    bench, made = Bench(), loop_module()
    lightning.install_loop(made, bench.adapter)
    loop = made._TrainingEpochLoop()
    loop.trainer = SimpleNamespace(lightning_module=SimpleNamespace(automatic_optimization=True))
    assert loop.advance("goes on") == "goes on"
    assert len(bench.lacks) == 1
    assert "global_step" in bench.lacks[0]


def test_what_is_logged_is_told_as_it_is_given() -> None:
    bench, made = Bench(), core_module()
    lightning.install_module(made, bench.adapter)
    own = made.LightningModule()
    loss = torch.tensor(2.5)
    own.log("lm_loss", loss)
    own.log("tokens_per_sec", 12.0)
    own.log("picture", torch.zeros(3))
    own._trainer.training = False
    own.log("val_loss", loss)
    assert bench.told == [("lm_loss", loss, EACH), ("tokens_per_sec", 12.0, "derived")]
    assert set(own.logged) == {"lm_loss", "tokens_per_sec", "picture", "val_loss"}
    assert bench.lacks == []


def test_a_module_without_log_is_a_lack() -> None:
    bench = Bench()
    lightning.install_module(module("pytorch_lightning.core.module", LightningModule=kind()), bench.adapter)
    assert bench.lacks == ["pytorch_lightning.core.module.LightningModule.log"]


def test_the_batch_is_without_its_index() -> None:
    bench, made = Bench(), core_module()
    lightning.install_module(made, bench.adapter)
    (given,) = bench.observer.batch_of
    wrapped = SimpleNamespace(module=made.LightningModule())
    assert given(wrapped, ("batch", 3)) == ("batch",)
    assert given(made.LightningModule(), ("batch", 3)) == ("batch",)
    assert given(nn.Linear(1, 1), ("batch", 3)) == ("batch", 3)
    assert given(wrapped, ("batch", "more")) == ("batch", "more")


def test_fabric_saves_loads_and_clips() -> None:
    bench, made = Bench(), fabric_module()
    lightning.install_fabric(made, bench.adapter)
    fabric, model = made.Fabric(), nn.Linear(1, 1)
    fabric.save("/there/c.ckpt", {})
    assert fabric.load("/there/c.ckpt") == "rest"
    assert fabric.clip_gradients(model, None, max_norm=1.0) == 3.0
    assert fabric.clip_gradients(model, None, clip_val=1.0) is None
    assert bench.saved == ["/there/c.ckpt"]
    assert bench.clipped == [3.0]
    assert bench.lacks == []


@pytest.mark.parametrize("renamed", ["save", "load", "clip_gradients"])
def test_a_renamed_part_of_fabric_is_a_lack(renamed: str) -> None:
    bench = Bench()
    lightning.install_fabric(fabric_module(**{renamed: None}), bench.adapter)
    assert bench.lacks == [f"lightning_fabric.fabric.Fabric.{renamed}"]


def test_names_that_speak_of_time_and_of_the_machine() -> None:
    for name in ("train/step_time", "tokens_per_sec", "it/s", "gpu_mem", "elapsed", "tflops", "samples_per_second"):
        assert is_about_time(name), name
    for name in ("loss", "train/lm_loss", "load_balancing_loss", "lr-AdamW", "grad_norm", "accuracy", "perplexity"):
        assert not is_about_time(name), name
