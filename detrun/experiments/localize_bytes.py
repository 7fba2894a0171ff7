"""The kept tensors of one event in both arms, held against each other in memory: the bytes settle it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from detrun.errors import RecordError
from detrun.fingerprint.bytes_compare import ByteDifference, compare_tensors
from detrun.records.kept_reader import KeptEvent, read_kept
from detrun.records.layout import AttemptFolder
from detrun.records.trace_row import EventKey


@dataclass(frozen=True)
class TensorReading:
    """One part of one tensor of an event. difference: None where the arms' are not of one dtype and shape."""

    side: str
    index: int
    part: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    difference: ByteDifference | None

    @property
    def place(self) -> tuple[str, int, str]:
        """What finds it again in either arm."""
        return self.side, self.index, self.part

    @property
    def differs(self) -> bool:
        return self.difference is None or not self.difference.equal


@dataclass
class EventReading:
    """What the bytes of one event say. missing: why they say nothing, or None."""

    key: EventKey
    rank: int
    a: KeptEvent | None = None
    b: KeptEvent | None = None
    tensors: list[TensorReading] = field(default_factory=list)
    missing: str | None = None

    def differing(self, side: str) -> list[TensorReading]:
        """The parts of a side (`input`, `output`) that differ."""
        return [tensor for tensor in self.tensors if tensor.side == side and tensor.differs]

    @property
    def is_origin(self) -> bool:
        """Whether equal inputs gave different outputs, and nothing else that the operation reads differs."""
        if self.missing or self.a is None or self.b is None or not self.tensors:
            return False
        same_call = (self.a.call, self.a.rng) == (self.b.call, self.b.rng)
        return same_call and not self.differing("input") and bool(self.differing("output"))


def read_event(a: AttemptFolder, b: AttemptFolder, rank: int, key: EventKey) -> EventReading:
    """Reads what both arms kept of an event of one rank. Nothing raises: what cannot be read is `missing`."""
    reading = EventReading(key, rank)
    kept: list[KeptEvent | None] = []
    for attempt in (a, b):
        try:
            kept.append(_find(read_kept(attempt, rank), key))
        except RecordError as error:
            reading.missing = f"what arm {attempt.arm} kept {error.what}"
            return reading
    reading.a, reading.b = kept
    absent = [attempt.arm for attempt, event in zip((a, b), kept, strict=True) if event is None]
    if absent:
        reading.missing = f"arm {' and '.join(absent)} kept nothing of it: it was not reached, or over the byte limit"
        return reading
    assert reading.a is not None
    assert reading.b is not None
    try:
        reading.tensors = _compare(reading.a, reading.b)
    except (RecordError, ValueError) as error:
        reading.missing = f"what was kept cannot be compared: {error}"
    return reading


def _find(events: Sequence[KeptEvent], key: EventKey) -> KeptEvent | None:
    return next((event for event in events if tuple(event.key) == key), None)


def _compare(a: KeptEvent, b: KeptEvent) -> list[TensorReading]:
    others = {(tensor.side, tensor.index, tensor.part): tensor for tensor in b.tensors}
    found = []
    for tensor in a.tensors:
        other = others.get((tensor.side, tensor.index, tensor.part))
        difference = None
        if other is not None and (other.dtype, tuple(other.shape)) == (tensor.dtype, tuple(tensor.shape)):
            difference = compare_tensors(a.bytes_of(tensor), b.bytes_of(other), tensor.dtype, tensor.shape)
        found.append(
            TensorReading(
                tensor.side, tensor.index, tensor.part, tensor.dtype, tuple(tensor.shape), tensor.nbytes, difference
            )
        )
    return found
