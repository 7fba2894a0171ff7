"""Digests of the rows or chunks of a tensor along any dimension: which rows moved, not only that something did.

The digest of a row is the first sum of the device digest over its bytes (see `fingerprint/lanes.py`), so that a row on
the host and the same row on a device have the same. dtype and shape are not part of it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from detrun.fingerprint.device import level_keys_on
from detrun.fingerprint.keys import ROW
from detrun.fingerprint.lanes import Digests, row_sums
from detrun.fingerprint.tensors import no_dispatch_modes

ALGORITHM = "ml64"
"""What the digests of rows are called in a record."""

_BLOCK_BYTES = 1 << 20
"""Bytes of rows brought into order at a time, where they do not lie one behind the other."""

_LOW = 0xFFFF_FFFF


def row_digests(tensor: Tensor, dim: int = 0, chunk: int = 1) -> Digests:
    """A digest for each index along `dim`, or for each `chunk` consecutive ones (the last may be fewer), of a strided
    tensor in host memory: dtype uint64, shape (ceil(size / chunk),).

    A row is the slice at its index in C order, whatever the strides. A tensor without dimensions is one row. Reads the
    memory where it lies; nothing is done to the tensor. Raises ValueError for a tensor that is not in host memory or
    not strided, for a dimension it does not have, and for a chunk below 1.
    """
    if not tensor.is_cpu:
        raise ValueError(f"a tensor on {tensor.device} has no rows here: use row_digests_on_device")
    tensor, dim = _rows_first(tensor, dim, chunk)
    size = tensor.shape[dim]
    found = np.zeros(-(-size // chunk), dtype=np.uint64)
    if tensor.numel() == 0:
        return found
    rows = np.moveaxis(_memory(tensor), dim, 0)
    row_bytes = tensor.nbytes // size
    whole = size // chunk
    step = max(1, _BLOCK_BYTES // (row_bytes * chunk))
    for first in range(0, whole, step):
        last = min(first + step, whole)
        block = rows[first * chunk : last * chunk]
        found[first:last] = row_sums(_bytes(block, row_bytes * chunk))
    if size % chunk:
        found[whole] = row_sums(_bytes(rows[whole * chunk :], row_bytes * (size % chunk)))[0]
    return found


def row_digests_on_device(tensor: Tensor, dim: int = 0, chunk: int = 1) -> Tensor:
    """The same of a tensor on any device, in plain torch operations: dtype int64 (the same bits), on that device.

    Does not wait for the device. Takes temporaries of a few times the tensor's bytes.
    """
    with torch.no_grad(), no_dispatch_modes():
        tensor, dim = _rows_first(tensor.detach(), dim, chunk)
        size = tensor.shape[dim]
        count = -(-size // chunk)
        if tensor.numel() == 0:
            return torch.zeros(count, dtype=torch.int64, device=tensor.device)
        rows = (
            tensor.movedim(dim, 0).contiguous().as_strided((size, tensor.numel() // size), (tensor.numel() // size, 1))
        )
        if rows.is_complex():
            rows = torch.view_as_real(rows).reshape(size, -1)
        rows = rows.view(torch.uint8)
        whole = size // chunk
        found = [_sums(_padded(rows[: whole * chunk].reshape(whole, chunk * rows.shape[1])))] if whole else []
        if size % chunk:
            found.append(_sums(_padded(rows[whole * chunk :].reshape(1, -1))))
        return torch.cat(found)


def _rows_first(tensor: Tensor, dim: int, chunk: int) -> tuple[Tensor, int]:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise ValueError(f"a tensor of layout {tensor.layout} has no rows in memory: take its parts")
    if chunk < 1:
        raise ValueError(f"a chunk of {chunk} rows is none")
    if tensor.is_conj() or tensor.is_neg():
        with torch.no_grad(), no_dispatch_modes():
            tensor = tensor.resolve_conj().resolve_neg()
    dims = max(tensor.dim(), 1)
    if not -dims <= dim < dims:
        raise ValueError(f"dimension {dim} of a tensor with {tensor.dim()}")
    if tensor.dim() == 0:
        tensor = tensor.detach().reshape(1)
    return tensor, dim % dims


def _memory(tensor: Tensor) -> npt.NDArray[np.void]:
    """An array over a tensor's memory with its shape and strides; an element is so many bytes. Not by `.numpy()`, which
    marks the storage as not resizable for good. Valid while the tensor lives and is not resized."""
    size = tensor.element_size()
    extent = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    address = tensor.data_ptr()
    if not address:
        raise ValueError("the tensor's memory was given back")
    memory: Any = (ctypes.c_char * (extent * size)).from_address(address)
    raw = np.frombuffer(memory, np.uint8)
    strides = tuple(stride * size for stride in tensor.stride())
    elements: npt.NDArray[np.void] = np.ndarray(tuple(tensor.shape), np.dtype(f"V{size}"), raw, 0, strides)
    return elements


def _bytes(rows: npt.NDArray[np.void], row_bytes: int) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8).reshape(-1, row_bytes)


def _padded(rows: Tensor) -> Tensor:
    """Rows of bytes as rows of lanes, int32, zero-padded to whole ones."""
    if rows.shape[1] % 4:
        rows = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 4))
    elif rows.storage_offset() % 4:
        rows = rows.clone()
    return rows.view(torch.int32)


def _sums(lanes: Tensor, level: int = 0) -> Tensor:
    """Sums of rows of lanes under the first key set: shape (rows, lanes) to (rows,)."""
    keys = level_keys_on(lanes.device, level)[0]
    sums = []
    for first in range(0, lanes.shape[1], ROW):
        block = lanes[:, first : first + ROW].to(torch.int64) & _LOW
        sums.append((block * keys[: block.shape[1]]).sum(dim=1))
    values = torch.stack(sums, dim=1)
    if values.shape[1] == 1:
        return values[:, 0]
    halves = torch.stack((values & _LOW, values >> 32 & _LOW), dim=2)
    return _sums(halves.reshape(len(lanes), -1), level + 1)
