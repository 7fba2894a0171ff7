"""The device digest: a keyed multilinear sum over 32-bit lanes, 128 bits, in plain integer torch operations.

The lanes of a tensor (its bytes as 32-bit words, zero-padded at the end) are cut into rows of `ROW`. A row's value is
sum(lane * key) mod 2^64, once with each of two key sets. If there is more than one row, the row values, split into
32-bit halves (low first), are the lanes of the next level, with fresh keys. Integer addition is associative, so any
order of summation gives the same bits, on any device; position enters through the key. Two different inputs of one
length collide with probability at most 2^-33 a level and key set for random keys (multilinear hashing; Lemire and
Kaser, "Strongly universal string hashing is fast", 2013).

Many small tensors are packed: consecutive tensors of less than a row make one segment of up to `SEGMENT` lanes, each
padded to a whole lane. What tells them apart (dtype, shape, order) is hashed on the host, in `ml128_text`.

Nothing here waits for the device, and temporaries are bounded by `chunk_rows`. Where Triton is there, a GPU's rows are
summed by the kernel of `fingerprint/triton_kernel.py`, in one pass and with the same result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from detrun.fingerprint.keys import KEY_SETS, ROW, level_keys

ALGORITHM = "ml128"
SEGMENT = 1 << 20
"""Most lanes of a segment of packed small tensors."""

_LOW = 0xFFFF_FFFF
_kernel_fails = False
_keys: dict[tuple[torch.device, int], Tensor] = {}


def segment_sums(tensors: Iterable[Tensor], chunk_rows: int | None = None) -> Tensor | None:
    """The sums of dense, contiguous tensors on one device, in order: shape (segments, 2), dtype int64, on that
    device, or None if there is nothing to sum. Which tensors share a segment follows from their sizes alone.

    `chunk_rows` bounds the temporaries (rows of 32,768 lanes at a time, 256 KiB each as int64); it never changes the
    result.
    """
    sums: list[Tensor] = []
    pack: list[Tensor] = []
    packed = 0
    with torch.no_grad():
        for tensor in tensors:
            lanes = _lanes(tensor)
            size = lanes.numel()
            if size == 0:
                continue
            if pack and (size >= ROW or packed + size > SEGMENT):
                sums.append(multilinear(torch.cat(pack), chunk_rows))
                pack, packed = [], 0
            if size >= ROW:
                sums.append(multilinear(lanes, chunk_rows))
            else:
                pack.append(lanes)
                packed += size
        if pack:
            sums.append(multilinear(torch.cat(pack), chunk_rows))
        return torch.stack(sums) if sums else None


def multilinear(lanes: Tensor, chunk_rows: int | None = None) -> Tensor:
    """The two sums of a one-dimensional int32 tensor of lanes: shape (2,), dtype int64, on its device."""
    if chunk_rows is None:
        chunk_rows = 4 if lanes.is_cpu else 64
    level = 0
    keys = level_keys_on(lanes.device, level)
    values = _kernel_values(lanes, keys) if lanes.is_cuda else None
    if values is None:
        values = _row_values(lanes, keys, chunk_rows)
    while values.shape[1] > 1:
        level += 1
        keys = level_keys_on(lanes.device, level)
        halves = torch.stack((values & _LOW, values >> 32 & _LOW), dim=2).reshape(KEY_SETS, -1)
        values = torch.cat([_row_values(halves[s], keys[s : s + 1], chunk_rows) for s in range(KEY_SETS)])
    return values[:, 0]


def ml128_text(description: bytes, sums: bytes) -> str:
    """The digest of a component: what is known on the host (dtypes, shapes, order, and the digest of parts in host
    memory) and the bytes of its `segment_sums` (little-endian int64) mixed by BLAKE2b to 128 bits."""
    mixed = hashlib.blake2b(digest_size=16)
    mixed.update(b"%d:" % len(description))
    mixed.update(description)
    mixed.update(sums)
    return f"{ALGORITHM}:{mixed.hexdigest()}"


def level_keys_on(device: torch.device, level: int) -> Tensor:
    """The keys of a level as int64 (the same bits) on a device: shape (2, ROW). Copied there once a process."""
    keys = _keys.get((device, level))
    if keys is None:
        keys = torch.tensor(level_keys(level).view(np.int64), dtype=torch.int64, device=device)
        _keys[device, level] = keys
    return keys


def _kernel_values(lanes: Tensor, keys: Tensor) -> Tensor | None:
    """The rows by the kernel; None without Triton, or where it cannot compile here: tried once a process."""
    global _kernel_fails
    if _kernel_fails:
        return None
    try:
        from detrun.fingerprint.triton_kernel import row_values

        return row_values(lanes, keys)
    except Exception:  # noqa: BLE001  whatever a compiler raises: there is another way to the same result
        _kernel_fails = True
        return None


def _row_values(lanes: Tensor, keys: Tensor, chunk_rows: int) -> Tensor:
    """Sums of rows of lanes (int32, or int64 already masked) under each row of keys: shape (key sets, rows)."""
    whole = lanes.numel() // ROW
    rest = lanes.numel() - whole * ROW
    sums = []
    for first in range(0, whole, chunk_rows):
        rows = min(chunk_rows, whole - first)
        block = lanes[first * ROW : (first + rows) * ROW].view(rows, ROW).to(torch.int64) & _LOW
        sums.append(torch.stack([(block * keys[s]).sum(dim=1) for s in range(keys.shape[0])]))
    if rest:
        tail = lanes[whole * ROW :].to(torch.int64) & _LOW
        sums.append((tail * keys[:, :rest]).sum(dim=1, keepdim=True))
    return torch.cat(sums, dim=1) if len(sums) > 1 else sums[0]


def _lanes(tensor: Tensor) -> Tensor:
    """The bytes of a dense, contiguous tensor as int32, zero-padded to a whole lane."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() == 0:
        return torch.empty(0, dtype=torch.int32, device=flat.device)
    if flat.stride(0) != 1:  # one element of a strided view counts as contiguous
        flat = flat.as_strided((1,), (1,))
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.element_size() < 4:
        flat = flat.view(torch.uint8)
        if flat.numel() % 4:
            flat = torch.cat([flat, torch.zeros(-flat.numel() % 4, dtype=torch.uint8, device=flat.device)])
        elif flat.storage_offset() % 4:
            flat = flat.clone()
    return flat.view(torch.int32)
