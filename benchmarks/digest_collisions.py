"""How often two near-equal tensors that are not equal get one digest.

    python -m benchmarks.digest_collisions [--pairs 10000000] [--seed 0]

Random pairs of small tensors that differ as tensors of two runs do: a flipped bit, two, a unit in the last place here
and there, elements or rows in another order, zeros of another sign, sums that cancel. For each kind: the pairs, and how
many of them share the device digest (128 bits), each of its two sums (64), the host digest (xxh3, 128), and
`torch.hash_tensor` of the same memory. Of the device digest's first sum the upper 20 bits are counted, too, beside how
many equal ones chance gives: what good 64 bits would show, at a scale that can be counted.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from detrun.fingerprint.lanes import row_sums

RESULTS = Path(__file__).parent / "results"
BATCH = 20_000
"""Pairs made at a time."""

Bits = np.ndarray[Any, Any]
Random = np.random.Generator


def normal32(random: Random, count: int) -> Bits:
    """64 numbers like activations, with rows of 8: few exponents, a few exact zeros."""
    values = random.standard_normal((count, 64), dtype=np.float32)
    values[random.random((count, 64), dtype=np.float32) < 0.1] = 0
    return values.view(np.uint32)


def normal16(random: Random, count: int) -> Bits:
    """The same as bfloat16, two to a lane."""
    return (normal32(random, count) >> np.uint32(16)).astype(np.uint16)


def ids(random: Random, count: int) -> Bits:
    """Expert ids of 64 places: int64 of three bits."""
    return random.integers(0, 8, (count, 64), dtype=np.uint64)


SOURCES = {"float32": normal32, "bfloat16": normal16, "int64 ids": ids}


def one_bit(random: Random, x: Bits) -> None:
    places = random.integers(0, x.shape[1], len(x))
    bits = random.integers(0, 8 * x.itemsize, len(x)).astype(x.dtype)
    x[np.arange(len(x)), places] ^= np.left_shift(x.dtype.type(1), bits)


def same_bit_twice(random: Random, x: Bits) -> None:
    first, second = _two_places(random, x)
    mask = np.left_shift(x.dtype.type(1), random.integers(0, 8 * x.itemsize, len(x)).astype(x.dtype))
    rows = np.arange(len(x))
    x[rows, first] ^= mask
    x[rows, second] ^= mask


def last_places(random: Random, x: Bits) -> None:
    """One unit in the last place, of one element in eight."""
    x += (random.random(x.shape, dtype=np.float32) < 0.125).astype(x.dtype)


def up_and_down(random: Random, x: Bits) -> None:
    """One more here, one less there: the sum of the bits stays."""
    first, second = _two_places(random, x)
    rows = np.arange(len(x))
    x[rows, first] += x.dtype.type(1)
    x[rows, second] -= x.dtype.type(1)


def swapped_elements(random: Random, x: Bits) -> None:
    first, second = _two_places(random, x)
    rows = np.arange(len(x))
    x[rows, first], x[rows, second] = x[rows, second], x[rows, first]


def swapped_rows(random: Random, x: Bits) -> None:
    table = x.reshape(len(x), -1, 8)
    first = random.integers(0, table.shape[1], len(x))
    second = (first + random.integers(1, table.shape[1], len(x))) % table.shape[1]
    rows = np.arange(len(x))
    table[rows, first], table[rows, second] = table[rows, second], table[rows, first]


def shuffled(random: Random, x: Bits) -> None:
    random.permuted(x, axis=1, out=x)


def signs_of_two(random: Random, x: Bits) -> None:
    """The sign of two elements, so that +0 becomes −0."""
    first, second = _two_places(random, x)
    rows, sign = np.arange(len(x)), x.dtype.type(1 << (8 * x.itemsize - 1))
    x[rows, first] ^= sign
    x[rows, second] ^= sign


CHANGES: dict[str, Callable[[Random, Bits], None]] = {
    "one bit": one_bit,
    "one bit of two elements": same_bit_twice,
    "units in the last place": last_places,
    "one up, one down": up_and_down,
    "two elements swapped": swapped_elements,
    "two rows swapped": swapped_rows,
    "shuffled": shuffled,
    "signs of two elements": signs_of_two,
}


def _two_places(random: Random, x: Bits) -> tuple[Bits, Bits]:
    first = random.integers(0, x.shape[1], len(x))
    return first, (first + random.integers(1, x.shape[1], len(x))) % x.shape[1]


def count(pairs: int, seed: int = 0) -> dict[str, dict[str, int]]:
    """Collisions among about `pairs` random pairs, spread evenly over every kind of change and of content. Pairs that
    came out equal (two equal elements swapped) are left out."""
    random = np.random.default_rng(seed)
    kinds = [(change, source) for change in CHANGES for source in SOURCES]
    found = {}
    for index, (change, source) in enumerate(kinds):
        left = pairs * (index + 1) // len(kinds) - pairs * index // len(kinds)
        total: dict[str, int] = {}
        while left > 0:
            size = min(BATCH, left)
            left -= size
            for key, value in _batch(random, change, source, size).items():
                total[key] = total.get(key, 0) + value
        found[f"{change}, {source}"] = total
    return found


def _batch(random: Random, change: str, source: str, size: int) -> dict[str, int]:
    a = SOURCES[source](random, size)
    b = a.copy()
    CHANGES[change](random, b)
    unequal = (a != b).any(axis=1)
    a, b = a[unequal], b[unequal]
    x, y = (side.view(np.uint8).reshape(len(side), -1) for side in (a, b))
    sums = [[row_sums(side, key_set) for side in (x, y)] for key_set in (0, 1)]
    same = [p == q for p, q in sums]
    top = sums[0][0] >> np.uint64(44) == sums[0][1] >> np.uint64(44)
    return {
        "pairs": len(a),
        "device digest": int((same[0] & same[1]).sum()),
        "its first sum": int(same[0].sum()),
        "its second sum": int(same[1].sum()),
        "upper 20 bits of the first sum": int(top.sum()),
        "host digest": sum(p == q for p, q in zip(_xxh3(x), _xxh3(y), strict=True)),
        "torch.hash_tensor": int((_xor(a) == _xor(b)).sum()),
    }


def _xxh3(rows: Bits) -> list[bytes]:
    raw, size = rows.tobytes(), rows.shape[1]
    digest = xxhash.xxh3_128_digest
    return [digest(raw[begin : begin + size]) for begin in range(0, len(raw), size)]


def _xor(bits: Bits) -> Bits:
    signed = torch.from_numpy(bits.view(f"i{bits.itemsize}"))
    values = signed.view({2: torch.bfloat16, 4: torch.float32, 8: torch.int64}[bits.itemsize])
    return torch.hash_tensor(values, 1).view(torch.int64).numpy()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.perf_counter()
    kinds = count(options.pairs, options.seed)
    total = {key: sum(kind[key] for kind in kinds.values()) for key in next(iter(kinds.values()))}
    total["upper 20 bits by chance"] = round(total["pairs"] / 2**20)
    for name, figures in {**kinds, "all": total}.items():
        print(f"{name}: " + ", ".join(f"{key} {value:,}" for key, value in figures.items()))
    document = {
        "benchmark": "digest_collisions", "seed": options.seed, "seconds": round(time.perf_counter() - begun, 1),
        "machine": platform.machine(), "torch": torch.__version__, "all": total, "kinds": kinds,
    }  # fmt: skip
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "digest_collisions.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if total["device digest"] or total["host digest"] else 0


if __name__ == "__main__":
    sys.exit(main())
