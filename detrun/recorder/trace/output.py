"""From rows to files: numbers for the texts of a step, the step's rolling digests, the byte budget."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from detrun.recorder.trace.fingerprints import ALGORITHM, OnDevice
from detrun.recorder.trace.rolling import Rolling
from detrun.recorder.trace.rows import INPUTS, OCCURRENCE, SCALARS, SIGNATURE, SIZE, Rows
from detrun.recorder.trace.window import TraceSettings
from detrun.records.trace_row import TRACE_FIELDS
from detrun.records.trace_writer import TraceBatch, TraceWriter

if TYPE_CHECKING:
    from detrun.recorder.trace.heads import Head

_OF_HEADS = ("phase", "scope", "op", "kind")
_RARE = ("flags", "site", "group")
_LONG = 4
"""The level from which on a step's trace is long, and its size counts more than the time to begin a compression."""
_TEXTS = tuple(name for name, kind in TRACE_FIELDS if kind == "text")

Value = TypeVar("Value")
Numbers = npt.NDArray[np.int32]


class _Table(defaultdict[Value, int]):
    """Numbers values in the order in which they are asked for first. A step has thousands of them: hence no loop."""

    def __init__(self) -> None:
        super().__init__(count().__next__)

    def numbers(self, values: Iterable[Value]) -> Numbers:
        return np.array([*map(self.__getitem__, values)], np.int32)


class TraceOutput:
    """The files of this rank's trace. coordinates: gives the rank's place among the others, asked for when the first
    rows are written, since the program may open the window before it has made its groups. Raises OSError and
    ImportError."""

    def __init__(
        self, attempt: Path, rank: int, settings: TraceSettings, coordinates: Callable[[], Mapping[str, Any]] = dict
    ) -> None:
        self._coordinates = coordinates
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
            metadata={"level": str(settings.level), "digest": ALGORITHM, "coordinates": "{}"},
            compression="zstd" if settings.level >= _LONG else "lz4",
        )
        self.events = 0
        self.exhausted = False
        self._begin_step()

    def write(self, rows: Rows) -> bool:
        """Append rows whose digests are all there. False once the byte budget is used up: then nothing more is
        written."""
        if self.exhausted or not rows:
            return not self.exhausted
        if not self.events:
            self._writer.metadata["coordinates"] = json.dumps(self._coordinates())
        batch, places = self._batch(rows)
        index = _FOR_THE_END + _A_SCOPE * len(batch.texts["scope"])
        if not self._writer.write_batch(batch, self._budget - index):
            self.exhausted = True
            return False
        self._rolling.add(batch, places)
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
        self._heads: _Table[Head] = _Table()
        self._of_heads = {name: np.zeros(0, np.int32) for name in (*_OF_HEADS, "microbatch")}
        self._digests: _Table[bytes] = _Table()
        self._rolling = Rolling()
        self._written = 0
        self._first_batch = self._writer.batches

    def _batch(self, rows: Rows) -> tuple[TraceBatch, list[int]]:
        """The rows, and the places in `parts` that are flagged."""
        length = len(rows)
        heads = self._heads.numbers(rows.heads)
        self._learn_heads()
        columns = {name: values[heads] for name, values in self._of_heads.items()}
        numbers = {name: columns[name] for name in _OF_HEADS}
        numbers["signature"] = self._numbers["signature"].numbers(rows.column(SIGNATURE))
        numbers["scalars"] = self._numbers["scalars"].numbers(rows.column(SCALARS))
        flags, flagged = rows.flags()
        rare = {"flags": flags, "site": dict(rows.having("site", "")), "group": dict(rows.having("group", ""))}
        for name in _RARE:
            table = self._numbers[name]
            numbers[name] = np.full(length, table[""], np.int32)
            for at, text in rare[name].items():
                numbers[name][at] = table[text]
        n_inputs = np.array(rows.column(INPUTS), np.int32)
        seqs = np.arange(rows.first, rows.first + length)
        writers = np.array(rows.writers, np.int64)
        steps, peers = np.full(length, rows.step, np.int32), np.full(length, -1, np.int32)
        for at, step in rows.having("step", rows.step):
            steps[at] = step
        for at, peer in rows.having("peer", -1):
            peers[at] = peer
        batch = TraceBatch(
            seq=seqs,
            step=steps,
            microbatch=columns["microbatch"],
            occurrence=np.array(rows.column(OCCURRENCE), np.int32),
            numbers=numbers,
            texts={name: list(self._numbers[name]) for name in _TEXTS},
            parts=self._digests.numbers(rows.parts),
            part_counts=np.array(rows.column(SIZE), np.int32),
            n_inputs=n_inputs,
            digests=list(self._digests),
            producers=np.where(writers >= 0, np.repeat(seqs, n_inputs) - writers, 0).astype(np.int32),
            rng=_sparse(rows, "rng"),
            peer=peers,
            rows=_sparse(rows, "rows"),
        )
        return batch, flagged

    def _learn_heads(self) -> None:
        """Number the texts of the heads that are new."""
        known = len(self._of_heads["op"])
        new = list(self._heads)[known:]
        for name in _OF_HEADS:
            added = self._numbers[name].numbers(map(attrgetter(name), new))
            self._of_heads[name] = np.concatenate((self._of_heads[name], added))
        values = np.array([head.microbatch for head in new], np.int32)
        self._of_heads["microbatch"] = np.concatenate((self._of_heads["microbatch"], values))


def _sparse(rows: Rows, name: str) -> list[Any]:
    """A column that most events have no value of; empty where none has."""
    values = dict(rows.having(name, None))
    column: list[Any] = [None] * len(rows) if values else []
    for at, value in values.items():
        column[at] = value
    return column


_FOR_THE_END = 4096
_A_SCOPE = 100
"""Bytes of the budget that are left for the last lines of the index: for the end, and for each scope of a step."""


def fetch_digests(parts: list[Any], fetch: Callable[[Iterable[OnDevice]], None]) -> None:
    """Put the digests in place that were still on a device."""
    if OnDevice not in set(map(type, parts)):
        return
    waiting = {at: part for at, part in enumerate(parts) if type(part) is OnDevice}
    fetch(waiting.values())
    for at, part in waiting.items():
        parts[at] = part.digest
