"""The device digest's rows in one pass over a GPU's memory: the sums of `fingerprint/device.py` as a Triton kernel.

Imported only where Triton is and a tensor lies on a GPU. A group of rows shares each load of the keys; a row is cut
into parts, so that one small tensor keeps more than one multiprocessor busy. The parts meet in 64-bit integer atomics,
whose order cannot matter.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from detrun.fingerprint.keys import KEY_SETS, ROW

_ROWS = 4
_BLOCK = 512
_PART = 4096
"""Rows a program takes, lanes of each that it loads at a time, and lanes of each that it takes in all."""


def row_values(lanes: Tensor, keys: Tensor) -> Tensor:
    """Sums of rows of `ROW` lanes under both key sets. lanes: int32, one-dimensional, contiguous, not empty. keys:
    int64, shape (2, ROW), on the same device. Result: int64, shape (2, rows), on it. Does not wait for the device."""
    count = lanes.numel()
    rows = -(-count // ROW)
    values = torch.zeros((KEY_SETS, rows), dtype=torch.int64, device=lanes.device)
    grid = (-(-rows // _ROWS), -(-min(count, ROW) // _PART))
    here: AbstractContextManager[Any] = torch.cuda.device(lanes.device) if lanes.is_cuda else nullcontext()
    with here:
        detrun_row_sums[grid](lanes, keys, values, count, rows, ROW, _ROWS, _BLOCK, _PART)
    return values


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def detrun_row_sums(  # type: ignore[no-untyped-def]
    lanes,
    keys,
    values,
    count,
    rows,
    row_size: tl.constexpr,
    many: tl.constexpr,
    block: tl.constexpr,
    part: tl.constexpr,
):
    row = tl.program_id(0) * many + tl.arange(0, many)
    first = tl.program_id(1) * part
    sums = tl.zeros((many, block), tl.int64)
    other_sums = tl.zeros((many, block), tl.int64)
    for offset in range(0, part, block):
        lane = first + offset + tl.arange(0, block)
        place = row.to(tl.int64)[:, None] * row_size + lane[None, :]
        value = tl.load(lanes + place, mask=place < count, other=0).to(tl.int64) & 0xFFFFFFFF
        sums += value * tl.load(keys + lane)[None, :]
        other_sums += value * tl.load(keys + row_size + lane)[None, :]
    tl.atomic_add(values + row, tl.sum(sums, 1), mask=row < rows)
    tl.atomic_add(values + rows + row, tl.sum(other_sums, 1), mask=row < rows)
