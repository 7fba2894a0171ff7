"""Integer arrays that hold addresses: equal runs differ in them, and nothing follows from it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from detrun.fingerprint.tensors import PLAIN

_pointer_like: Callable[[Tensor], bool] | None
try:
    from detrun.fingerprint.pointers import pointer_like as _pointer_like
except ImportError:
    _pointer_like = None

_MOST = 65_536
"""Elements: arrays of addresses are short."""
_LEAST_ADDRESS = 1 << 32
_WIDE = frozenset({torch.int64, torch.uint64})


def suspicious(tensor: Tensor) -> bool:
    """Whether a tensor of 64-bit integers on the host holds addresses. The first element rules out nearly all."""
    if _pointer_like is None or type(tensor) not in PLAIN or tensor.dtype not in _WIDE or not tensor.is_cpu:
        return False
    if not 0 < tensor.numel() <= _MOST:
        return False
    address: Any = tensor.data_ptr()
    if address == 0 or ctypes.c_uint64.from_address(address).value < _LEAST_ADDRESS:
        return False
    return _pointer_like(tensor)
