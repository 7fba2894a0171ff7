"""A number an index for tensors that say where something goes: which rows moved is then known without their bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from detrun.fingerprint.tensors import PLAIN, no_dispatch_modes

MOST_ROWS = 65_536

_digest: Callable[[bytes], int]
try:
    from xxhash import xxh3_64_intdigest as _digest
except ImportError:
    from hashlib import blake2b

    def _digest(raw: bytes) -> int:
        return int.from_bytes(blake2b(raw, digest_size=8).digest(), "little")


_INTEGERS = {
    torch.bool: np.uint8,
    torch.uint8: np.uint8,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
}
_HASHED = 1 << 63


def rows_of(tensor: Tensor, *, asked: bool) -> list[int] | None:
    """A number of 64 bits for each row along the first dimension, in order: equal where the rows are.

    A row of a few small integers that are not negative, as places and choices are, is packed into 63 bits, which a file
    keeps in a byte or two; any other is the upper bit and 63 bits of its xxh3-64. None where there is none to take:
    more than 65,536 rows, no plain host tensor, or, unless rows were asked for, one that is neither integer nor
    boolean.
    """
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided or not tensor.is_cpu or tensor.dim() == 0:
        return None
    kind = _INTEGERS.get(tensor.dtype)
    if kind is None and not asked:
        return None
    rows = tensor.shape[0]
    if rows > MOST_ROWS or tensor.numel() == 0:
        return None
    with torch.no_grad(), no_dispatch_modes():
        whole = tensor.detach().contiguous()
    raw = ctypes.string_at(whole.data_ptr(), whole.nbytes)
    width = len(raw) // rows
    columns = whole.numel() // rows
    packed, fits = _packed(raw, kind, rows, columns) if kind is not None and columns <= 63 else ([], [])
    if packed and all(fits):
        return packed
    return [
        packed[row] if packed and fits[row] else _digest(raw[row * width : (row + 1) * width]) | _HASHED
        for row in range(rows)
    ]


def rows_among(outputs: Sequence[object], router: int, *, asked: bool) -> list[int] | None:
    """The same of the output at the place `router`, or of the first one if rows were asked for."""
    found = None
    for place, value in enumerate(outputs):
        if (place == router or (asked and place == 0)) and isinstance(value, Tensor):
            found = rows_of(value, asked=asked)
    return found


def _packed(raw: bytes, kind: Any, rows: int, columns: int) -> tuple[list[int], list[bool]]:
    """(each row in 63 bits, whether it fits there)."""
    values = np.frombuffer(raw, kind).reshape(rows, columns)
    bits = 63 // columns
    fits = ((values >= 0) & (values.astype(np.int64) < (1 << bits))).all(axis=1)
    packed = np.zeros(rows, np.int64)
    for column in range(columns):
        packed = (packed << bits) | (values[:, column].astype(np.int64) & ((1 << bits) - 1))
    whole: tuple[list[int], list[bool]] = (list(packed.tolist()), list(fits.tolist()))  # type: ignore[arg-type]
    return whole
