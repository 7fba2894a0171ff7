"""Reads one rank's trace, written by a process that may have been killed, on whatever disk.

The index tells which steps there are and what their digests are; events are read a step at a time, so that memory does
not grow with the length of a trace.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow

from detrun.errors import RecordError
from detrun.records.arrow_messages import StreamIndex
from detrun.records.files import one_line, open_plain, parse_object, read_plain
from detrun.records.layout import AttemptFolder, rank_name
from detrun.records.trace_row import METADATA, SCHEMA_VERSION, TRACE_KIND, TraceEvent
from detrun.records.trace_table import MAX_STEP_BYTES, StepTable, read_table
from detrun.records.trace_writer import trace_schema

MAX_INDEX_BYTES = 256 << 20
MAX_EVENTS = 1 << 40

_hexadecimal = re.compile(r"[0-9a-f]{16,64}").fullmatch


@dataclass(frozen=True)
class StepIndex:
    """What the index says of a step. batches: numbers of its first and last batch, None if it has no event. digest,
    scopes: rolling digests of all its events and of those of each scope, None and empty where the step was not
    finished. finished: the tracer came to the end of the step."""

    step: int
    events: int
    batches: tuple[int, int] | None
    digest: str | None = None
    scopes: Mapping[str, str] = field(default_factory=dict)
    finished: bool = True


@dataclass(frozen=True)
class EndLine:
    """The last line of an index: the tracer closed its files. complete: it recorded all of its window; reason: why it
    did not. coverage: what it says about what it did not see."""

    complete: bool
    reason: str | None
    coverage: Mapping[str, Any]


class TraceFile:
    """One rank's trace, open for reading; a context manager.

    level, steps_asked: of the request. digest: the algorithm's name. scopes: the patterns that scopes were held
    against, None for all. torn: what is wrong with how the files end, None if nothing is. index: steps in order; those
    that were not finished come last.
    """

    def __init__(self, attempt: AttemptFolder | Path, rank: int) -> None:
        """Raises RecordError where the files are missing, of another schema, or no trace."""
        folder = (attempt.path if isinstance(attempt, AttemptFolder) else attempt) / "trace"
        self.rank = rank
        self.path = folder / rank_name(rank, "arrow")
        self.index_path = folder / rank_name(rank, "jsonl")
        self.torn: str | None = None
        self.end: EndLine | None = None
        self.index: list[StepIndex] = []
        self._head: dict[str, Any] = {}
        self._read_index()
        self._descriptor = -1
        self._stream: StreamIndex | None = None
        self._metadata: dict[str, str] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        self.level = _whole(self._head.get("level", self._metadata.get("level")), 1, 9) or 0
        self.digest = str(self._head.get("digest") or self._metadata.get("digest") or "")
        asked = self._head.get("steps")
        self.steps_asked: tuple[int, int] | None = None
        if isinstance(asked, list) and len(asked) == 2 and all(type(step) is int for step in asked):
            self.steps_asked = (asked[0], asked[1])
        scopes = self._head.get("scopes")
        self.scopes = tuple(str(scope) for scope in scopes) if isinstance(scopes, list) else None

    @property
    def size(self) -> int:
        """Bytes of the events' file."""
        return os.fstat(self._descriptor).st_size if self._descriptor >= 0 else 0

    @property
    def coordinates(self) -> dict[str, Any]:
        """The rank's place in the program's parallel groups, as the program told it."""
        with suppress(RecordError):
            return parse_object(self._metadata.get("coordinates", "{}").encode(), str(self.path))
        return {}

    def step(self, step: int) -> StepIndex | None:
        """What the index says of a step, None if it has none of it."""
        return next((entry for entry in self.index if entry.step == step), None)

    def table(self, step: int) -> StepTable:
        """The events of a step. Raises RecordError where there are none or they cannot be trusted."""
        entry = self.step(step)
        if entry is None:
            raise RecordError(f"has no step {step}", where=str(self.path))
        batches = iter(())
        if entry.batches is not None:
            stream = self._events()
            batches = stream.read(stream.needed(*entry.batches), MAX_STEP_BYTES)
        table = read_table(step, batches, str(self.path))
        if len(table) != entry.events:
            raise RecordError(
                f"holds {len(table):,} events of step {step}, its index says {entry.events:,}", where=str(self.path)
            )
        return table

    def events(self, step: int) -> Iterator[TraceEvent]:
        """The events of a step, in execution order."""
        return self.table(step).events()

    def raw(self, step: int) -> list[bytes] | None:
        """All bytes that the events of a step are made of; None where there is no such step."""
        entry = self.step(step)
        if entry is None or entry.batches is None:
            return None
        stream = self._events()
        return [stream.raw(message) for message in stream.needed(*entry.batches)]

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _events(self) -> StreamIndex:
        if self._stream is None:
            raise RecordError("is empty", where=str(self.path))
        return self._stream

    def _open(self) -> None:
        """Opens the events' file; nothing but its schema and its end is read if the index tells the rest."""
        where = str(self.path)
        self._descriptor = open_plain(self.path)
        if self.size == 0:
            if any(entry.batches for entry in self.index):
                raise RecordError("is empty", where=where)
            # pyarrow is imported, and the schema written, with the first batch.
            if self.end is None:
                self.torn = self.torn or "has no events"
            return
        self._stream = StreamIndex(self._descriptor, where)
        schema = self._stream.schema()
        self._check(schema, where)
        if self.end is not None and self.end.complete:
            if not self._stream.has_end_mark:
                self.torn = self.torn or "is cut off"
            return
        self._find_unfinished()
        self.torn = self.torn or self._stream.torn if self.end is None else self.torn

    def _check(self, schema: Any, where: str) -> None:
        found = schema.metadata or {}
        self._metadata = {
            key.decode("utf-8", "replace").removeprefix(METADATA): value.decode("utf-8", "replace")
            for key, value in found.items()
        }
        if self._metadata.get("kind") != TRACE_KIND:
            raise RecordError("is no trace", where=where)
        _check_version(self._metadata.get("schema_version"), where)
        if self._metadata.get("rank") != str(self.rank):
            rank = one_line(str(self._metadata.get("rank")), 20)
            raise RecordError(f"is the trace of rank {rank}", where=where)
        if not schema.equals(_columns(), check_metadata=False):
            raise RecordError("has other columns than a trace", where=where)

    def _find_unfinished(self) -> None:
        """Steps whose events were written, at least some of them, and whose line in the index was not."""
        stream = self._events()
        known = [entry.batches[1] for entry in self.index if entry.batches is not None]
        steps = {entry.step for entry in self.index}
        spans: dict[int, list[int]] = {}
        for number in range(max(known, default=-1) + 1, stream.count()):
            for batch in stream.read(stream.needed(number, number), MAX_STEP_BYTES):
                if not batch.num_rows:
                    continue
                step = batch.column("step")[0].as_py()
                if type(step) is not int or step in steps:
                    raise RecordError(f"has events of step {step} where no step is told of", where=str(self.path))
                span = spans.setdefault(step, [number, number, 0])
                span[1] = number
                span[2] += batch.num_rows
        for step, (first, last, events) in spans.items():
            self.index.append(StepIndex(step, events, (first, last), finished=False))

    def _read_index(self) -> None:
        where = str(self.index_path)
        lines = read_plain(self.index_path, MAX_INDEX_BYTES).split(b"\n")
        if lines[-1]:
            self.torn = "its index ends within a line"
        lines.pop()
        if not lines:
            raise RecordError("is empty" if self.torn is None else "ends within its first line", where=where)
        head = parse_object(lines[0], f"{where}, line 1")
        _check_version(head.get("v"), where)
        if head.get("rank") != self.rank or type(head.get("rank")) is not int:
            raise RecordError(f"is the index of rank {one_line(str(head.get('rank')), 20)}", where=where)
        self._head = head
        for number, line in enumerate(lines[1:], 2):
            if self.end is not None:
                raise RecordError("goes on after its end", where=f"{where}, line {number}")
            try:
                parsed = _parsed(line)
            except RecordError as error:
                raise RecordError(error.what, where=f"{where}, line {number}") from None
            self._read_line(parsed, f"{where}, line {number}")
        if self.end is None and self.torn is None:
            self.torn = "its index has no end line"

    def _read_line(self, line: dict[str, Any], where: str) -> None:
        if line.get("end") is True:
            reason, coverage = line.get("reason"), line.get("coverage")
            self.end = EndLine(
                line.get("complete") is True,
                None if reason is None else str(reason),
                coverage if isinstance(coverage, dict) else {},
            )
            return
        step = _whole(line.get("step"), 0, 1 << 31)
        events = _whole(line.get("events"), 0, MAX_EVENTS)
        if step is None or events is None:
            raise RecordError("tells of no step or of no number of events", where=where)
        batches = line.get("batches")
        span: tuple[int, int] | None = None
        if isinstance(batches, list) and len(batches) == 2:
            first, last = (_whole(number, -1, MAX_EVENTS) for number in batches)
            if first is not None and last is not None and 0 <= first <= last:
                span = (first, last)
        if (span is None) != (events == 0) or (self.index and not _follows(self.index, step, span)):
            raise RecordError(f"has batches for step {step} that cannot be", where=where)
        digest, scopes = line.get("digest"), line.get("scopes")
        self.index.append(
            StepIndex(
                step,
                events,
                span,
                digest if isinstance(digest, str) and _hexadecimal(digest) else None,
                scopes if isinstance(scopes, dict) else {},
                line.get("partial") is not True,
            )
        )


