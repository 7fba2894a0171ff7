"""How the bytes of two kept tensors differ: how many elements and where, by how much, and whether they only moved.

Plain numpy on dense, C-order memory of every dtype that torch can save; without torch. Temporaries stay within some
tens of MiB however large the tensors are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from detrun.fingerprint.elements import Layout, Numbers, differing_numbers, is_nan, layout_of
from detrun.fingerprint.keys import KEY_SETS
from detrun.fingerprint.lanes import Digests, mixed, row_sums

MOST_ROWS = 32
"""Rows that are named; the others are only counted."""

MOST_CELLS = 64
"""Cells of the bitmap."""

_CHUNK_BYTES = 1 << 19
_POWERS = np.array([1 << power for power in range(64)], dtype=np.uint64)
_Raw = npt.NDArray[np.uint8]
_MASK = (1 << 64) - 1
_NONE, _LEVELS = "·", "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class ByteDifference:
    """How two tensors of one dtype and shape differ, bit by bit.

    elements: compared; two numbers of 4 bits that share a byte are two. differing: those whose bits differ.
    min_ulp, max_ulp: smallest and largest distance in representable numbers over the pairs that have one, None if there
        is none; of integers their difference. ulps: how many of those distances are 1, 2, 3–4, 5–8 …, in this order,
        by such a name; both halves of a complex element count.
    nan: differing pairs with a NaN on either side; nan_payload: those with a NaN on both, of other bits.
    signed_zero: pairs of +0 and −0.
    first: index of the first differing element, None if nothing differs. Of 4-bit numbers the last index counts them.
    rows: the first indices along dimension 0 at which something differs, at most `MOST_ROWS`; differing_rows: how many
        there are; total_rows: of how many.
    bitmap: one character a cell, "·" where nothing differs, else ▁ to █ by the share that does. A cell is a row where
        there are 2 to `MOST_CELLS`, else one of `MOST_CELLS` equal parts in memory order.
    permutation: "rows" if `b` has the rows of `a` along dimension 0 in another order, "elements" if it has its elements
        in another order; None if neither, and for dtypes of so few values that it would mean nothing.
    """

    elements: int
    differing: int = 0
    min_ulp: int | None = None
    max_ulp: int | None = None
    ulps: dict[str, int] = field(default_factory=dict)
    nan: int = 0
    nan_payload: int = 0
    signed_zero: int = 0
    first: tuple[int, ...] | None = None
    rows: tuple[int, ...] = ()
    differing_rows: int = 0
    total_rows: int = 1
    bitmap: str = ""
    permutation: Literal["elements", "rows"] | None = None

    @property
    def equal(self) -> bool:
        """Whether every bit is the same."""
        return self.differing == 0


def compare_tensors(a: bytes | memoryview, b: bytes | memoryview, dtype: str, shape: Sequence[int]) -> ByteDifference:
    """Hold the dense, C-order bytes of two tensors of one dtype (torch's name without "torch.") and shape against each
    other. Raises ValueError if the bytes are not what dtype and shape ask for, or the dtype is not known."""
    layout = layout_of(dtype)
    expected = math.prod(shape) * layout.element_bytes
    for raw in (a, b):
        if memoryview(raw).nbytes != expected or any(size < 0 for size in shape):
            text = ",".join(map(str, shape))
            raise ValueError(f"{dtype}[{text}] takes {expected} bytes, not {memoryview(raw).nbytes}")
    x, y = (np.frombuffer(raw, np.uint8) for raw in (a, b))
    tally = _Tally(layout, tuple(shape))
    step = _CHUNK_BYTES // layout.element_bytes * layout.element_bytes
    numbers = np.dtype(f"<u{layout.size}")
    for begin in range(0, expected, step):
        piece = slice(begin, begin + step)
        found = differing_numbers(x[piece].view(numbers), y[piece].view(numbers), layout)
        if found is not None:
            tally.add(begin // layout.element_bytes * tally.per_byte, found)
    return tally.result(_permutation(x, y, dtype, layout, tuple(shape)) if tally.differing > 1 else None)


class _Tally:
    """What was found so far, chunk by chunk in memory order."""

    def __init__(self, layout: Layout, shape: tuple[int, ...]) -> None:
        self.layout = layout
        self.per_byte = 2 if layout.packed else 1
        self.differing = 0
        # Of numbers of 4 bits the last dimension has twice as many; without a dimension, one of its own.
        self._shape = (*shape[:-1], (shape[-1] if shape else 1) * 2) if layout.packed else shape
        self._elements = math.prod(self._shape)
        self._total_rows = self._shape[0] if shape else 1
        self._row = self._elements // self._total_rows if self._total_rows else 0
        by_row = len(self._shape) > 1 and 2 <= self._total_rows <= MOST_CELLS
        count = self._total_rows if by_row else min(MOST_CELLS, self._elements)
        # Equal parts of whole elements; the last one may be smaller.
        self._cell = max(1, -(-self._elements // count)) if count else 1
        self._cells: npt.NDArray[np.int64] = np.zeros(-(-self._elements // self._cell), np.int64)
        self._first = -1
        self._rows: list[int] = []
        self._differing_rows = 0
        self._last_row = -1
        self._ulps: npt.NDArray[np.int64] = np.zeros(len(_POWERS) + 1, np.int64)
        self._min_ulp: int | None = None
        self._max_ulp: int | None = None
        self._nan = self._nan_payload = self._signed_zero = 0

    def add(self, before: int, found: Numbers) -> None:
        """Take in what differs in the chunk that begins at element `before`."""
        elements = found.elements + before
        self.differing += len(elements)
        if self._first < 0:
            self._first = int(elements[0])
        self._cells += np.bincount(elements // self._cell, minlength=len(self._cells))
        rows = np.unique(elements // self._row)
        if rows[0] == self._last_row:
            rows = rows[1:]
        if len(rows):
            self._rows += rows[: MOST_ROWS - len(self._rows)].tolist()
            self._differing_rows += len(rows)
            self._last_row = int(rows[-1])
        self._values(found)

    def _values(self, found: Numbers) -> None:
        layout = self.layout
        if found.nan.any():
            self._nan += len(np.unique(found.numbers[found.nan] // layout.group))
            both = is_nan(found.a, layout) & is_nan(found.b, layout)
            self._nan_payload += len(np.unique(found.numbers[both] // layout.group))
        if layout.sign and not layout.single_zero:
            magnitudes = (found.a | found.b) & ~found.a.dtype.type(layout.sign)
            self._signed_zero += len(np.unique(found.numbers[magnitudes == 0] // layout.group))
        if len(found.distances):
            low, high = int(found.distances.min()), int(found.distances.max())
            self._min_ulp = low if self._min_ulp is None else min(low, self._min_ulp)
            self._max_ulp = max(high, self._max_ulp or 0)
            powers = np.searchsorted(_POWERS, found.distances.astype(np.uint64))
            self._ulps += np.bincount(powers, minlength=len(self._ulps))

    def result(self, permutation: Literal["elements", "rows"] | None) -> ByteDifference:
        sizes = np.full(len(self._cells), self._cell)
        if len(sizes):
            sizes[-1] = self._elements - self._cell * (len(sizes) - 1)
        return ByteDifference(
            elements=self._elements,
            differing=self.differing,
            min_ulp=self._min_ulp,
            max_ulp=self._max_ulp,
            ulps={_range(power): int(count) for power, count in enumerate(self._ulps) if count},
            nan=self._nan,
            nan_payload=self._nan_payload,
            signed_zero=self._signed_zero,
            first=_index(self._first, self._shape) if self.differing else None,
            rows=tuple(self._rows),
            differing_rows=self._differing_rows,
            total_rows=self._total_rows,
            bitmap="".join(_cell(int(n), int(size)) for n, size in zip(self._cells, sizes, strict=True)),
            permutation=permutation,
        )


def _index(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        place, here = divmod(place, size)
        index.append(here)
    return tuple(reversed(index))


def _range(power: int) -> str:
    """The name of the distances above 2^(power - 1) up to 2^power."""
    low, high = (1 << power >> 1) + 1, 1 << power
    return f"{high}" if low >= high else f"{low}–{high}"


def _cell(differing: int, size: int) -> str:
    return _LEVELS[-(-differing * len(_LEVELS) // size) - 1] if differing else _NONE


def _permutation(
    x: _Raw, y: _Raw, dtype: str, layout: Layout, shape: tuple[int, ...]
) -> Literal["elements", "rows"] | None:
    """Multisets are held against each other by sums of well mixed values: 128 bits, in memory of one chunk. What is
    equal at its place is in both of them and may be left out."""
    row_bytes = len(x) // shape[0] if shape else 0
    if row_bytes > layout.element_bytes and shape[0] > 1 and _same(_row_values, x, y, row_bytes):
        return "rows"
    if dtype != "bool" and not layout.packed and _same(_element_values, x, y, layout.element_bytes):
        return "elements"
    return None


def _same(values: Callable[[_Raw, int], Digests], x: _Raw, y: _Raw, size: int) -> bool:
    """Whether both have the same pieces of `size` bytes, in whatever order."""
    difference = [0] * KEY_SETS
    step = max(1, _CHUNK_BYTES // size) * size
    for begin in range(0, len(x), step):
        p, q = (side[begin : begin + step].reshape(-1, size) for side in (x, y))
        if len(p) > 1:
            unequal = (p != q).any(axis=1)
            p, q = p[unequal], q[unequal]
        for key_set in range(KEY_SETS if len(p) else 0):
            for side, sign in ((p, 1), (q, -1)):
                total = int(mixed(values(side, key_set)).sum(dtype=np.uint64))
                difference[key_set] = (difference[key_set] + sign * total) & _MASK
    return not any(difference)


def _row_values(rows: _Raw, key_set: int) -> Digests:
    return row_sums(rows, key_set)


def _element_values(elements: _Raw, key_set: int) -> Digests:
    """The bits of elements as 64-bit numbers, other ones under each key set."""
    size = elements.shape[1]
    width = min(size, 8)
    words = np.ascontiguousarray(elements).view(f"<u{width}").astype(np.uint64)
    value: Digests = np.full(len(words), key_set + 1, np.uint64)
    for column in range(words.shape[1]):
        value = mixed(value) ^ words[:, column]
    return value
