"""transformers' Trainer, and the losses that its models return beside the one that is trained on.

Steps, losses and gradient norms go through torch's own functions and through accelerate, and are seen there. Told from
here: load-balancing losses, which the Trainer never logs; what it does log; where a checkpoint begins and ends; at what
step the Trainer goes on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from torch import Tensor

from detrun.recorder.adapters.adapter import Adapter

ADAPTER = "transformers"
TRIED = ("5.24.0",)

Function = Callable[..., Any]

_NAMES = {"aux_loss": "load_balancing_loss"}
"""What a model's output calls a loss: what detrun calls it."""
_ROUTING = ("aux_loss", "encoder_aux_loss", "decoder_aux_loss", "encoder_z_loss", "decoder_z_loss", "z_loss")
_LOGGED = {"loss": "logged_loss", "grad_norm": "logged_grad_norm"}
"""A log's names of values that detrun has by the same name and at full precision on each rank."""


def install_outputs(module: ModuleType, adapter: Adapter) -> None:
    """`transformers.modeling_outputs`. Whatever loop trains the model."""
    if adapter.needs(module, "MoeCausalLMOutputWithPast") is None:
        return
    fields = getattr(module.MoeCausalLMOutputWithPast, "__dataclass_fields__", {})
    if "aux_loss" not in fields:
        adapter.lacks("transformers.modeling_outputs.MoeCausalLMOutputWithPast.aux_loss")

    def returned(result: Any) -> None:
        if not isinstance(result, Mapping):
            return
        for key in _ROUTING:
            value = result.get(key)
            if isinstance(value, Tensor) and value.numel() == 1:
                adapter.microbatch_metric(_NAMES.get(key, key), value)

    adapter.outputs(returned)


def install_trainer(module: ModuleType, adapter: Adapter) -> None:
    """`transformers.trainer`."""
    trainer = adapter.needs(module, "Trainer")
    if trainer is None:
        return
    adapter.version(getattr(module, "__version__", "unknown"))
    prefix = adapter.needs(module, "PREFIX_CHECKPOINT_DIR")

    def stepping(original: Function) -> Function:
        begun: list[bool] = []

        def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not begun:
                begun.append(True)
                adapter.run(lambda: adapter.continues(self.state.global_step))
            return original(self, *args, **kwargs)

        return training_step

    def saving(original: Function) -> Function:
        def save_checkpoint(self: Any, model: Any, trial: Any, *args: Any, **kwargs: Any) -> Any:
            folder = None
            if trial is None:  # a search for hyper-parameters has folders of its own
                folder = os.path.abspath(f"{self.args.output_dir}/{prefix}-{self.state.global_step}")  # noqa: PTH100
            with adapter.saving(folder):
                return original(self, model, trial, *args, **kwargs)

        return save_checkpoint

    def logging(original: Function) -> Function:
        def log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
            adapter.run(_logged, adapter, dict(logs))
            return original(self, logs, *args, **kwargs)

        return log

    adapter.wrap(trainer, "training_step", stepping)
    save = adapter.needs(trainer, "_save_checkpoint")
    if prefix is not None and save is not None and adapter.takes(save, "model", "trial"):
        adapter.wrap(trainer, "_save_checkpoint", saving)
    if adapter.wrap(trainer, "log", logging):
        adapter.takes(trainer.log, "logs")


def _logged(adapter: Adapter, logs: Mapping[str, Any]) -> None:
    """Means over ranks, and over the steps since the last log or since a resume: nothing to compare. What is logged of
    a whole run at its end belongs to no step."""
    if "train_runtime" in logs:
        return
    for name, value in logs.items():
        if isinstance(value, (int, float)):
            adapter.metric(_LOGGED.get(name, name), value, "derived")
