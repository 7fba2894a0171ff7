"""The fixed key sequence of the device digest: splitmix64, by counter, the same on every machine for ever."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

ROW = 32_768
"""Lanes of 32 bits in a row of the device digest, which `fingerprint/device.py` defines."""

KEY_SETS = 2
"""Two independent sums of 64 bits make a digest of 128."""

_SEED = 0x6465_7472_756E_3031
_GAMMA = 0x9E37_79B9_7F4A_7C15


def splitmix64(start: int, count: int) -> npt.NDArray[np.uint64]:
    """Outputs `start` … `start + count - 1` of splitmix64 (Steele, Lea, Flood 2014) seeded with detrun's own seed."""
    with np.errstate(over="ignore"):
        z: npt.NDArray[np.uint64] = np.arange(start + 1, start + count + 1, dtype=np.uint64)
        z *= np.uint64(_GAMMA)
        z += np.uint64(_SEED)
        z ^= z >> np.uint64(30)
        z *= np.uint64(0xBF58_476D_1CE4_E5B9)
        z ^= z >> np.uint64(27)
        z *= np.uint64(0x94D0_49BB_1331_11EB)
        z ^= z >> np.uint64(31)
    return z


@lru_cache(maxsize=8)
def level_keys(level: int) -> npt.NDArray[np.uint64]:
    """Keys of one level of the digest's tree: shape (KEY_SETS, ROW), dtype uint64. Every level has fresh ones."""
    return splitmix64(level * KEY_SETS * ROW, KEY_SETS * ROW).reshape(KEY_SETS, ROW)
