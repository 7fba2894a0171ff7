"""Two checkpoints held against each other, entry by entry and bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from detrun.checkpoints.entry import Entry
from detrun.checkpoints.read import Checkpoint, open_checkpoint
from detrun.checkpoints.tensors import StoredTensor, dense_strides
from detrun.errors import RecordError
from detrun.fingerprint.elements import LAYOUTS, ElementComparison

What = Literal["only-in-a", "only-in-b", "dtype", "shape", "value", "bytes", "unreadable"]


@dataclass(frozen=True, slots=True)
class Difference:
    """How one entry differs.

    what: it is in one of them only; its dtype, else its shape, else its plain value, else its bytes differ; or it could
    not be read, `problem` says why. a and b: what each has, as text. elements: of the tensor. Of its bytes:
    differing_elements, max_ulp (None where no differing pair has a distance), first (row-major index of the one that
    lies first), nan (pairs with a NaN); where these are no numbers, an element is a byte.
    """

    name: str
    what: What
    a: str | None = None
    b: str | None = None
    dtype: str = ""
    elements: int = 0
    differing_elements: int = 0
    max_ulp: int | None = None
    first: int = -1
    nan: int = 0
    problem: str | None = None


class Comparison:
    """Two open checkpoints. After `differences()` has ended, `compared` is the number of entries that are in both and
    could be read, and `nbytes` the bytes of each that were held against each other."""

    def __init__(self, a: Path, b: Path) -> None:
        """Raises UsageError where either is not there."""
        with ExitStack() as stack:
            self.a: Checkpoint = stack.enter_context(open_checkpoint(a))
            self.b: Checkpoint = stack.enter_context(open_checkpoint(b))
            self._open = stack.pop_all()
        self.compared = 0
        self.nbytes = 0

    def differences(self) -> Iterator[Difference]:
        """What differs, in the order of `a`, then what only `b` has. Holds a block of each tensor in memory; of one
        that was saved strided, all of it."""
        # The name of a file is no part of the state while it is the only one.
        prefixes = not (len(self.a.members) == len(self.b.members) == 1)
        others = {entry.name: entry for entry in self.b.entries(prefixes)}
        for entry in self.a.entries(prefixes):
            other = others.pop(entry.name, None)
            # What the other one may hold in a part that cannot be read is not missing; that part is told by itself.
            if entry.problem is None and other is None and self.b.may_hold(entry.name):
                continue
            found = self._against(entry, other)
            if found is not None:
                yield found
        for name, entry in others.items():
            if entry.problem is not None or not self.a.may_hold(name):
                yield _unreadable(entry, None) or Difference(name, "only-in-b", b=_summary(entry))

    def _against(self, entry: Entry, other: Entry | None) -> Difference | None:
        unreadable = _unreadable(entry, other)
        if unreadable is not None:
            return unreadable
        if other is None:
            return Difference(entry.name, "only-in-a", a=_summary(entry))
        self.compared += 1
        a, b = _summary(entry), _summary(other)
        if entry.dtype != other.dtype:
            return Difference(entry.name, "dtype", a, b, entry.dtype)
        if entry.value is not None or other.value is not None:
            return None if entry.value == other.value else Difference(entry.name, "value", a, b, entry.dtype)
        if entry.shape != other.shape:
            return Difference(entry.name, "shape", a, b, entry.dtype)
        try:
            return self._bytes(entry, other)
        except RecordError as error:
            self.compared -= 1
            return Difference(entry.name, "unreadable", problem=str(error))

    def _bytes(self, entry: Entry, other: Entry) -> Difference | None:
        comparison = ElementComparison(entry.dtype if entry.dtype in LAYOUTS else "uint8")
        turned = _in_memory_order(entry, other)
        a, b = (entry.blocks(), other.blocks()) if turned is None else (each.blocks() for each in turned[1:])
        for x, y in _aligned(a, b):
            comparison.feed(x, y)
            self.nbytes += len(x)
        found = comparison.result()
        if not found.differing:
            return None
        if turned is not None and not LAYOUTS[entry.dtype].packed:
            found = replace(found, first=turned[0].index_in_order(found.first))
        return Difference(
            entry.name,
            "bytes",
            _summary(entry),
            _summary(other),
            entry.dtype,
            found.count,
            found.differing,
            max_ulp=found.max_ulp if entry.dtype in LAYOUTS else None,
            first=found.first,
            nan=found.nan,
        )

    def close(self) -> None:
        self._open.close()

    def __enter__(self) -> Comparison:
        return self

    def __exit__(self, *_details: object) -> None:
        self.close()


def diff(a: Path, b: Path) -> Iterator[Difference]:
    """What differs between two checkpoints; nothing if they hold the same state. Raises UsageError."""
    with Comparison(a, b) as comparison:
        yield from comparison.differences()


def _unreadable(entry: Entry, other: Entry | None) -> Difference | None:
    for side in (entry, other):
        if side is not None and side.problem is not None:
            return Difference(entry.name, "unreadable", problem=side.problem)
    return None


def _in_memory_order(entry: Entry, other: Entry) -> tuple[StoredTensor, StoredTensor, StoredTensor] | None:
    """The first tensor as it is, and both in the order of their memory, where that is the same and is not row-major.

    So that two tensors that were saved transposed can be read in a run, and not held. Raises RecordError.
    """
    if entry.data is None or other.data is None or len(entry.shape) < 2:
        return None
    a, b = entry.data.stored(), other.data.stored()
    if a is None or b is None or a.stride != b.stride or a.stride == dense_strides(a.shape):
        return None
    x, y = a.in_memory_order(), b.in_memory_order()
    return None if x is None or y is None else (a, x, y)


def _summary(entry: Entry) -> str:
    if entry.value is not None:
        return entry.value if entry.dtype != "float" else repr(float.fromhex(entry.value))
    return f"{entry.dtype}[{', '.join(map(str, entry.shape))}]"


def _aligned(a: Iterator[memoryview], b: Iterator[memoryview]) -> Iterator[tuple[memoryview, memoryview]]:
    """Two runs of blocks that are cut up differently, as pairs of one length. Raises RecordError if one is shorter."""
    x = y = memoryview(b"")
    while True:
        x = x or next(a, memoryview(b""))
        y = y or next(b, memoryview(b""))
        if not x and not y:
            return
        size = min(len(x), len(y))
        if not size:
            raise RecordError("ends before the tensor it is held against")
        yield x[:size], y[:size]
        x, y = x[size:], y[size:]
