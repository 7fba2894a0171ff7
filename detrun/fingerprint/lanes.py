"""The device digest's sums over rows of bytes on the host, in plain numpy: what moved, and where to.

The digest of a row is a keyed multilinear sum over its bytes as 32-bit lanes, as `fingerprint/device.py` defines it,
so that the same row has the same digest on a device and here. Does not import torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from detrun.fingerprint.keys import ROW, level_keys

_CHUNK_LANES = 1 << 15
"""Lanes widened at a time: temporaries of 256 KiB stay in the processor's cache."""

Digests = npt.NDArray[np.uint64]


def row_sums(rows: npt.NDArray[np.uint8], key_set: int = 0) -> Digests:
    """One sum a row of bytes: shape (rows, bytes of a row) to (rows,), dtype uint64.

    Equal rows have equal sums. Two different ones of one length share a sum with probability 2^-33 at most, and about
    2^-64 mostly; under another key set (there are two) independently of the first.
    """
    count, size = rows.shape
    if size % 4:
        padded = np.zeros((count, -(-size // 4) * 4), dtype=np.uint8)
        padded[:, :size] = rows
        rows = padded
    return _sums(np.ascontiguousarray(rows).view("<u4"), key_set, 0)


def mixed(values: npt.NDArray[Any]) -> Digests:
    """A bijection of 64 bits whose outputs look independent (splitmix64's): sums of them tell multisets apart."""
    z: Digests = values.astype(np.uint64)
    with np.errstate(over="ignore"):
        z += np.uint64(0x9E37_79B9_7F4A_7C15)
        z ^= z >> np.uint64(30)
        z *= np.uint64(0xBF58_476D_1CE4_E5B9)
        z ^= z >> np.uint64(27)
        z *= np.uint64(0x94D0_49BB_1331_11EB)
        z ^= z >> np.uint64(31)
    return z


def moved(a: Digests, b: Digests, most: int = 32) -> list[tuple[int, int]]:
    """Where the rows of `b` that differ from those of `a` at their place stood in `a`: (place in a, place in b), in
    the order of `b`, at most `most`. A row of `b` that is nowhere among the differing ones of `a` is left out; of equal
    rows each is taken once, in order. Raises ValueError if the two do not have the same number of rows."""
    if a.shape != b.shape:
        raise ValueError(f"{len(a)} rows cannot be held against {len(b)}")
    places = np.flatnonzero(a != b)
    order = places[np.argsort(a[places], kind="stable")]
    there = a[order]
    taken: dict[int, int] = {}
    found: list[tuple[int, int]] = []
    for place in places.tolist():
        digest = int(b[place])
        at = int(np.searchsorted(there, b[place])) + taken.get(digest, 0)
        if at < len(there) and int(there[at]) == digest:
            taken[digest] = taken.get(digest, 0) + 1
            found.append((int(order[at]), place))
            if len(found) == most:
                break
    return found


def _sums(lanes: npt.NDArray[Any], key_set: int, level: int) -> Digests:
    """Sums of rows of lanes of 32 bits, level by level as long as a row has more than `ROW` of them."""
    count, size = lanes.shape
    keys = level_keys(level)[key_set]
    blocks = max(1, -(-size // ROW))
    values: Digests = np.zeros((count, blocks), dtype=np.uint64)
    for block in range(blocks):
        first = block * ROW
        width = min(ROW, size - first)
        if width <= 0:
            continue
        step = max(1, _CHUNK_LANES // width)
        for row in range(0, count, step):
            wide = lanes[row : row + step, first : first + width].astype(np.uint64)
            wide *= keys[:width]
            np.sum(wide, axis=1, out=values[row : row + step, block])
    if blocks == 1:
        return values[:, 0]
    halves = np.stack((values & np.uint64(0xFFFF_FFFF), values >> np.uint64(32)), axis=2)
    return _sums(halves.reshape(count, 2 * blocks), key_set, level + 1)
