"""Lightning's Trainer and Fabric, under both names that they are installed by.

Steps, losses, gradient norms, scalers and schedulers go through torch's own functions and are seen there. Told from
here: what the training logs, at full precision and before any reduction; where a checkpoint is written, which Lightning
does through a buffer in memory; at which step the Trainer goes on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from detrun.recorder.adapters.adapter import Adapter
from detrun.recorder.adapters.words import is_about_time

ADAPTER = "lightning"
TRIED = ("2.6.6",)

_BOOKKEEPING = (
    *("fit_loop", "validate_loop", "test_loop", "predict_loop", "state", "profiler", "_loggers"),
    *("_logger_connector", "_checkpoint_connector", "_data_connector", "_callback_connector", "_accelerator_connector"),
    "_signal_connector",
)
"""Parts of a Trainer that count and wire: how often what was called, where a loader is. Callbacks are none of them: one
may keep an average of the weights."""

Function = Callable[..., Any]


def install_trainer(module: ModuleType, adapter: Adapter) -> None:
    """`pytorch_lightning.trainer.trainer`."""
    trainer = adapter.needs(module, "Trainer")
    if trainer is None:
        return
    _note_version(module, adapter)
    for name in ("global_step", "training", "sanity_checking"):
        adapter.needs(trainer, name)
    adapter.uncompared(trainer, *_BOOKKEEPING)

    def saving(original: Function) -> Function:
        def save_checkpoint(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
            # A plug-in that writes in the background has not ended when this returns.
            io = type(getattr(getattr(self, "strategy", None), "checkpoint_io", None)).__name__
            with adapter.saving(None if io.startswith("Async") else absolute(filepath)):
                return original(self, filepath, *args, **kwargs)

        return save_checkpoint

    if adapter.wrap(trainer, "save_checkpoint", saving):
        adapter.takes(trainer.save_checkpoint, "filepath")


def install_loop(module: ModuleType, adapter: Adapter) -> None:
    """`pytorch_lightning.loops.training_epoch_loop`."""

    def advancing(original: Function) -> Function:
        begun: list[bool] = []

        def advance(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not begun:
                begun.append(True)
                adapter.run(_goes_on, adapter, self.trainer)
            adapter.step_begins()
            return original(self, *args, **kwargs)

        return advance

    adapter.wrap(module, "_TrainingEpochLoop.advance", advancing)


def _goes_on(adapter: Adapter, trainer: Any) -> None:
    # In manual optimization every optimizer's step counts, and how many are one step is the program's business.
    if trainer.lightning_module.automatic_optimization:
        adapter.continues(trainer.global_step)


def install_module(module: ModuleType, adapter: Adapter) -> None:
    """`pytorch_lightning.core.module`."""

    def logging(original: Function) -> Function:
        def log(self: Any, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
            adapter.run(_logged, adapter, self, name, value)
            return original(self, name, value, *args, **kwargs)

        return log

    if not adapter.wrap(module, "LightningModule.log", logging):
        return
    kind = module.LightningModule
    adapter.takes(kind.log, "name", "value")

    def given(root: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Of (batch, index of the batch) the batch: the index counts on, whatever the loader does."""
        own = isinstance(getattr(root, "module", root), kind)
        return args[:1] if own and len(args) > 1 and isinstance(args[1], int) else args

    adapter.batch_of(given)


def _logged(adapter: Adapter, module: Any, name: str, value: Any) -> None:
    """A value as the module gave it, on this rank; not what is logged outside of training, and no running averages."""
    trainer = getattr(module, "_trainer", None)
    one = isinstance(value, (bool, int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    if trainer is None or not one or not trainer.training or trainer.sanity_checking:
        return
    if is_about_time(name):
        adapter.metric(name, value, "derived")
    else:
        adapter.microbatch_metric(name, value)


def install_fabric(module: ModuleType, adapter: Adapter) -> None:
    """`lightning_fabric.fabric`."""
    fabric = adapter.needs(module, "Fabric")
    if fabric is None:
        return
    _note_version(module, adapter)

    def saving(original: Function) -> Function:
        def save(self: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
            with adapter.saving(absolute(path)):
                return original(self, path, *args, **kwargs)

        return save

    def loading(original: Function) -> Function:
        def load(self: Any, *args: Any, **kwargs: Any) -> Any:
            with adapter.restoring():
                return original(self, *args, **kwargs)

        return load

    def clipping(original: Function) -> Function:
        def clip_gradients(
            self: Any, module: Any, optimizer: Any, clip_val: Any = None, max_norm: Any = None, *more: Any, **named: Any
        ) -> Any:
            def clip() -> Any:
                return original(self, module, optimizer, clip_val, max_norm, *more, **named)

            # Clipping by value finds no norm.
            return clip() if max_norm is None else adapter.clipping(clip, list(module.parameters()))

        return clip_gradients

    if adapter.wrap(fabric, "save", saving):
        adapter.takes(fabric.save, "path")
    adapter.wrap(fabric, "load", loading)
    clip = adapter.needs(fabric, "clip_gradients")
    if clip is not None and adapter.takes(clip, "module", "optimizer", "clip_val", "max_norm"):
        adapter.wrap(fabric, "clip_gradients", clipping)


def absolute(path: Any) -> str:
    """A checkpoint's path as its save is logged; an address stays one."""
    text = os.fsdecode(path)
    return text if "://" in text else os.path.abspath(text)  # noqa: PTH100 - as text


def _note_version(module: ModuleType, adapter: Adapter) -> None:
    root = sys.modules.get(module.__name__.partition(".")[0])
    adapter.version(getattr(root, "__version__", "unknown"))
