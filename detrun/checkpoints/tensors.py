"""Tensors as they lie in files: dtype, shape, stride and a run of bytes; read dense and in order, a block at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from detrun.checkpoints.sources import BLOCK, Source, blocks
from detrun.errors import RecordError
from detrun.fingerprint.elements import LAYOUTS

_Array = npt.NDArray[Any]

_MOST_DIMENSIONS = 64
_EXPANDED = 1 << 30
"""A tensor that repeats its memory (strides of 0) may stand for so many bytes, or for more if its memory is large."""


class Data(Protocol):
    """Content of an entry: the dense, row-major, little-endian bytes of a tensor, or a file's bytes."""

    @property
    def nbytes(self) -> int: ...

    def blocks(self) -> Iterator[memoryview]:
        """The bytes in order, each block valid until the next. Raises RecordError where they cannot be read."""
        ...

    def stored(self) -> StoredTensor | None:
        """The tensor that lies in one piece in a file, None if it is put together. Raises RecordError."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """The memory that one or more tensors are views of. source: None where it is missing, and `why` says so."""

    dtype: str
    source: Source | None
    why: str = ""
    big_endian: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A strided view of a storage. shape, stride and offset are in elements, as torch counts them; conjugate and
    negative are torch's lazy bits: what its memory says is meant to be conjugated, negated."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: Storage
    conjugate: bool = False
    negative: bool = False

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * LAYOUTS[self.dtype].element_bytes

    @property
    def problem(self) -> str | None:
        """Why it cannot be read, as far as can be told without reading it."""
        if self.dtype not in LAYOUTS:
            return f"has a dtype that is not known: {self.dtype}"
        if self.storage.source is None:
            return self.storage.why
        if self.elements == 0:
            return None
        size, length = LAYOUTS[self.dtype].element_bytes, self.storage.source.length
        if (self.offset + self._span) * size > length:
            return f"reaches beyond its storage: element {self.offset + self._span - 1:,} of {length // size:,}"
        if self.nbytes > max(_EXPANDED, 1024 * self._span * size):
            return f"stands for {self.nbytes:,} bytes in a storage of {length:,}"
        return None

    @property
    def _span(self) -> int:
        """Elements from the first to the last one, both included."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))

    @property
    def _contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def blocks(self) -> Iterator[memoryview]:
        source = self._readable()
        if self.elements == 0:
            return
        layout = LAYOUTS[self.dtype]
        begin = self.offset * layout.element_bytes
        if self._contiguous:
            for block in blocks(source, begin, self.nbytes):
                yield self._settled(block)
            return
        for piece in _pieces(self._view(source)):
            yield np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data

    def stored(self) -> StoredTensor:
        """The tensor as it lies in its file."""
        return self

    def in_memory_order(self) -> StoredTensor | None:
        """The same tensor with its dimensions in the order of its memory, so that its bytes can be read in a run; None
        if these have gaps or overlap."""
        order = self._memory_order
        turned = replace(self, shape=tuple(self.shape[i] for i in order), stride=tuple(self.stride[i] for i in order))
        return turned if turned._contiguous else None

    def index_in_order(self, index: int) -> int:
        """The row-major index of the element that lies at `index` in the order of memory."""
        order, places = self._memory_order, [0] * len(self.shape)
        for dimension in reversed(order):
            index, places[dimension] = divmod(index, self.shape[dimension])
        return sum(place * step for place, step in zip(places, dense_strides(self.shape), strict=True))

    @property
    def _memory_order(self) -> list[int]:
        return sorted(range(len(self.shape)), key=lambda i: (-self.stride[i], -self.shape[i]))

    def rows(self) -> Rows:
        """For reading runs of rows along the first dimension, again and again. Needs at least one dimension."""
        return Rows(self)

    def _view(self, source: Source) -> _Array:
        """All of a strided tensor: its span in memory, seen through its strides, in `raw_dtype`."""
        layout = LAYOUTS[self.dtype]
        span = bytearray(self._span * layout.element_bytes)
        source.read_into(self.offset * layout.element_bytes, memoryview(span))
        flat = np.frombuffer(self._settled(memoryview(span)), dtype=raw_dtype(layout.element_bytes))
        return np.lib.stride_tricks.as_strided(
            flat, self.shape, tuple(stride * layout.element_bytes for stride in self.stride), writeable=False
        )

    def _readable(self) -> Source:
        problem = self.problem
        if problem is not None or self.storage.source is None:
            raise RecordError(
                problem or self.storage.why, where=self.storage.source.where if self.storage.source else None
            )
        return self.storage.source

    def _settled(self, block: memoryview) -> memoryview:
        """The bytes of whole elements as they are meant: little-endian, with a lazy conjugation or negation done."""
        layout = LAYOUTS[self.dtype]
        if self.storage.big_endian and layout.size > 1:
            block = np.frombuffer(block, f">u{layout.size}").astype(f"<u{layout.size}").view(np.uint8).data
        if self.conjugate or self.negative:
            numbers = np.frombuffer(block, f"<u{layout.size}").copy()
            if self.conjugate and layout.group == 2:
                numbers[1::2] ^= numbers.dtype.type(layout.sign)
            if self.negative:
                numbers ^= numbers.dtype.type(layout.sign)
            block = numbers.view(np.uint8).data
        return block


