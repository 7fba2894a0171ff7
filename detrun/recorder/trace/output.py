"""From rows to files: numbers for the texts of a step, the step's rolling digests, the byte budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from detrun.recorder.trace.fingerprints import ALGORITHM, OnDevice, digest_of_bytes
from detrun.recorder.trace.rolling import Rolling
from detrun.recorder.trace.window import TraceSettings
from detrun.records.trace_row import NO_CONTENT, TRACE_FIELDS
from detrun.records.trace_writer import TraceBatch, TraceWriter

if TYPE_CHECKING:
    from detrun.recorder.trace.tracer import Draft

_TEXTS = tuple(name for name, kind in TRACE_FIELDS if kind == "text")


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
        batch = self._batch(rows)
        if not self._writer.write_batch(batch, self._budget - _FOR_THE_INDEX):
            self.exhausted = True
            return False
        self._rolling.add(rows)
        self._written += len(rows)
        self.events += len(rows)
        return True

    def end_step(self, step: int, *, partial: bool = False) -> None:
        """All rows of a step were written; partial: some were not."""
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
        self._numbers: dict[str, dict[str, int]] = {name: {} for name in _TEXTS}
        self._digests: dict[bytes, int] = {}
        self._rolling = Rolling()
        self._written = 0
        self._first_batch = self._writer.batches

    def _batch(self, rows: Sequence[Draft]) -> TraceBatch:
        numbers: dict[str, list[int]] = {}
        for name in _TEXTS:
            table = self._numbers[name]
            column = numbers[name] = []
            for row in rows:
                text = getattr(row, name)
                number = table.get(text)
                if number is None:
                    number = table[text] = len(table)
                column.append(number)
        digests = self._digests
        parts: list[int] = []
        producers: list[int] = []
        for row in rows:
            for side in (row.inputs, row.outputs):
                for digest in side:
                    number = digests.get(digest)
                    if number is None:
                        number = digests[digest] = len(digests)
                    parts.append(number)
            producers += row.producers
        return TraceBatch(
            seq=[row.seq for row in rows],
            step=[row.step for row in rows],
            microbatch=[row.microbatch for row in rows],
            occurrence=[row.occurrence for row in rows],
            numbers=numbers,
            texts={name: list(self._numbers[name]) for name in _TEXTS},
            parts=parts,
            part_counts=[len(row.inputs) + len(row.outputs) for row in rows],
            n_inputs=[len(row.inputs) for row in rows],
            digests=list(digests),
            producers=producers,
            rng=[row.rng for row in rows],
            peer=[row.peer for row in rows],
            rows=[row.rows for row in rows],
        )


_FOR_THE_INDEX = 4096
"""Bytes of the budget that are left for the end line."""


def fetch_digests(rows: Sequence[Draft], fetch: Any) -> None:
    """Put the digests in place that were still on a device."""
    waiting = [part for row in rows for side in (row.inputs, row.outputs) for part in side if type(part) is OnDevice]
    if not waiting:
        return
    fetch(waiting)
    for row in rows:
        row.inputs = [part.digest if type(part) is OnDevice else part for part in row.inputs]
        row.outputs = [part.digest if type(part) is OnDevice else part for part in row.outputs]


__all__ = ["NO_CONTENT", "TraceOutput", "digest_of_bytes", "fetch_digests"]
