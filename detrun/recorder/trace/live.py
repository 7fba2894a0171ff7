"""Holds this run against a trace of the other arm while it runs, to find the first events that differ.

Reads the other arm's files a step at a time, in the training process: with pyarrow, which is there where traces are
written. What it finds decides only which tensors are kept.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from detrun.recorder.trace.fingerprints import ALGORITHM, OnDevice
from detrun.records.trace_row import NO_CONTENT, EventKey

if TYPE_CHECKING:
    from detrun.recorder.trace.fingerprints import Fingerprints
    from detrun.recorder.trace.tracer import Draft


class Other(NamedTuple):
    """What the other arm recorded of an event."""

    signature: str
    scalars: str
    rng: bytes | None
    inputs: tuple[bytes, ...]
    outputs: tuple[bytes, ...]
    flags: str


class UnreadableError(Exception):
    """The other arm's trace cannot be compared with. The text says why."""


def live_against(attempt: str, rank: int) -> Live:
    """Raises UnreadableError."""
    return Live(Path(attempt), rank)


@dataclass
class Live:
    """active: still looking. It ends with the first event whose inputs are the same and whose outputs are not; the
    first event that differs at all is told as well. Raises UnreadableError from the constructor and at a new step."""

    attempt: Path
    rank: int
    active: bool = True
    _step: int | None = None
    _others: dict[EventKey, Other] = field(default_factory=dict)
    _found_any: bool = False
    _stream: Any = None
    _batch: int = 0
    _batches: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        path = self.attempt / "trace" / f"rank{self.rank:05d}.jsonl"
        try:
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            self._batches = {line["step"]: (line["batches"][0], line["batches"][1]) for line in lines if "step" in line}
            digest = lines[0]["digest"]
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise UnreadableError(f"{path}: {type(error).__name__}: {error}") from error
        if digest != ALGORITHM:
            raise UnreadableError(f"{path} holds digests of the kind {digest}, this run takes {ALGORITHM}")

    def differs(self, draft: Draft, fingerprints: Fingerprints) -> bool:
        """Whether this event, which has just ended, is one of the first that differ, so that it is to be kept."""
        if draft.step != self._step:
            self._step = draft.step
            self._read(draft.step)
        other = self._others.get(draft.key)
        if other is None:
            return False
        waiting = [part for part in draft.parts if type(part) is OnDevice]
        if waiting:
            fingerprints.fetch(waiting)
        flagged = _flagged(other.flags) | set(_flags_of(draft))
        same_inputs = (
            _equal("i", _digests(draft.inputs), other.inputs, flagged)
            and draft.scalars == other.scalars
            and draft.rng == other.rng
        )
        if same_inputs and _equal("o", _digests(draft.outputs), other.outputs, flagged):
            return False
        first = not self._found_any
        self._found_any = True
        if same_inputs:
            self.active = False
            return True
        return first

    def _read(self, step: int) -> None:
        self._others = {}
        wanted = self._batches.get(step)
        if wanted is None:
            raise UnreadableError(f"{self.attempt} has no trace of step {step} of rank {self.rank}")
        if self._stream is None:
            import pyarrow

            path = self.attempt / "trace" / f"rank{self.rank:05d}.arrow"
            try:
                self._stream = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path)))
            except (OSError, ValueError) as error:
                raise UnreadableError(f"{path}: {error}") from error
        while self._batch <= wanted[1]:
            try:
                batch = self._stream.read_next_batch()
            except (OSError, ValueError, StopIteration) as error:
                raise UnreadableError(f"{self.attempt}: the trace of rank {self.rank} is cut: {error}") from error
            self._batch += 1
            if self._batch > wanted[0]:
                self._take(batch)

    def _take(self, batch: Any) -> None:
        columns = {name: batch.column(name).to_pylist() for name in _COLUMNS}
        for at in range(batch.num_rows):
            key = EventKey(*(columns[name][at] for name in EventKey._fields))
            inputs = columns["n_inputs"][at]
            parts = columns["parts"][at]
            self._others[key] = Other(
                columns["signature"][at] or "",
                columns["scalars"][at] or "",
                columns["rng"][at],
                tuple(parts[:inputs]),
                tuple(parts[inputs:]),
                columns["flags"][at] or "",
            )


_COLUMNS = (*EventKey._fields, "signature", "scalars", "parts", "n_inputs", "flags", "rng")


def _digests(parts: list[Any]) -> tuple[bytes, ...]:
    return tuple(part.digest if type(part) is OnDevice else part for part in parts)


def _equal(side: str, mine: tuple[bytes, ...], other: tuple[bytes, ...], flagged: set[str]) -> bool:
    if len(mine) != len(other):
        return False
    return all(
        a == b or f"{side}{at}" in flagged or NO_CONTENT in (a, b)
        for at, (a, b) in enumerate(zip(mine, other, strict=True))
    )


def _flagged(flags: str) -> set[str]:
    return {word.partition(":")[0] for word in flags.split(",") if word}


def _flags_of(draft: Draft) -> set[str]:
    return _flagged(",".join(draft.marks))
