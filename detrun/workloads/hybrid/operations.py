"""The model's own operators: small fixed-order "kernels", registered as a custom extension would be.

A tracer sees each of them as one operator (`hybrid::…`), whatever happens inside. That is why order-sensitive
sums live here: a kernel that races has the right inputs and the wrong output, and nothing in between to look
at.

Every call names its *site* (the module it works for). A planted fault registers an intervention for a site;
the operator hands it its input and its result before it returns. Without one, nothing is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Intervention = Callable[[Tensor, Tensor], Tensor]
"""(input, result) -> the result to return; it may change `result` in place."""

INTERVENTIONS: dict[str, Intervention] = {}
"""By site. Filled by `faults`; empty in a sound run."""


def _settle(site: str, given: Tensor, result: Tensor) -> Tensor:
    intervention = INTERVENTIONS.get(site)
    return result if intervention is None else intervention(given, result)


def sum_in_order(parts: Tensor, order: list[int] | None = None) -> Tensor:
    """Sum `parts` [K, ...] over the first dimension, one addition after another: ((p0 + p1) + p2) + …"""
    first, *rest = order or list(range(parts.shape[0]))
    total = parts[first].clone()
    for index in rest:
        total += parts[index]
    return total


@torch.library.custom_op("hybrid::ordered_sum", mutates_args=())
def ordered_sum(parts: Tensor, site: str) -> Tensor:
    """Sum over the first dimension of `parts` [K, ...] in index order; returns [...], same dtype."""
    return _settle(site, parts, sum_in_order(parts))


@torch.library.custom_op("hybrid::gated_norm", mutates_args=())
def gated_norm(y: Tensor, gate: Tensor, weight: Tensor, eps: float, site: str) -> Tensor:
    """RMSNorm(y · silu(gate)) · weight, over the last dimension: the fused kernel at the end of a Mamba-2 block.

    Args:
        y: [..., width].
        gate: [..., width].
        weight: [width].
        eps: added to the mean square.
        site: whose call this is.

    Returns:
        [..., width].
    """
    gated = y * functional.silu(gate)
    return _settle(site, y, gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps) * weight)


@torch.library.custom_op("hybrid::order_tokens", mutates_args=())
def order_tokens(experts: Tensor, site: str) -> Tensor:
    """Positions int64 [A] that sort the assignments `experts` int64 [A] by expert, ties in token order."""
    return _settle(site, experts, torch.argsort(experts, stable=True))


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.parts = inputs[0].shape[0]


def _sum_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad.expand(ctx.parts, *grad.shape), None


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    y, gate, weight, ctx.eps, _ = inputs
    ctx.save_for_backward(y, gate, weight)


def _norm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
    y, gate, weight = ctx.saved_tensors
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    gated = y * silu
    scale = torch.rsqrt(gated.square().mean(-1, keepdim=True) + ctx.eps)
    normed = gated * scale
    grad_normed = grad * weight
    grad_gated = scale * (grad_normed - normed * (grad_normed * normed).mean(-1, keepdim=True))
    grad_gate = grad_gated * y * (sigmoid + silu * (1.0 - sigmoid))
    grad_weight = (grad * normed).reshape(-1, weight.numel()).sum(0)
    return grad_gated * silu, grad_gate, grad_weight, None, None


ordered_sum.register_autograd(_sum_backward, setup_context=_save_sum)
gated_norm.register_autograd(_norm_backward, setup_context=_save_norm)
