"""Which elements of two raw buffers of one dtype differ, and by how many representable numbers at most.

For tensors that lie in files or were kept as bytes: plain numpy on little-endian, dense memory, of every dtype that
torch can save, without torch. The meaning of a distance is that of `fingerprint.scalar.ulp_distance`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_CHUNK_BYTES = 1 << 20
"""Bytes compared at a time: temporaries stay within a few MiB however large the tensors are."""

Bits = npt.NDArray[Any]
"""Numbers as unsigned integers of their size."""


@dataclass(frozen=True, slots=True)
class Elements:
    """How two tensors of one dtype and shape differ, bit by bit.

    differing: elements whose bits differ; two NaNs of the same bits do not, −0 and +0 do. max_ulp: the largest
    distance in representable numbers (for integers, the difference) over the differing pairs that have one; None if
    there is none, since nothing differs or one of each pair is a NaN. first: index in memory order of the first
    differing element, −1 if none. nan: differing pairs of which one or both are NaN. count: elements compared.
    """

    differing: int
    max_ulp: int | None
    first: int
    nan: int = 0
    count: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """How the bits of one number of a dtype are ordered.

    size: bytes of a number as numpy reads it. sign: the sign's bit of a sign-and-magnitude number, 0 if it has none.
    nan_above: magnitudes above it are NaN; None where no bits are. signed: a two's complement integer. single_zero: the
    bits of −0 are the only NaN instead (the `fnuz` formats). group: numbers that make one element (2 for complex).
    packed: two numbers of 4 bits in a byte, the low half first; each counts as an element.
    """

    size: int
    sign: int = 0
    nan_above: int | None = None
    signed: bool = False
    single_zero: bool = False
    group: int = 1
    packed: bool = False

    @property
    def element_bytes(self) -> int:
        """Bytes of one element as a tensor's shape counts it."""
        return self.size * self.group


_DOUBLE = Layout(8, 1 << 63, 0x7FF0 << 48)
_SINGLE = Layout(4, 1 << 31, 0x7F80 << 16)
_HALF = Layout(2, 1 << 15, 0x7C00)

LAYOUTS: dict[str, Layout] = {
    "float64": _DOUBLE,
    "float32": _SINGLE,
    "float16": _HALF,
    "bfloat16": Layout(2, 1 << 15, 0x7F80),
    "float8_e4m3fn": Layout(1, 0x80, 0x7E),
    "float8_e5m2": Layout(1, 0x80, 0x7C),
    "float8_e4m3fnuz": Layout(1, 0x80, single_zero=True),
    "float8_e5m2fnuz": Layout(1, 0x80, single_zero=True),
    "float8_e8m0fnu": Layout(1, nan_above=0xFE),
    "float4_e2m1fn_x2": Layout(1, 0x8, packed=True),
    "complex128": Layout(8, 1 << 63, _DOUBLE.nan_above, group=2),
    "complex64": Layout(4, 1 << 31, _SINGLE.nan_above, group=2),
    "complex32": Layout(2, 1 << 15, _HALF.nan_above, group=2),
    "bool": Layout(1),
    **{f"int{8 * size}": Layout(size, signed=True) for size in (1, 2, 4, 8)},
    **{f"uint{8 * size}": Layout(size) for size in (1, 2, 4, 8)},
    # Narrow integers take a byte each.
    **{f"int{bits}": Layout(1, signed=True) for bits in range(1, 8)},
    **{f"uint{bits}": Layout(1) for bits in range(1, 8)},
    "qint8": Layout(1, signed=True),
    "quint8": Layout(1),
    "qint32": Layout(4, signed=True),
    "bits8": Layout(1),
    "bits16": Layout(2),
    # Packed in ways of their own: here an element is a byte.
    **dict.fromkeys(("quint4x2", "quint2x4", "bits1x8", "bits2x4", "bits4x2"), Layout(1)),
}
"""Every dtype that torch can save, by torch's name without "torch."."""


def element_bytes(dtype: str) -> int:
    """Bytes of one element of a dtype as a tensor's shape counts it. Raises ValueError for an unknown dtype."""
    return layout_of(dtype).element_bytes


def compare_bytes(a: memoryview | bytes, b: memoryview | bytes, dtype: str) -> Elements:
    """Hold the dense bytes of two tensors of one dtype and shape against each other.

    Raises ValueError if they have different sizes, not a whole number of elements, or a dtype not in `LAYOUTS`.
    """
    comparison = ElementComparison(dtype)
    comparison.feed(a, b)
    return comparison.result()


