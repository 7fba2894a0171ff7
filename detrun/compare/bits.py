"""How far two recorded numbers are apart, and how they look: on top of the exact arithmetic in `fingerprint.scalar`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from detrun.fingerprint import scalar

MAX_DECIMALS = 6
"""`equal_to_decimals` looks no further: logs print no more."""


_SIGN_AND_INFINITY = {
    "float64": (1 << 63, 0x7FF0 << 48),
    "float32": (1 << 31, 0x7F80 << 16),
    "bfloat16": (1 << 15, 0x7F80),
    "float16": (1 << 15, 0x7C00),
}
"""The sign's bit and the bits of infinity; above infinity, without the sign, lie the NaNs."""


def decode(bits: str, dtype: str) -> float | int:
    """The number that `0x…` bits of a dtype stand for; a bool is 0 or 1."""
    return scalar.value_of(int(bits, 16), dtype)


def ulp_distance(a: str, b: str, dtype: str) -> int | None:
    """Representable numbers between two bit patterns of one dtype; None where one is NaN and they differ.

    The same as `scalar.ulp_distance`, without decoding the numbers: a diverged run asks millions of times.
    """
    x, y = int(a, 16), int(b, 16)
    if x == y or dtype not in _SIGN_AND_INFINITY:
        return scalar.ulp_distance(x, y, dtype)
    sign, infinity = _SIGN_AND_INFINITY[dtype]
    p, q = x & (sign - 1), y & (sign - 1)
    if p > infinity or q > infinity:
        return None
    return abs((p if x < sign else -1 - p) - (q if y < sign else -1 - q))


@dataclass(frozen=True, slots=True)
class Distance:
    """How far two values of one dtype are apart; None where a measure does not apply (NaN, infinity)."""

    ulp: int | None
    relative: float | None
    equal_to_decimals: int | None


def distance(a: str, b: str, dtype: str) -> Distance:
    """The distance of two bit patterns of one dtype."""
    x, y = decode(a, dtype), decode(b, dtype)
    relative = scalar.relative_difference(x, y)
    return Distance(ulp_distance(a, b, dtype), relative, scalar.equal_decimals(x, y, MAX_DECIMALS))


def looks_equal(x: float | int, y: float | int, decimals: int) -> bool:
    """Whether a log that prints so many decimals shows the same text for both."""
    return f"{x:.{decimals}f}" == f"{y:.{decimals}f}"


def hexadecimal(value: float | int) -> str:
    """A float as C prints it with %a, without trailing zeros: `0x1.9a3f62p-1`; integers in decimals."""
    if isinstance(value, int) or not math.isfinite(value):
        return str(value)
    head, _, exponent = value.hex().partition("p")
    if "." in head:
        head = head.rstrip("0").rstrip(".")
    return f"{head}p{exponent}"
