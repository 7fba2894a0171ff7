"""accelerate's Accelerator: the gradient norm of every kind of sharding, and where it saves."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from detrun.recorder.adapters.adapter import Adapter

ADAPTER = "accelerate"
TRIED = ("1.15.0",)

Function = Callable[..., Any]


def install(module: ModuleType, adapter: Adapter) -> None:
    """`accelerate.accelerator`."""
    accelerator = adapter.needs(module, "Accelerator")
    if accelerator is None:
        return
    adapter.version(getattr(sys.modules.get("accelerate"), "__version__", "unknown"))

    def clipping(original: Function) -> Function:
        def clip_grad_norm_(self: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            return adapter.clipping(lambda: original(self, given, *args, **kwargs), given)

        return clip_grad_norm_

    def saving(original: Function) -> Function:
        def save_state(self: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
            if output_dir is None:  # it chooses a name by itself; the files that it writes there are seen
                return original(self, output_dir, *args, **kwargs)
            with adapter.saving(os.path.abspath(os.fsdecode(output_dir))):  # noqa: PTH100 - as text
                return original(self, output_dir, *args, **kwargs)

        return save_state

    def loading(original: Function) -> Function:
        def load_state(self: Any, *args: Any, **kwargs: Any) -> Any:
            with adapter.restoring():
                return original(self, *args, **kwargs)

        return load_state

    clip = adapter.needs(accelerator, "clip_grad_norm_")
    if clip is not None and adapter.takes(clip, "parameters"):
        adapter.wrap(accelerator, "clip_grad_norm_", clipping)
    save = adapter.needs(accelerator, "save_state")
    if save is not None and adapter.takes(save, "output_dir"):
        adapter.wrap(accelerator, "save_state", saving)
    adapter.wrap(accelerator, "load_state", loading)
