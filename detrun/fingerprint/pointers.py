"""Recognizes arrays of addresses: equal runs have other ones, so that a digest of them says nothing.

Grouped kernels take such arrays (one address a group) as 64-bit integers; they are small and filled on the host. Better
to miss one than to take ordinary integers for addresses: everything below must hold at once.
"""

from __future__ import annotations

import ctypes
import struct
from bisect import bisect_right
from pathlib import Path

import torch
from torch import Tensor

MOST_ELEMENTS = 4096
"""Larger arrays are taken for data."""

_LEAST = 2
"""A single number that looks like an address is not enough."""

_LOWEST, _END = 1 << 32, 1 << 47
"""Addresses of a 64-bit process lie in the lower canonical half. Those of heaps, mappings and devices lie above 4 GiB;
ids, counts and offsets mostly below."""

_ALIGNMENT = 16
"""What every allocator gives at least; a device's gives 512."""

_SPAN = 1 << 46
"""A program's heap and its mappings lie 43 TiB apart on Linux; hashes are spread over everything."""

_MAPS = Path("/proc/self/maps")
_mapped: tuple[list[int], list[int]] = ([], [])


def pointer_like(tensor: Tensor) -> bool:
    """Whether a tensor looks like an array of addresses: int64 or uint64, in host memory, dense, of 2 to
    `MOST_ELEMENTS` numbers, of which at least half and at least two different ones are not zero; those lie in user
    space above 4 GiB, within 64 TiB of each other, are aligned to 16 bytes, and lie in what this process has mapped
    (drivers reserve the addresses of device memory there, too). Never raises."""
    if tensor.dtype not in (torch.int64, torch.uint64) or not _LEAST <= tensor.numel() <= MOST_ELEMENTS:
        return False
    if not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return False
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # a transform's wrapper or a fake tensor: no memory of its own
        return False
    if not address:
        return False
    if any(value and not _is_address(value) for value in struct.unpack("<2Q", ctypes.string_at(address, 16))):
        return False  # where almost all integers end
    return are_addresses(struct.unpack(f"<{tensor.numel()}Q", ctypes.string_at(address, tensor.nbytes)))


def are_addresses(values: tuple[int, ...]) -> bool:
    """The same of plain numbers."""
    found = {value for value in values if value}
    if len(found) < _LEAST or 2 * (len(values) - values.count(0)) < len(values):
        return False
    return all(map(_is_address, found)) and max(found) - min(found) < _SPAN and _all_mapped(found)


def _is_address(value: int) -> bool:
    return _LOWEST <= value < _END and value % _ALIGNMENT == 0


def _all_mapped(addresses: set[int]) -> bool:
    """Whether this process has something at every one of them. What was there once counts, so that the list of
    mappings, some hundred microseconds to read, is read only for addresses not met before."""
    global _mapped
    if not all(map(_is_mapped, addresses)):
        _mapped = _read_mappings()
    return all(map(_is_mapped, addresses))


def _is_mapped(address: int) -> bool:
    begins, ends = _mapped
    place = bisect_right(begins, address) - 1
    return place >= 0 and address < ends[place]


def _read_mappings() -> tuple[list[int], list[int]]:
    """First and last-but-one addresses of the mappings, in order; none where the system does not list them."""
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return [], []
    ranges = sorted(
        (int(begin, 16), int(end, 16)) for begin, end in (line.split(" ", 1)[0].split("-") for line in lines)
    )
    return [begin for begin, _ in ranges], [end for _, end in ranges]