class ElementComparison:
    """`compare_bytes` in pieces, so that neither tensor has to be in memory as a whole."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._layout = layout_of(dtype)
        self._differing = 0
        self._max_ulp: int | None = None
        self._first = -1
        self._nan = 0
        self._count = 0

    def feed(self, a: memoryview | bytes, b: memoryview | bytes) -> None:
        """Compare the next bytes of both: as many of the one as of the other, and whole elements."""
        size = memoryview(a).nbytes
        if size != memoryview(b).nbytes:
            raise ValueError(f"{size} bytes cannot be compared with {memoryview(b).nbytes}")
        if size % self._layout.element_bytes:
            raise ValueError(f"{size} bytes are not a whole number of {self._dtype} elements")
        if size == 0:
            return
        numbers = np.dtype(f"<u{self._layout.size}")
        x, y = np.frombuffer(a, numbers), np.frombuffer(b, numbers)
        step = _CHUNK_BYTES // self._layout.element_bytes * self._layout.group
        for begin in range(0, len(x), step):
            self._feed_numbers(x[begin : begin + step], y[begin : begin + step])

    def result(self) -> Elements:
        """What was found so far."""
        return Elements(self._differing, self._max_ulp, self._first, self._nan, self._count)

    def _feed_numbers(self, x: Bits, y: Bits) -> None:
        layout = self._layout
        before, self._count = self._count, self._count + len(x) // layout.group * (2 if layout.packed else 1)
        found = differing_numbers(x, y, layout)
        if found is None:
            return
        self._differing += len(found.elements)
        if self._first < 0:
            self._first = before + int(found.elements[0])
        if found.nan.any():
            self._nan += len(np.unique(found.numbers[found.nan] // layout.group))
        if len(found.distances):
            self._max_ulp = max(int(found.distances.max()), self._max_ulp or 0)


class Numbers(NamedTuple):
    """The numbers of two buffers whose bits differ. numbers: their positions. elements: those of the elements they
    belong to, each once. a, b: their bits. nan: which of them are NaN in `a` or `b`. distances: representable numbers
    between the others, as unsigned integers."""

    numbers: npt.NDArray[np.intp]
    elements: npt.NDArray[np.intp]
    a: Bits
    b: Bits
    nan: npt.NDArray[np.bool_]
    distances: Bits


def differing_numbers(x: Bits, y: Bits, layout: Layout) -> Numbers | None:
    """What differs between two arrays of numbers as unsigned integers of the layout's size; None if nothing does."""
    unequal = x != y
    if not unequal.any():
        return None
    if layout.packed:
        x, y = halves(x), halves(y)
        unequal = x != y
    where = np.flatnonzero(unequal)
    elements = where if layout.group == 1 else np.unique(where // layout.group)
    x, y = x[where], y[where]
    nan = is_nan(x, layout) | is_nan(y, layout)
    p, q = (ordered(side[~nan] if nan.any() else side, layout) for side in (x, y))
    return Numbers(where, elements, x, y, nan, np.maximum(p, q) - np.minimum(p, q))


def layout_of(dtype: str) -> Layout:
    """How the bits of a dtype are ordered. Raises ValueError for an unknown dtype."""
    try:
        return LAYOUTS[dtype]
    except KeyError:
        raise ValueError(f"no elements of dtype {dtype!r}; known are {', '.join(sorted(LAYOUTS))}") from None


def halves(x: Bits) -> Bits:
    """The two numbers of 4 bits of each byte, the low half first."""
    pairs: Bits = np.stack((x & 0xF, x >> 4), axis=1)
    return pairs.reshape(-1)


def is_nan(x: Bits, layout: Layout) -> npt.NDArray[np.bool_]:
    """Which numbers are NaN."""
    if layout.single_zero:
        return np.equal(x, layout.sign)
    if layout.nan_above is None:
        return np.zeros(len(x), dtype=np.bool_)
    magnitude: Bits = x & ~x.dtype.type(layout.sign)
    return np.greater(magnitude, layout.nan_above)


def ordered(x: Bits, layout: Layout) -> Bits:
    """Unsigned integers that grow with the value, by one from each representable number to the next."""
    if layout.signed:
        flipped: Bits = x ^ x.dtype.type(1 << (8 * layout.size - 1))
        return flipped
    if not layout.sign:
        return x
    sign = x.dtype.type(layout.sign)
    negative = sign - 1 - (x & (sign - 1))  # −0 is just below +0
    if layout.single_zero:
        negative += 1
    ordered: Bits = np.where(x & sign, negative, x | sign)
    return ordered
