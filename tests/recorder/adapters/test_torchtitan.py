"""torchtitan's adapter on a made-up trainer, as it is and with a part of it renamed."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from detrun.recorder.adapters import torchtitan
from detrun.recorder.state import buffers_digest
from tests.recorder.adapters.standins import Bench, kind, module


class _Mesh:
    mesh = torch.tensor([0, 2])

    def get_local_rank(self) -> int:
        return 1


def trainer_module(without: str = "", lacking: str = "", **changed: Any) -> ModuleType:
    """lacking: an attribute that the trainer does not set."""

    def init(self: Any, accumulation: int = 1, meshes: dict[str, _Mesh] | None = None) -> None:
        self.step, self.ntokens_seen, self.gradient_accumulation_steps = 4, 128, accumulation
        self.model_parts = [torch.nn.Linear(2, 2)]
        dims = SimpleNamespace(pp_enabled=False, get_optional_mesh=(meshes or {}).get)
        self.parallel_dims = dims
        if lacking:
            delattr(self, lacking)

    def train_step(self: Any, data: Any) -> None:
        for loss in data:
            self.forward_backward_step(loss=loss)

    parts = {
        "__init__": init,
        "train_step": train_step,
        "forward_backward_step": lambda self, *, loss: loss,
        **changed,
    }
    trainer = type("Trainer", (), {name: value for name, value in parts.items() if name != without})
    made = module("torchtitan.trainer", Trainer=trainer)
    if without == "Trainer":
        del made.Trainer
    return made


class Trainers(Bench):
    """events: what was told of steps."""

    def __init__(self) -> None:
        super().__init__("torchtitan")
        self.events: list[tuple[Any, ...]] = []
        self.session.told_coordinates, self.session.told_by_adapter = {}, set()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Trainers:
    made = Trainers()
    monkeypatch.setattr(made.adapter, "track", lambda *_: None)
    monkeypatch.setattr(made.adapter, "step_begins", lambda number: made.events.append(("begins", number)))
    monkeypatch.setattr(made.adapter, "step_ends", lambda: made.events.append(("ends",)))
    return made


def test_the_trainer_as_it_is_tells_its_step_its_local_loss_and_where_it_is(bench: Trainers) -> None:
    made = trainer_module()
    torchtitan.install(made, bench.adapter)
    trainer = made.Trainer(meshes={"tp": _Mesh(), "batch": _Mesh(), "dp_replicate": _Mesh()})
    loss = torch.tensor(0.5)
    trainer.train_step([loss])
    assert bench.events == [("begins", 4), ("ends",)]
    assert [name for name, _, _ in bench.told] == ["loss", "ntokens_seen"]
    assert bench.told[0][1].data_ptr() == loss.data_ptr()
    assert bench.session.told_coordinates == {"pp": 0, "tp": 1, "cp": 0, "ep": 0, "dp": 1}
    assert bench.session.told_replicas == [0, 2]
    assert bench.lacks == []


def test_losses_of_micro_batches_are_told_and_summed_as_the_trainer_does(bench: Trainers) -> None:
    made = trainer_module()
    torchtitan.install(made, bench.adapter)
    memory = torch.tensor(0.25)  # as in a captured graph: the next loss is written over this one
    made.Trainer(2).train_step(memory.fill_(value) for value in (0.25, 0.5))
    told = {name: float(value) for name, value, _ in bench.told}
    assert set(told) == {"loss[0]", "loss[1]", "loss", "ntokens_seen"}
    assert told["loss"] == 0.75


def test_a_stage_that_is_not_the_last_has_no_loss(bench: Trainers) -> None:
    made = trainer_module()
    torchtitan.install(made, bench.adapter)
    trainer = made.Trainer()
    trainer.parallel_dims.pp_enabled, trainer.pp_has_last_stage = True, False
    trainer.train_step([torch.tensor([-1.0])])
    assert [name for name, _, _ in bench.told] == ["ntokens_seen"]


@pytest.mark.parametrize("renamed", ["train_step", "forward_backward_step"])
def test_a_renamed_method_is_a_lack(bench: Trainers, renamed: str) -> None:
    torchtitan.install(trainer_module(renamed), bench.adapter)
    assert bench.lacks == [f"torchtitan.trainer.Trainer.{renamed}"]


@pytest.mark.parametrize(
    "renamed", ["step", "ntokens_seen", "gradient_accumulation_steps", "model_parts", "parallel_dims"]
)
def test_a_renamed_attribute_is_a_lack_and_the_training_goes_on(bench: Trainers, renamed: str) -> None:
    made = trainer_module(lacking=renamed)
    torchtitan.install(made, bench.adapter)
    made.Trainer().train_step([torch.tensor(0.5)])
    assert bench.events[-1] == ("ends",)
    assert f"torchtitan.trainer.Trainer.{renamed}" in bench.lacks


def test_what_it_logs_is_taken_as_it_is(bench: Trainers) -> None:
    def log(
        self: Any, step: int, global_avg_loss: float, global_max_loss: float, norm: float, extra_metrics: Any
    ) -> str:
        return "logged"

    made = module("torchtitan.components.metrics", MetricsProcessor=kind(log=log))
    torchtitan.metrics(made, bench.adapter)
    assert made.MetricsProcessor().log(4, 2.0, 3.0, 1.0, extra_metrics={"lr": 0.5, "note": "text"}) == "logged"
    assert [(name, value) for name, value, _ in bench.told] == [
        ("global_avg_loss", 2.0),
        ("global_max_loss", 3.0),
        ("lr", 0.5),
    ]
    renamed = module("torchtitan.components.metrics", MetricsProcessor=kind(log=lambda self, step, loss: None))
    torchtitan.metrics(renamed, bench.adapter)
    assert sum("parameter global_" in lack for lack in bench.lacks) == 2


def test_norm_and_restore(bench: Trainers) -> None:
    clipping = module("torchtitan.distributed.utils", clip_grad_norm_=lambda parameters, max_norm: 0.25)
    torchtitan.distributed(clipping, bench.adapter)
    assert clipping.clip_grad_norm_([], 1.0) == 0.25
    assert bench.told == [("grad_norm", 0.25, "adapter")]

    manager = kind(load=lambda self, step=-1: bench.observer.restoring)
    torchtitan.checkpoints(module("torchtitan.base", BaseCheckpointManager=manager), bench.adapter)
    assert manager().load(3) == 1
    assert bench.observer.restoring == 0
    assert bench.lacks == []
    torchtitan.distributed(module("torchtitan.distributed.utils"), bench.adapter)
    torchtitan.checkpoints(module("torchtitan.base", BaseCheckpointManager=kind()), bench.adapter)
    assert bench.lacks == ["torchtitan.distributed.utils.clip_grad_norm_", "torchtitan.base.BaseCheckpointManager.load"]


def test_parts_of_a_loss_of_several_predictions(bench: Trainers) -> None:
    def call(self: Any, predictions: list[float]) -> float:
        return sum(float(self.fn(one)) for one in predictions)

    loss = kind(__call__=call, fn=staticmethod(torch.tensor))
    torchtitan.predictions(module("torchtitan.models.deepseek_v3.mtp", MTPLoss=loss), bench.adapter)
    made = loss()
    made.fn = compute = torch.tensor
    assert made([1.0, 2.0]) == 3.0
    assert made.fn is compute
    made([1.0, 2.0, 4.0])
    told = [(name, float(value)) for name, value, _ in bench.told]
    assert told == [("lm_loss", 1), ("mtp_loss", 2), ("lm_loss", 1), ("mtp_1_loss", 2), ("mtp_2_loss", 4)]
    assert bench.lacks == []
    torchtitan.predictions(module("torchtitan.models.deepseek_v3.mtp"), bench.adapter)
    assert bench.lacks == ["torchtitan.models.deepseek_v3.mtp.MTPLoss"]


def test_a_count_of_tokens_that_nothing_reads_only_explains(bench: Trainers) -> None:
    def layer() -> torch.nn.Module:
        experts = torch.nn.Linear(2, 2)
        experts.register_buffer("tokens_per_expert_E", torch.zeros(2), persistent=False)
        return experts

    model = torch.nn.ModuleDict(
        {"layers": torch.nn.ModuleList([layer()]), "mtp_layers": torch.nn.ModuleList([layer()])}
    )
    made = trainer_module()
    torchtitan.install(made, bench.adapter)
    trainer = made.Trainer()
    trainer.model_parts = [model]
    before = buffers_digest([model])
    torchtitan._Trainers(bench.adapter)._add(trainer)
    after = buffers_digest([model])
    assert before is not None
    assert after is not None
    assert before.text() != after.text()
    model["mtp_layers"][0].tokens_per_expert_E += 1
    assert buffers_digest([model]).text() == after.text()
    model["layers"][0].tokens_per_expert_E += 1
    assert buffers_digest([model]).text() != after.text()
