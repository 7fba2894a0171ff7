"""Saves and restores, and the state of low precision that lies where no walk through Python objects comes to."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from detrun.recorder.adapters.megatron.known import Arguments, Known


def sharded(module: ModuleType, known: Known) -> None:
    """`megatron.core.dist_checkpointing.serialization.save`, which a loop of the user's own calls as well. An
    asynchronous one has only begun when it returns, and its end is not seen."""
    adapter = known.adapter

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        arguments = Arguments(original)

        def save(*args: Any, **kwargs: Any) -> Any:
            if arguments.read("async_sharded_save", args, kwargs):
                adapter.saves()
                return original(*args, **kwargs)
            with adapter.saving(os.path.abspath(os.fspath(arguments.read("checkpoint_dir", args, kwargs)))):  # noqa: PTH100
                return original(*args, **kwargs)

        return save

    function = adapter.needs(module, "save")
    if function is not None and adapter.takes(function, "checkpoint_dir", "async_sharded_save"):
        adapter.wrap(module, "save", around)
    adapter.track("fp8", lambda: scales(known))


def of_loop(module: ModuleType, known: Known) -> None:
    """Megatron-LM's and Bridge's own: a restore rehearses a step of the optimizer, so that its state exists."""
    adapter = known.adapter

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
            with adapter.restoring():
                return original(*args, **kwargs)

        return load_checkpoint

    adapter.wrap(module, "load_checkpoint", around)


def scales(known: Known) -> dict[str, Tensor]:
    """Scales and histories of the largest values that Transformer Engine's modules keep for delayed scaling, by module,
    `scaling_fwd` or `scaling_bwd`, and name."""
    found: dict[str, Tensor] = {}
    for root in known.adapter.observer.models.live():
        for path, module in root.named_modules():
            meta = vars(module).get("fp8_meta")
            if not isinstance(meta, dict):
                continue
            for direction in ("scaling_fwd", "scaling_bwd"):
                for name in ("scale", "scale_inv", "amax_history"):
                    tensor = getattr(meta.get(direction), name, None)
                    if isinstance(tensor, Tensor):
                        found[f"{path}.{direction}.{name}"] = tensor
    return found