class Rows:
    """Runs of rows of a stored tensor; a strided one is held in memory meanwhile, a contiguous one is not."""

    def __init__(self, tensor: StoredTensor) -> None:
        self._tensor = tensor
        self._source = tensor._readable()
        self._held = None if tensor._contiguous or not tensor.elements else tensor._view(self._source)

    def read(self, begin: int, end: int) -> _Array:
        """Rows `begin` to `end`: shape (end − begin, *inner), dtype `raw_dtype` of the element's size."""
        tensor, size = self._tensor, LAYOUTS[self._tensor.dtype].element_bytes
        if self._held is not None:
            return self._held[begin:end]
        inner = math.prod(tensor.shape[1:])
        raw = bytearray((end - begin) * inner * size)
        self._source.read_into((tensor.offset + begin * inner) * size, memoryview(raw))
        flat = np.frombuffer(tensor._settled(memoryview(raw)), dtype=raw_dtype(size))
        return flat.reshape(end - begin, *tensor.shape[1:])


def stored_tensor(
    storage: Any, offset: Any, shape: Any, stride: Any, dtype: str | None = None, metadata: Any = None
) -> StoredTensor:
    """A tensor from what a pickle says about it. Raises ValueError where that makes no sense."""
    if not isinstance(storage, Storage):
        raise ValueError("a tensor without a storage")
    sizes, steps = numbers(shape), numbers(stride)
    if len(sizes) != len(steps):
        raise ValueError("a tensor whose strides do not fit its shape")
    (start,) = numbers((offset,))
    bits = metadata if isinstance(metadata, dict) else {}
    return StoredTensor(
        dtype or storage.dtype, sizes, steps, start, storage, bool(bits.get("conj")), bool(bits.get("neg"))
    )


def raw_dtype(size: int) -> np.dtype[Any]:
    """A numpy dtype for elements of so many bytes that are only to be moved; numpy moves numbers faster than bytes."""
    return np.dtype("<c16" if size == 16 else f"<u{size}")


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def numbers(values: Any) -> tuple[int, ...]:
    """Sizes, strides or offsets as a pickle gives them. Raises ValueError for what is none of them."""
    if isinstance(values, (tuple, list)) and len(values) > _MOST_DIMENSIONS:
        raise ValueError("more dimensions than a tensor has")
    if not isinstance(values, (tuple, list)) or not all(
        type(value) is int and 0 <= value < 1 << 62 for value in values
    ):
        raise ValueError("a size, stride or offset that is no number")
    return tuple(values)


def _pieces(view: _Array) -> Iterator[_Array]:
    """Parts of an array in row-major order, of BLOCK bytes or one element at most."""
    if view.nbytes <= BLOCK or view.ndim == 0:
        yield view
        return
    row = view.nbytes // len(view)
    if row > BLOCK:
        for part in view:
            yield from _pieces(part)
        return
    step = max(1, BLOCK // row)
    for begin in range(0, len(view), step):
        yield view[begin : begin + step]
