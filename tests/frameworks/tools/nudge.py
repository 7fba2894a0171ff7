"""Plants the smallest fault there is in a framework's module, without an edit of the framework.

NUDGE="decoder.layers.1.mlp@call=5,rank=1": from now on the output of every module whose name ends so goes through an
operator that copies it; in the fifth call on rank 1 its elements are 1 ULP off, if NUDGE_ARMED is set. So both arms run
the same operators on the same inputs, and one gives another result. All elements: one alone may be rounded away where
it is added to larger numbers, and what leaves no trace cannot be found.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


@torch.library.custom_op("nudge::copy", mutates_args=())
def copy(x: Tensor) -> Tensor:
    out = x.clone()
    if _plan is not None and _plan.due:
        _plan.due = False
        word = {4: torch.int32, 2: torch.int16, 8: torch.int64}[out.element_size()]
        out.view(word).bitwise_xor_(1)
    return out


@copy.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


copy.register_autograd(lambda _context, gradient: gradient)


_WRAPPED = "_checkpoint_wrapped_module."
"""What activation checkpointing adds to a name. Modules in it are called once more in the backward pass."""


class _Plan:
    def __init__(self, text: str) -> None:
        self.suffix, _, rest = text.partition("@")
        wanted = dict(part.split("=") for part in rest.split(","))
        self.call, self.rank = int(wanted["call"]), int(wanted.get("rank", "0"))
        self.names: dict[int, str] = {}
        self.calls = 0
        self.due = False

    def learn(self, module: nn.Module, _inputs: Any) -> None:
        if id(module) not in self.names:
            named = ((id(part), name.replace(_WRAPPED, "")) for name, part in module.named_modules())
            self.names = {**dict(named), **self.names}

    def nudge(self, module: nn.Module, _inputs: Any, output: Any) -> Any:
        name = self.names.get(id(module), "")
        if not torch.is_grad_enabled() or not (name == self.suffix or name.endswith("." + self.suffix)):
            return None
        self.calls += 1
        here = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))) == self.rank
        self.due = here and self.calls == self.call and bool(os.environ.get("NUDGE_ARMED"))
        if isinstance(output, Tensor):
            return copy(output)
        return (copy(output[0]), *output[1:])


_plan: _Plan | None = None


def install() -> None:
    """To be called by a driver before it trains. Does nothing without NUDGE."""
    global _plan
    if "NUDGE" in os.environ:
        _plan = _Plan(os.environ["NUDGE"])
        register_module_forward_pre_hook(_plan.learn)
        register_module_forward_hook(_plan.nudge)
