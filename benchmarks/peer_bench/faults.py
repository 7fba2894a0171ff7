"""Faults planted below every hook that Python has: the CPU kernel of one operator misbehaves.

A kernel is replaced through the dispatcher (`torch.library`, "IMPL"), where neither a wrapper of a function, nor a
module hook, nor a dispatch mode can see how the wrong bits were made. It is replaced in both runs of a pair, so that a
clean pair takes one path; only the armed one misbehaves. What must be found: the operator in `FAULTS`, with equal
inputs and outputs that differ, and nothing before it.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

STEP = 5
"""The step, from 0, in which those misbehave that do it once."""


class Fault(NamedTuple):
    """What is planted. operator: whose kernel. scope: of the call that misbehaves. step: the first one that may differ,
    from 0. fp8: whether the program must round through 8 bits for it."""

    operator: str
    scope: str
    phase: str
    step: int
    what: str
    fp8: bool = False


FAULTS = {
    "bitflip": Fault("aten.silu.default", "layers.1.moe.experts.2", "forward", STEP, "one bit of the largest element"),
    "bitflip_masked": Fault(
        "aten.silu.default", "layers.1.moe.experts.2", "forward", STEP,
        "one bit of an ordinary element, which later sums round away",
    ),
    "nondet_fwd": Fault("aten.index_add.default", "layers.0.moe", "forward", 0, "sums in an order of chance"),
    "nondet_bwd": Fault(
        "aten.embedding_dense_backward.default", "tok_emb", "backward", 0, "the same in the backward pass",
    ),
    "opt_bitflip": Fault("aten.addcdiv_.default", "layers.0.attn.proj.bias", "optimizer", STEP, "one bit of a weight"),
    "swap_route": Fault(
        "aten.topk.default", "layers.1.moe", "forward", STEP, "two tokens' routes swapped: the same values elsewhere",
    ),
    "scale_ulp": Fault("aten.amax.default", "layers.1", "forward", STEP, "one bit of a scale for 8 bits", fp8=True),
}  # fmt: skip


class Planted:
    """A fault in this process. Call `begin_step` before each step."""

    def __init__(self, name: str, armed: bool) -> None:
        self._name, self._armed = name, armed
        self._step = -1
        self._calls: Counter[str] = Counter()
        operator, kernel = _KERNELS[name](self)
        warnings.filterwarnings("ignore", message="(?s).*verrid(ing a previously|den).*")
        # Held, since the kernel is there as long as the library is.
        self._library = torch.library.Library("aten", "IMPL")
        self._library.impl(operator, kernel, "CPU")

    def begin_step(self, step: int) -> None:
        self._step = step
        self._calls.clear()

    def strikes(self, call: int | None = None) -> bool:
        """Whether this call misbehaves. call: the only one of the step that does, from 0, and only in `STEP`; None: all
        of every step."""
        number = self._calls["all"]
        self._calls["all"] += 1
        return self._armed and (call is None or (self._step == STEP and number == call))


def _silu(planted: Planted, place: Callable[[Tensor], int]) -> tuple[str, Any]:
    def silu(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.ops.aten.silu.out(x, out=out)
        # the first block calls its 4 experts before
        if planted.strikes(call=4 + 2):
            _flip(out, place(out))
        return out

    return "silu", silu


def _index_add(planted: Planted) -> tuple[str, Any]:
    def index_add(self: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:  # noqa: ARG001
        out = self.clone()
        order = _order(index.numel(), planted.strikes())
        np.add.at(out.numpy(), index.numpy()[order], source.detach().contiguous().numpy()[order])
        return out

    return "index_add", index_add


def _embedding_backward(planted: Planted) -> tuple[str, Any]:
    def backward(grad: Tensor, indices: Tensor, rows: int, padding: int, scale: bool) -> Tensor:  # noqa: ARG001
        flat = grad.detach().reshape(indices.numel(), -1).contiguous().numpy()
        order = _order(len(flat), planted.strikes())
        out = torch.zeros(rows, flat.shape[1], dtype=grad.dtype)
        np.add.at(out.numpy(), indices.reshape(-1).numpy()[order], flat[order])
        return out

    return "embedding_dense_backward", backward


def _addcdiv(planted: Planted) -> tuple[str, Any]:
    def addcdiv_(self: Tensor, first: Tensor, second: Tensor, *, value: float = 1) -> Tensor:
        torch.ops.aten.addcdiv.out(self, first, second, value=value, out=self)
        if planted.strikes(call=7):
            _flip(self, self.numel() // 2)
        return self

    return "addcdiv_", addcdiv_


def _topk(planted: Planted) -> tuple[str, Any]:
    def topk(self: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
        values, indices = torch.empty(0, dtype=self.dtype), torch.empty(0, dtype=torch.int64)
        torch.ops.aten.topk.values(self, k, dim, largest, sorted, values=values, indices=indices)
        if planted.strikes(call=1):
            # Of the first two tokens that differ: smallest, largest, mean, norm and exclusive or of the map stay.
            other = int((indices != indices[0]).any(-1).nonzero()[0])
            indices[[0, other]] = indices[[other, 0]].clone()
            values[[0, other]] = values[[other, 0]].clone()
        return values, indices

    return "topk", topk


def _amax(planted: Planted) -> tuple[str, Any]:
    def amax(self: Tensor, dim: tuple[int, ...] = (), keepdim: bool = False) -> Tensor:  # noqa: ARG001
        out = self.max().reshape([1] * self.dim() if keepdim else [])
        if planted.strikes(call=1):
            _flip(out, 0)
        return out

    return "amax", amax


def _flip(tensor: Tensor, place: int) -> None:
    tensor.detach().view(-1).numpy().view("int32")[place] ^= 1


def _order(count: int, by_chance: bool) -> np.ndarray[Any, Any]:
    if not by_chance:
        return np.arange(count)
    return np.random.default_rng(int.from_bytes(os.urandom(8), "little")).permutation(count)


_KERNELS: dict[str, Callable[[Planted], tuple[str, Any]]] = {
    # The last bit of the largest element survives the sums behind it; that of an ordinary one is rounded away.
    "bitflip": lambda planted: _silu(planted, lambda out: int(out.detach().view(-1).abs().argmax())),
    "bitflip_masked": lambda planted: _silu(planted, lambda out: out.numel() // 3),
    "nondet_fwd": _index_add,
    "nondet_bwd": _embedding_backward,
    "opt_bitflip": _addcdiv,
    "swap_route": _topk,
    "scale_ulp": _amax,
}
