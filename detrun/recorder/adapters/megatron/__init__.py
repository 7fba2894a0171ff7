"""Megatron-LM, Megatron Core and Megatron-Bridge.

Megatron's own loop (`train_step`, `training_log`) paces the steps. A loop of the user's own around Megatron Core is
left to torch's optimizers, as any program is. Metrics are taken where Megatron has them and as they are: what a rank's
layers give to their trackers, and what Megatron makes of it and logs. Nothing is reduced or waited for.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from detrun.recorder.adapters.megatron.known import Known

if TYPE_CHECKING:
    from detrun.recorder.adapters.adapter import Adapter

ADAPTER = "megatron"
TRIED = ("0.19.2",)

PARTS = {
    "megatron.core.parallel_state": "ranks:places",
    "megatron.core.tensor_parallel.random": "ranks:streams",
    "megatron.core.pipeline_parallel.schedules": "losses:backward_passes",
    "megatron.core.transformer.moe.moe_utils": "losses:router_losses",
    "megatron.core.transformer.multi_token_prediction": "losses:prediction_losses",
    "megatron.core.optimizer.clip_grads": "optimizers:clipping",
    "megatron.core.optimizer.optimizer": "optimizers:steps",
    "megatron.core.optimizer.distrib_optimizer": "optimizers:shards",
    "megatron.core.dist_checkpointing.serialization": "checkpoints:sharded",
    "megatron.training.checkpointing": "checkpoints:of_loop",
    "megatron.bridge.training.checkpointing": "checkpoints:of_loop",
    "megatron.training.training": "loop:install",
    "megatron.bridge.training.train": "loop:install",
}
"""What is done with each module once it was imported: a file of this package and its function."""

_known: WeakKeyDictionary[Adapter, Known] = WeakKeyDictionary()


def install(module: ModuleType, adapter: Adapter) -> None:
    known = _known.get(adapter)
    if known is None:
        known = _known[adapter] = Known(adapter)
    file, _, function = PARTS[module.__name__].partition(":")
    getattr(importlib.import_module(f"{__name__}.{file}"), function)(module, known)
    known.parts.add(module.__name__)
