"""Exact arithmetic on recorded scalars: bits, values, and how far apart two of them are.

A recorded scalar is its bit pattern (an unsigned integer) and its dtype (torch's name without "torch."). Standard
library only, so that the recorder, the comparer and a reader of old records share one meaning of "apart".
"""

from __future__ import annotations

import math
import struct

_FLOATS = {"float64": 64, "float32": 32, "float16": 16, "bfloat16": 16}
_SINGLE = struct.Struct("<f")
_STRUCT = {"float64": "d", "float32": "f", "float16": "e"}
_SIGNED = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}
_UNSIGNED = {"uint8": 8, "uint16": 16, "uint32": 32, "uint64": 64}
_WIDTH = {**_FLOATS, **_SIGNED, **_UNSIGNED, "bool": 8}

DTYPES = frozenset(_WIDTH)
"""The dtypes whose bits can be turned into a value."""


def width(dtype: str) -> int:
    """Bits of one element of `dtype`. Raises ValueError for a dtype that is not in `DTYPES`."""
    try:
        return _WIDTH[dtype]
    except KeyError:
        raise ValueError(f"no scalar of dtype {dtype!r}; known are {', '.join(sorted(DTYPES))}") from None


def is_float(dtype: str) -> bool:
    return dtype in _FLOATS


def format_bits(bits: int, dtype: str) -> str:
    """`bits` in hex, padded to the dtype's width: `0x40966666`."""
    return f"0x{bits:0{width(dtype) // 4}x}"


def parse_bits(text: str, dtype: str) -> int:
    """The inverse of `format_bits`. Raises ValueError if the text is no hex number or too wide for the dtype."""
    bits = int(text, 16)
    if not 0 <= bits < 1 << width(dtype):
        raise ValueError(f"{text} does not fit into {dtype}")
    return bits


def value_of(bits: int, dtype: str) -> float | int:
    """The number these bits stand for, exactly. A bool is 0 or 1; a float16 or bfloat16 is widened without loss."""
    size = width(dtype)
    if dtype == "bfloat16":
        return _unpack("f", bits << 16, 32)
    if dtype in _FLOATS:
        return _unpack(_STRUCT[dtype], bits, size)
    if dtype in _SIGNED and bits >> (size - 1):
        return bits - (1 << size)
    return bits


def bits_of(value: float | int, dtype: str) -> int:
    """The bits of `value` in `dtype`, rounded to the nearest (ties to even); beyond the largest number is infinity.

    Raises ValueError for an integer that does not fit. The payload of a NaN is kept only for float64.
    """
    size = width(dtype)
    if dtype in _FLOATS:
        return _pack_bfloat16(float(value)) if dtype == "bfloat16" else _pack(dtype, float(value))
    if dtype == "bool":
        return int(bool(value))
    whole = int(value)
    low, high = (-(1 << (size - 1)), 1 << (size - 1)) if dtype in _SIGNED else (0, 1 << size)
    if not low <= whole < high:
        raise ValueError(f"{whole} does not fit into {dtype}")
    return whole & ((1 << size) - 1)


def json_value(bits: int, dtype: str) -> float | int | str:
    """The value as a record shows it: the shortest decimal that gives these bits back in their own dtype;
    "nan", "inf" and "-inf" are strings, since JSON has no word for them."""
    value = value_of(bits, dtype)
    if isinstance(value, int):
        return value
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if dtype == "float64":
        return value
    # A shorter decimal is found by the first try, too: it drops trailing zeros.
    if dtype == "float32":
        for style in ("%.7g", "%.8g"):
            short = float(style % value)
            if _SINGLE.unpack(_SINGLE.pack(short))[0] == value:
                return short
        return float(f"{value:.9g}")
    for digits in range(2, 6):
        short = float(f"{value:.{digits}g}")
        if bits_of(short, dtype) == bits:
            return short
    return value


def ordered(bits: int, dtype: str) -> int:
    """An integer that grows with the value and by one from each representable number to the next.

    +0 is 0, −0 is −1. NaN has no place in the order: see `ulp_distance`.
    """
    if dtype not in _FLOATS:
        return int(value_of(bits, dtype))
    sign = 1 << (width(dtype) - 1)
    return bits if bits < sign else -1 - (bits & (sign - 1))


def ulp_distance(a: int, b: int, dtype: str) -> int | None:
    """Representable numbers between two bit patterns of one dtype: 0 if the bits are equal, 1 for neighbours and for
    −0 and +0; infinity is the neighbour of the largest finite number. None if either is a NaN and the bits differ."""
    if a == b:
        return 0
    if is_float(dtype) and (math.isnan(value_of(a, dtype)) or math.isnan(value_of(b, dtype))):
        return None
    return abs(ordered(a, dtype) - ordered(b, dtype))


def relative_difference(a: float | int, b: float | int) -> float | None:
    """|a − b| / max(|a|, |b|): 0.0 for equal values (also for −0 and +0), at most 2; None if either is NaN or
    infinite and they are not equal."""
    if a == b:
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return None
    largest = max(abs(a), abs(b))
    if isinstance(a, float) or isinstance(b, float):
        # Scaled first: the difference of two large numbers of opposite sign would overflow, and the quotient of two
        # subnormal ones would lose its digits.
        exponent = -math.frexp(largest)[1]
        a, b = _scale(float(a), exponent), _scale(float(b), exponent)
        largest = max(abs(a), abs(b))
    return abs(a - b) / largest


def equal_decimals(a: float | int, b: float | int, most: int = 6) -> int | None:
    """The largest number of decimals n ≤ `most` at which both print the same (`f"{x:.{n}f}"`), or None if they print
    differently even without decimals. Shows what a log with so many decimals would have hidden."""
    for decimals in range(most, -1, -1):
        if f"{a:.{decimals}f}" == f"{b:.{decimals}f}":
            return decimals
    return None


def _scale(value: float, exponent: int) -> float:
    half = exponent // 2
    return math.ldexp(math.ldexp(value, half), exponent - half)


def _unpack(code: str, bits: int, size: int) -> float:
    value: float = struct.unpack(f"<{code}", bits.to_bytes(size // 8, "little"))[0]
    return value


def _pack(dtype: str, value: float) -> int:
    try:
        raw = struct.pack(f"<{_STRUCT[dtype]}", value)
    except OverflowError:
        raw = struct.pack(f"<{_STRUCT[dtype]}", math.copysign(math.inf, value))
    return int.from_bytes(raw, "little")


def _pack_bfloat16(value: float) -> int:
    single = _pack("float32", value)
    if math.isnan(value):
        return single >> 16 | 0x40
    rounded = _unpack("f", single, 32)
    if math.isfinite(value) and rounded != value:
        # Rounding twice would round a tie the wrong way: truncate to float32 and remember that something was cut.
        if abs(rounded) > abs(value):
            single -= 1
        single |= 1
    return (single + 0x7FFF + (single >> 16 & 1)) >> 16
