"""The events of one step of a rank's trace as columns, and how they are read out of Arrow batches without believing
them."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import numpy.typing

from detrun.errors import RecordError
from detrun.records.files import one_line
from detrun.records.trace_row import NO_CONTENT, TRACE_FIELDS, TraceEvent

Integers = numpy.typing.NDArray[numpy.signedinteger[Any]]
Digests = numpy.typing.NDArray[numpy.uint64]
Mask = numpy.typing.NDArray[numpy.bool_]

MAX_STEP_BYTES = 1 << 30
"""Of one step's columns in memory: some millions of events."""

MAX_WORDS = 1 << 20
"""Different entries of a text column in one step."""

_COUNTS = ("seq", "microbatch", "occurrence")

TEXTS = tuple(name for name, kind in TRACE_FIELDS if kind == "text")


@dataclass(frozen=True)
class Words:
    """A column of text: values[codes[row]]."""

    codes: Integers
    values: tuple[str, ...]

    def __getitem__(self, row: int) -> str:
        return self.values[int(self.codes[row])]

    def take(self, rows: Integers) -> Words:
        return Words(self.codes[rows], self.values)


@dataclass(frozen=True)
class Parts:
    """Digests of the tensor parts of all events: those of row r are at offsets[r] to offsets[r + 1], the first
    inputs[r] of which went in and the others came out. lo, hi: the halves of the 16 bytes, little-endian. producers:
    a number an input part, at producer_offsets[r] to producer_offsets[r + 1]."""

    offsets: Integers
    inputs: Integers
    lo: Digests
    hi: Digests
    producer_offsets: Integers
    producers: Integers

    def take(self, rows: Integers) -> Parts:
        """The parts of some rows, in that order."""
        at, offsets = ranges(self.offsets, rows)
        producers_at, producer_offsets = ranges(self.producer_offsets, rows)
        return Parts(
            offsets,
            self.inputs[rows],
            self.lo[at],
            self.hi[at],
            producer_offsets,
            self.producers[producers_at],
        )

    def digest(self, part: int) -> bytes:
        return int(self.lo[part]).to_bytes(8, "little") + int(self.hi[part]).to_bytes(8, "little")


@dataclass(frozen=True)
class RowDigests:
    """The column of row digests, left in its batches: `starts` are their first rows. order: the row in the batches of
    each row of the table, None if it is the same."""

    starts: Sequence[int]
    batches: Sequence[Any]
    order: Integers | None = None

    def of(self, row: int) -> tuple[int, ...] | None:
        at = row if self.order is None else int(self.order[row])
        number = bisect.bisect_right(self.starts, at) - 1
        values = self.batches[number][at - self.starts[number]].as_py()
        return None if values is None else tuple(values)


@dataclass(frozen=True)
class StepTable:
    """The events of a step in execution order.

    numbers: seq, microbatch, occurrence and peer. has_rng, rng_lo, rng_hi: the digest of a generator, where there is
    one.
    """

    step: int
    numbers: Mapping[str, Integers]
    texts: Mapping[str, Words]
    parts: Parts
    has_rng: Mask
    rng_lo: Digests
    rng_hi: Digests
    rows: RowDigests | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.numbers["seq"])

    def take(self, rows: Integers) -> StepTable:
        """Some of the rows in another order, without their row digests."""
        return StepTable(
            self.step,
            {name: column[rows] for name, column in self.numbers.items()},
            {name: words.take(rows) for name, words in self.texts.items()},
            self.parts.take(rows),
            self.has_rng[rows],
            self.rng_lo[rows],
            self.rng_hi[rows],
        )

    def event(self, row: int) -> TraceEvent:
        """One row as an event."""
        parts = self.parts
        first, last = int(parts.offsets[row]), int(parts.offsets[row + 1])
        cut = first + int(parts.inputs[row])
        begin, end = int(parts.producer_offsets[row]), int(parts.producer_offsets[row + 1])
        rng = None
        if self.has_rng[row]:
            rng = int(self.rng_lo[row]).to_bytes(8, "little") + int(self.rng_hi[row]).to_bytes(8, "little")
        return TraceEvent(
            seq=int(self.numbers["seq"][row]),
            step=self.step,
            microbatch=int(self.numbers["microbatch"][row]),
            occurrence=int(self.numbers["occurrence"][row]),
            peer=int(self.numbers["peer"][row]),
            inputs=tuple(parts.digest(part) for part in range(first, cut)),
            outputs=tuple(parts.digest(part) for part in range(cut, last)),
            producers=tuple(int(value) for value in parts.producers[begin:end]),
            rng=rng,
            rows=None if self.rows is None else self.rows.of(row),
            **{name: self.texts[name][row] for name in TEXTS},
        )

    def events(self) -> Iterator[TraceEvent]:
        """All of them, in execution order."""
        return (self.event(row) for row in range(len(self)))


