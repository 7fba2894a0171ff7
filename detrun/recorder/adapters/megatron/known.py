"""What the parts of this adapter share, and how they read the arguments of Megatron's functions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor

if TYPE_CHECKING:
    from detrun.recorder.adapters.adapter import Adapter

ALWAYS = ("megatron.core.parallel_state", "megatron.core.tensor_parallel.random", "megatron.core.optimizer.optimizer")
"""What every training with Megatron has imported when its first step ends. A module that is called otherwise would take
its metrics away without a word."""

BEHIND = {
    "megatron.training": ("megatron.training.training", "megatron.training.checkpointing"),
    "megatron.core.pipeline_parallel": ("megatron.core.pipeline_parallel.schedules",),
    "megatron.core.dist_checkpointing": ("megatron.core.dist_checkpointing.serialization",),
    "megatron.core.optimizer.optimizer": ("megatron.core.optimizer.clip_grads",),
}
"""What must have been imported too where the first was."""

CONFIGURED = {
    "num_moe_experts": "megatron.core.transformer.moe.moe_utils",
    "mtp_num_layers": "megatron.core.transformer.multi_token_prediction",
}
"""What must have been imported where a model's configuration says so."""


@dataclass
class Known:
    """parts: modules that were looked at. optimizers: Megatron's that exist. stepping: how deep inside their steps the
    program is. norm_told: whether the step that is going on has its gradient norm. sums: what layers have recorded in
    it, by metric. steps_recorded: by tracker, the steps in which they did since it was last logged."""

    adapter: Adapter
    parts: set[str] = field(default_factory=set)
    optimizers: WeakSet[Any] = field(default_factory=WeakSet)
    stepping: int = 0
    norm_told: bool = False
    sums: dict[str, Tensor] = field(default_factory=dict)
    steps_recorded: dict[str, set[int]] = field(default_factory=dict)
    _looked: bool = False

    def add(self, metric: str, value: Tensor) -> None:
        """Sum up a step's micro-batches of one layer, in the order and precision in which Megatron's tracker does. The
        tracker itself may hold several steps, and is reduced before it is logged."""
        with torch.no_grad():
            own = value.detach().float()
            before = self.sums.get(metric)
            self.sums[metric] = own.clone() if before is None else before.add_(own)

    def __post_init__(self) -> None:
        self.adapter.observer.when_stepped.append(lambda: self.adapter.run(self.tell_sums))

    def tell_sums(self) -> None:
        """The step's forward passes are over."""
        sums, self.sums = self.sums, {}
        for metric, total in sums.items():
            self.adapter.metric(metric, total)

    def look_once(self) -> None:
        """Before the first step ends: was everything imported that the metrics come from?"""
        if self._looked:
            return
        self._looked = True
        self.adapter.version(getattr(sys.modules.get("megatron.core"), "__version__", "unknown"))
        wanted = {name for first, names in BEHIND.items() if first in sys.modules for name in names}
        for root in self.adapter.observer.models.live():
            config = getattr(root, "config", None)
            wanted |= {name for setting, name in CONFIGURED.items() if getattr(config, setting, None)}
        for name in sorted((wanted | set(ALWAYS)) - self.parts):
            self.adapter.lacks(f"the module {name}")


class Arguments:
    """Reads arguments of calls of one function by name, however they were given."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._parameters = list(inspect.signature(function).parameters)

    def has(self, name: str) -> bool:
        return name in self._parameters

    def read(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], default: Any = None) -> Any:
        if name in kwargs:
            return kwargs[name]
        place = self._parameters.index(name) if name in self._parameters else len(args)
        return args[place] if place < len(args) else default

    def put(
        self, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with another value of this one."""
        place = self._parameters.index(name)
        if name not in kwargs and place < len(args):
            return (*args[:place], value, *args[place + 1 :]), kwargs
        return args, {**kwargs, name: value}


def plain(name: str) -> str:
    """A metric's name without spaces: `lm loss` is `lm_loss`."""
    return name.strip().replace(" ", "_")
