"""The gradient norm of a program that never clips: computed by the recorder, in one fixed order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from detrun.fingerprint.tensors import no_dispatch_modes, parts
from detrun.recorder.pending import Scalar, number, read


def gradient_norm(gradients: Sequence[Tensor | None]) -> list[Scalar]:
    """The 2-norm of all elements of `gradients`, a float64 scalar for each device they lie on (none without any).

    Of a distributed gradient it is the norm of the local shard: no collective is added. The norm of each gradient
    (float32 for 16-bit gradients, else in its own precision) is squared and summed in float64, in order. Nothing of
    it depends on the number of threads.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    with torch.no_grad(), no_dispatch_modes():
        if _alike(present):
            return [_combined(_norms(present, present[0].dtype))]
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for gradient in _dense(present):
            groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        by_device: dict[torch.device, list[Tensor]] = {}
        for (device, dtype), members in groups.items():
            by_device.setdefault(device, []).extend(_norms(members, dtype))
        return [_combined(norms) for norms in by_device.values()]


def _alike(gradients: list[Tensor]) -> bool:
    """Ordinary dense tensors of one dtype on one device, as nearly always: nothing to sort out."""
    return (
        {type(gradient) for gradient in gradients} == {Tensor}
        and len({(gradient.dtype, gradient.device) for gradient in gradients}) == 1
        and {gradient.layout for gradient in gradients} == {torch.strided}
    )


def _dense(gradients: list[Tensor]) -> list[Tensor]:
    pieces = []
    for gradient in gradients:
        if gradient.layout is torch.sparse_coo:
            gradient = gradient.coalesce()._values()
        pieces += [piece for _, piece in parts(gradient) if piece is not None]
    return [piece for piece in pieces if piece.is_floating_point() or piece.is_complex()]


def _norms(members: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    if dtype.is_complex:
        members = [torch.view_as_real(member.resolve_conj()) for member in members]
    elif dtype.itemsize == 1:
        members = [member.float() for member in members]
    wider = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
    return list(torch._foreach_norm(members, 2, wider))


def _combined(norms: list[Tensor]) -> Scalar:
    if norms[0].is_cpu:
        total = 0.0
        for norm in norms:
            value = norm.item()
            total += value * value
        return number("float64", math.sqrt(total))
    wide = [norm.to(torch.float64) for norm in norms] if len({norm.dtype for norm in norms}) > 1 else norms
    return Scalar("float64", None, read(torch.linalg.vector_norm(torch.stack(wide).to(torch.float64))))