def ranges(offsets: Integers, rows: Integers) -> tuple[Integers, Integers]:
    """(the positions offsets[r] … offsets[r + 1] of every r in rows one behind the other, the new offsets)."""
    counts = offsets[rows + 1] - offsets[rows]
    after = numpy.zeros(len(rows) + 1, numpy.int64)
    numpy.cumsum(counts, out=after[1:])
    return numpy.repeat(offsets[rows] - after[:-1], counts) + numpy.arange(after[-1]), after


def read_table(step: int, batches: Iterable[Any], where: str) -> StepTable:
    """The table of one step, from record batches of a trace's schema that were checked to be consistent in themselves.

    Raises RecordError where a value cannot be: a missing number, a code that stands for nothing, an event of another
    step, an event without its producers.
    """
    builder = _Builder(step, where)
    for batch in batches:
        builder.add(batch)
    return builder.table()


class _Builder:
    """Gathers batches. Dictionaries may grow or change between them; codes are those of the whole step."""

    def __init__(self, step: int, where: str) -> None:
        self._step = step
        self._where = where
        self._numbers: dict[str, list[Any]] = {"seq": [], "microbatch": [], "occurrence": [], "peer": []}
        self._codes: dict[str, list[Any]] = {name: [] for name in TEXTS}
        self._values: dict[str, dict[str, int]] = {name: {} for name in TEXTS}
        self._seen: dict[str, tuple[Any, Any]] = {}
        self._parts: dict[str, list[Any]] = {"counts": [], "inputs": [], "lo": [], "hi": [], "producers": []}
        self._rng: dict[str, list[Any]] = {"has": [], "lo": [], "hi": []}
        self._starts: list[int] = []
        self._row_digests: list[Any] = []
        self._length = 0

    def add(self, batch: Any) -> None:
        columns = {name: batch.column(name) for name, _ in TRACE_FIELDS}
        if (self._integers(columns["step"], "step") != self._step).any():
            raise self._wrong(f"has events of other steps among those of step {self._step}")
        for name, gathered in self._numbers.items():
            values = self._integers(columns[name], name)
            if name in _COUNTS and len(values) and values.min() < 0:
                raise self._wrong(f"has a {name} below 0")
            gathered.append(values)
        for name in TEXTS:
            self._codes[name].append(self._words(name, columns[name]))
        self._add_parts(columns["parts"], columns["n_inputs"], columns["producers"])
        self._add_rng(columns["rng"])
        self._starts.append(self._length)
        self._row_digests.append(self._lists_of_rows(columns["rows"]))
        self._length += batch.num_rows

    def table(self) -> StepTable:
        numbers = {name: _joined(found) for name, found in self._numbers.items()}
        parts = Parts(
            _offsets(_joined(self._parts["counts"])),
            _joined(self._parts["inputs"]),
            _joined(self._parts["lo"], numpy.uint64),
            _joined(self._parts["hi"], numpy.uint64),
            _offsets(_joined(self._parts["inputs"])),
            _joined(self._parts["producers"]),
        )
        table = StepTable(
            self._step,
            numbers,
            {name: Words(_joined(self._codes[name]), tuple(self._values[name])) for name in TEXTS},
            parts,
            _joined(self._rng["has"], numpy.bool_),
            _joined(self._rng["lo"], numpy.uint64),
            _joined(self._rng["hi"], numpy.uint64),
            RowDigests(self._starts, self._row_digests),
        )
        order = numbers["seq"]
        steps = order[1:] - order[:-1]
        if (steps > 0).all():
            return table
        rows = numpy.argsort(order, kind="stable")
        if (numpy.diff(order[rows]) == 0).any():
            raise self._wrong("has two events with one number")
        return replace(table.take(rows), rows=RowDigests(self._starts, self._row_digests, rows))

    def _integers(self, column: Any, name: str) -> Any:
        if column.null_count:
            raise self._wrong(f"lacks {name} in a row")
        return column.to_numpy(zero_copy_only=False)

    def _words(self, name: str, column: Any) -> Any:
        """Codes of this batch's rows in the whole step's numbering."""
        dictionary, indices = column.dictionary, column.indices
        codes = self._integers(indices, name)
        before = self._seen.get(name)
        if before is not None and dictionary.equals(before[0]):
            mapping = before[1]
        else:
            mapping = self._mapping(name, dictionary)
            self._seen[name] = (dictionary, mapping)
        self._within(codes, len(dictionary), name)
        return codes if mapping is None else mapping[codes]

    def _mapping(self, name: str, dictionary: Any) -> Any:
        if len(dictionary) > MAX_WORDS:
            raise self._wrong(f"has {len(dictionary):,} different values of {name}, {MAX_WORDS:,} at most")
        try:
            dictionary.validate(full=True)
            texts = dictionary.to_pylist()
        except (ValueError, TypeError, MemoryError) as error:
            raise self._wrong(f"has no text in {name} ({one_line(str(error), 80)})") from None
        if None in texts:
            raise self._wrong(f"lacks {name} in a row")
        known = self._values[name]
        if len(known) + len(texts) > 2 * MAX_WORDS:
            raise self._wrong(f"has more than {MAX_WORDS:,} different values of {name}")
        codes = [known.setdefault(text, len(known)) for text in texts]
        # A dictionary that only grows counts as the step does.
        return None if codes == list(range(len(codes))) else numpy.array(codes, numpy.int32)

    def _add_parts(self, column: Any, inputs: Any, producers: Any) -> None:
        counts, values = self._lists(column, "parts")
        dictionary = values.dictionary
        codes = self._integers(values.indices, "parts")
        self._within(codes, len(dictionary), "parts")
        if dictionary.null_count:
            raise self._wrong("lacks a digest")
        lo, hi = _halves(dictionary)
        n_inputs = self._integers(inputs, "n_inputs")
        producer_counts, producer_values = self._lists(producers, "producers")
        if (n_inputs < 0).any() or (n_inputs > counts).any() or (producer_counts != n_inputs).any():
            raise self._wrong("has an event whose parts, inputs and producers do not fit each other")
        back = self._integers(producer_values, "producers")
        if (back < 0).any():
            raise self._wrong("has an input that was written by a later event")
        self._parts["counts"].append(counts)
        self._parts["inputs"].append(n_inputs)
        self._parts["lo"].append(lo[codes])
        self._parts["hi"].append(hi[codes])
        self._parts["producers"].append(back)

    def _lists(self, column: Any, name: str) -> tuple[Any, Any]:
        """(the length of each row's list, the values of all of them)."""
        if column.null_count:
            raise self._wrong(f"lacks {name} in a row")
        offsets = column.offsets.to_numpy(zero_copy_only=False)
        counts = numpy.diff(offsets)
        values = column.values
        if (counts < 0).any() or (len(offsets) and (offsets[0] < 0 or offsets[-1] > len(values))):
            raise self._wrong(f"has lists of {name} that overlap")
        return counts, values.slice(int(offsets[0]), int(offsets[-1] - offsets[0])) if len(offsets) else values

    def _lists_of_rows(self, column: Any) -> Any:
        if column.null_count < len(column):
            try:
                column.validate(full=True)  # read one by one later, by pyarrow, which does not look again
            except (ValueError, TypeError) as error:
                raise self._wrong(f"has no lists in rows ({one_line(str(error), 80)})") from None
        return column

    def _add_rng(self, column: Any) -> None:
        if column.null_count == len(column):
            self._rng["has"].append(numpy.zeros(len(column), bool))
            for half in ("lo", "hi"):
                self._rng[half].append(numpy.zeros(len(column), numpy.uint64))
            return
        has = column.is_valid().to_numpy(zero_copy_only=False)
        lo, hi = _halves(column)
        self._rng["has"].append(has)
        self._rng["lo"].append(numpy.where(has, lo, 0))
        self._rng["hi"].append(numpy.where(has, hi, 0))

    def _within(self, codes: Any, count: int, name: str) -> None:
        if len(codes) and (codes.min() < 0 or codes.max() >= count):
            raise self._wrong(f"refers to a value of {name} that is not there")

    def _wrong(self, what: str) -> RecordError:
        return RecordError(f"{what} (step {self._step})", where=self._where)


def _halves(column: Any) -> tuple[Any, Any]:
    """A column of 16 bytes as two of 8; rows that are null hold anything."""
    raw = column.buffers()[1]
    width = len(NO_CONTENT)
    if raw is None or not len(column):
        empty = numpy.zeros(len(column), numpy.uint64)
        return empty, empty
    halves = numpy.frombuffer(raw, "<u8", 2 * len(column), column.offset * width)
    return halves[0::2], halves[1::2]


def _joined(arrays: Sequence[Any], dtype: Any = numpy.int32) -> Any:
    if not arrays:
        return numpy.zeros(0, dtype)
    return arrays[0] if len(arrays) == 1 else numpy.concatenate(arrays)


def _offsets(counts: Integers) -> Integers:
    offsets = numpy.zeros(len(counts) + 1, numpy.int64)
    numpy.cumsum(counts, out=offsets[1:])
    return offsets
