"""From rows to files: numbers for the texts of a step, the step's rolling digests, the byte budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import add, attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from detrun.recorder.trace.fingerprints import ALGORITHM, OnDevice
from detrun.recorder.trace.rolling import Rolling
from detrun.recorder.trace.window import TraceSettings
from detrun.records.trace_row import TRACE_FIELDS
from detrun.records.trace_writer import TraceBatch, TraceWriter

if TYPE_CHECKING:
    from detrun.recorder.trace.draft import Draft

_TEXTS = tuple(name for name, kind in TRACE_FIELDS if kind == "text")
_GET = {name: attrgetter(name) for name in _TEXTS}
_GET_SEQ = attrgetter("seq")
_GET_WRITERS = attrgetter("writers")

Value = TypeVar("Value")


class _Table(dict[Value, int]):
    """Numbers values in the order in which they are asked for first. A step has thousands of them: hence no loop."""

    def __missing__(self, value: Value) -> int:
        number = self[value] = len(self)
        return number


class TraceOutput:
    """The files of this rank's trace. Raises OSError and ImportError."""

    def __init__(self, attempt: Path, rank: int, settings: TraceSettings, coordinates: str = "{}") -> None:
        self._budget = settings.byte_budget
        self._writer = TraceWriter(
            attempt,
            rank,
            head={
                "level": settings.level,
                "steps": [settings.first, settings.last],
                "digest": ALGORITHM,
                "scopes": None if settings.scopes is None else list(settings.scopes),
            },
            metadata={"level": str(settings.level), "digest": ALGORITHM, "coordinates": coordinates},
        )
        self.events = 0
        self.exhausted = False
        self._begin_step()

    def write(self, rows: Sequence[Draft]) -> bool:
        """Append rows whose digests are all there. False once the byte budget is used up: then nothing more is
        written."""
        if self.exhausted or not rows:
            return not self.exhausted
        batch, numbers, texts = self._batch(rows)
        index = _FOR_THE_END + _A_SCOPE * len(texts["scope"])
        if not self._writer.write_batch(batch, self._budget - index):
            self.exhausted = True
            return False
        self._rolling.add(
            numbers,
            texts,
            (list(batch.microbatch), list(batch.occurrence), list(batch.n_inputs)),
            list(batch.parts),
            list(batch.part_counts),
            list(batch.digests),
            list(batch.rng),
            _flagged(rows),
        )
        self._written += len(rows)
        self.events += len(rows)
        return True

    def end_step(self, step: int, *, partial: bool = False) -> None:
        """All rows of a step were written; partial: some were not."""
        if partial and not self._written:
            return
        digest, scopes = self._rolling.finish()
        line: dict[str, Any] = {
            "step": step,
            "events": self._written,
            "batches": [self._first_batch, self._writer.batches - 1],
            "digest": digest,
            "scopes": scopes,
        }
        if partial:
            line["partial"] = True
        self._writer.write_line(line)
        self._begin_step()

    def end(self, reason: str | None, coverage: Mapping[str, Any]) -> None:
        self._writer.close()
        self._writer.write_line({"end": True, "complete": reason is None, "reason": reason, "coverage": coverage})

    def _begin_step(self) -> None:
        self._numbers: dict[str, _Table[str]] = {name: _Table() for name in _TEXTS}
        self._digests: _Table[bytes] = _Table()
        self._rolling = Rolling()
        self._written = 0
        self._first_batch = self._writer.batches

    def _batch(self, rows: Sequence[Draft]) -> tuple[TraceBatch, dict[str, list[int]], dict[str, list[str]]]:
        numbers = {name: [*map(self._numbers[name].__getitem__, map(_GET[name], rows))] for name in _TEXTS}
        digests = self._digests
        sides = [side for row in rows for side in (row.inputs, row.outputs)]
        parts = [*map(digests.__getitem__, chain.from_iterable(sides))]
        counts = [*map(len, sides)]
        seqs = [*map(_GET_SEQ, rows)]
        producers = [
            seq - writer if writer >= 0 else 0
            for seq, writers in zip(seqs, map(_GET_WRITERS, rows), strict=True)
            for writer in writers
        ]
        texts = {name: list(table) for name, table in self._numbers.items()}
        batch = TraceBatch(
            seq=seqs,
            step=[row.step for row in rows],
            microbatch=[row.microbatch for row in rows],
            occurrence=[row.occurrence for row in rows],
            numbers=numbers,
            texts=texts,
            parts=parts,
            part_counts=[*map(add, counts[::2], counts[1::2])],
            n_inputs=counts[::2],
            digests=list(digests),
            producers=producers,
            rng=[row.rng for row in rows],
            peer=[row.peer for row in rows],
            rows=[row.rows for row in rows],
        )
        return batch, numbers, texts


def _flagged(rows: Sequence[Draft]) -> list[int]:
    """Places in the list of all parts of these rows that are flagged."""
    found: list[int] = []
    first = 0
    for row in rows:
        if row.flags:
            for flag in row.flags.split(","):
                name = flag.partition(":")[0]
                index = int(name[1:])
                found.append(first + index + (len(row.inputs) if name[0] == "o" else 0))
        first += len(row.inputs) + len(row.outputs)
    return found


_FOR_THE_END = 4096
_A_SCOPE = 100
"""Bytes of the budget that are left for the last lines of the index: for the end, and for each scope of a step."""


def fetch_digests(rows: Sequence[Draft], fetch: Any) -> None:
    """Put the digests in place that were still on a device."""
    waiting = [part for row in rows for side in (row.inputs, row.outputs) for part in side if type(part) is OnDevice]
    if not waiting:
        return
    fetch(waiting)
    for row in rows:
        row.inputs = [part.digest if type(part) is OnDevice else part for part in row.inputs]
        row.outputs = [part.digest if type(part) is OnDevice else part for part in row.outputs]