def open_trace(attempt: AttemptFolder | Path, rank: int) -> TraceFile:
    """Opens the trace of a rank in the folder of an attempt; RecordError where it cannot be read as one."""
    return TraceFile(attempt, rank)


def _follows(index: list[StepIndex], step: int, span: tuple[int, int] | None) -> bool:
    if step <= index[-1].step:
        return False
    before = next((entry.batches for entry in reversed(index) if entry.batches is not None), None)
    return span is None or before is None or span[0] > before[1]


@functools.lru_cache(maxsize=512)
def _parsed(line: bytes) -> dict[str, Any]:
    """A line of an index. Two arms that are compared mostly have the same lines; nobody changes what is returned."""
    return parse_object(line, "")


@functools.cache
def _columns() -> Any:
    """The schema of a trace, whichever rank's."""
    return trace_schema(pyarrow, 0, {})


def _check_version(version: Any, where: str) -> None:
    if str(version) != str(SCHEMA_VERSION):
        raise RecordError(
            f"has schema version {one_line(str(version), 20)}, this detrun reads {SCHEMA_VERSION}",
            where=where,
            hint="a detrun of the version that wrote it reads it",
        )


def _whole(value: Any, least: int, most: int) -> int | None:
    """A whole number within bounds, also from its text; else None."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,15}", value):
        value = int(value)
    return value if type(value) is int and least <= value <= most else None
