"""Makes traces of programs that were never run: each event's outputs follow from its inputs, and a fault can be planted
in any event. What is written goes through the recorder's own writer."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from detrun.records.layout import AttemptFolder
from detrun.records.trace_row import TRACE_FIELDS, TraceEvent
from detrun.records.trace_writer import TraceBatch, TraceWriter

TEXTS = tuple(name for name, kind in TRACE_FIELDS if kind == "text")
ALGORITHM = "xxh3-128"


def digest(text: str) -> bytes:
    """16 bytes that stand for a content."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


@dataclass
class Value:
    """A tensor: what it holds, and the number of the event that wrote it."""

    content: str
    writer: int | None = None
    shape: str = "float32[4]"


@dataclass
class Arm:
    """One rank's run. plant: called with each event that is about to be recorded; what it returns goes into the
    outputs' content, so that a text makes an origin of that event."""

    rank: int = 0
    level: int = 4
    plant: Callable[[TraceEvent], str] = lambda event: ""
    events: list[TraceEvent] = field(default_factory=list)
    step: int = 1
    microbatch: int = 0

    def __post_init__(self) -> None:
        self._occurrences: Counter[tuple[object, ...]] = Counter()

    def op(
        self,
        op: str,
        inputs: Sequence[Value] = (),
        outputs: int = 1,
        *,
        scope: str = "",
        phase: str = "forward",
        kind: str = "op",
        scalars: str = "",
        rng: str | None = None,
        flags: str = "",
        group: str = "",
        peer: int = -1,
        into: Sequence[Value] = (),
        content: Sequence[str] | None = None,
        occurrence: int | None = None,
    ) -> list[Value]:
        """Records an event. into: values that it writes; otherwise it makes `outputs` new ones. content: of its
        outputs, instead of one that follows from the inputs."""
        seq = len(self.events)
        place = (self.step, self.microbatch, phase, scope, op)
        number = self._occurrences[place] if occurrence is None else occurrence
        self._occurrences[place] += 1
        made = list(into) or [Value("", shape="float32[4]") for _ in range(outputs)]
        shapes = [" ".join(value.shape for value in side) for side in (inputs, made)]
        event = TraceEvent(
            seq=seq,
            step=self.step,
            microbatch=self.microbatch,
            phase=phase,
            scope=scope,
            op=op,
            kind=kind,
            occurrence=number,
            signature=f"{shapes[0]} -> {shapes[1]}",
            scalars=scalars,
            inputs=tuple(digest(value.content) for value in inputs),
            producers=tuple(0 if value.writer is None else seq - value.writer for value in inputs),
            flags=flags,
            rng=None if rng is None else digest(rng),
            group=group,
            peer=peer,
        )
        given = "|".join([op, scalars, rng or "", *(value.content for value in inputs)])
        fault = self.plant(event)
        for at, value in enumerate(made):
            told = content[at] if content is not None else f"{hashlib.md5(given.encode()).hexdigest()}.{at}"
            value.content = f"{told}{fault}"
            value.writer = seq
        self.events.append(replace(event, outputs=tuple(digest(value.content) for value in made)))
        return made

    def write(self, attempt: AttemptFolder | Path, **settings: Any) -> None:
        """Writes the trace; see `write_trace`."""
        write_trace(attempt, self.rank, self.events, level=self.level, **settings)


def write_trace(
    attempt: AttemptFolder | Path,
    rank: int,
    events: Iterable[TraceEvent],
    *,
    level: int = 4,
    steps: tuple[int, int] | None = None,
    batch: int = 64,
    complete: bool = True,
    reason: str | None = None,
    end: bool = True,
    digests: bool = True,
    algorithm: str = ALGORITHM,
    scopes: Sequence[str] | None = None,
    unfinished: bool = False,
    coordinates: str = "{}",
    coverage: dict[str, Any] | None = None,
) -> None:
    """Writes events as the recorder would. end: whether it closed its files; unfinished: the last step has no line in
    the index; digests: whether the index tells rolling digests."""
    by_step: dict[int, list[TraceEvent]] = {}
    for event in events:
        by_step.setdefault(event.step, []).append(event)
    window = steps or ((min(by_step), max(by_step)) if by_step else (1, 1))
    path = attempt.path if isinstance(attempt, AttemptFolder) else attempt
    writer = TraceWriter(
        path,
        rank,
        head={
            "level": level,
            "steps": list(window),
            "digest": algorithm,
            "scopes": None if scopes is None else list(scopes),
        },
        metadata={"level": str(level), "digest": algorithm, "coordinates": coordinates},
    )
    total = 0
    for step, rows in by_step.items():
        first = writer.batches
        tables: dict[str, dict[Any, int]] = {name: {} for name in (*TEXTS, "digests")}
        for at in range(0, len(rows), batch):
            writer.write_batch(make_batch(rows[at : at + batch], tables))
        whole, of_scopes = rolling_digests(rows)
        total += len(rows)
        if unfinished and step == max(by_step):
            break
        line: dict[str, Any] = {"step": step, "events": len(rows), "batches": [first, writer.batches - 1]}
        writer.write_line({**line, "digest": whole, "scopes": of_scopes} if digests else line)
    if end:
        writer.close()
        told = {"events": total, "opaque": {}, "not_captured": [], "flagged": 0, "skipped_views": 0, **(coverage or {})}
        writer.write_line({"end": True, "complete": complete, "reason": reason, "coverage": told})


def rolling_digests(rows: Iterable[TraceEvent]) -> tuple[str, dict[str, str]]:
    """Of a step and of each scope: equal if all that is compared is, in whatever order the events come."""
    sums: dict[str, int] = {}
    for row in rows:
        flagged = set(re.findall(r"[io][0-9]+", row.flags))
        parts = [
            part.hex()
            for side, each in (("i", row.inputs), ("o", row.outputs))
            for number, part in enumerate(each)
            if f"{side}{number}" not in flagged
        ]
        text = repr((row.key, row.signature, row.scalars, row.flags, row.group, row.peer, row.rng, parts))
        sums[row.scope] = (sums.get(row.scope, 0) + int.from_bytes(digest(text), "little")) % (1 << 128)
    whole = digest(repr(sorted(sums.items()))).hex()
    return whole, {scope: f"{value:032x}"[:16] for scope, value in sums.items()}


def make_batch(rows: Sequence[TraceEvent], tables: dict[str, dict[Any, int]]) -> TraceBatch:
    """Rows as the tracer hands them to its writer. tables: of the whole step, filled on the way."""
    numbers = {name: [tables[name].setdefault(getattr(row, name), len(tables[name])) for row in rows] for name in TEXTS}
    digests = tables["digests"]
    return TraceBatch(
        seq=[row.seq for row in rows],
        step=[row.step for row in rows],
        microbatch=[row.microbatch for row in rows],
        occurrence=[row.occurrence for row in rows],
        numbers=numbers,
        texts={name: list(tables[name]) for name in TEXTS},
        parts=[digests.setdefault(part, len(digests)) for row in rows for part in (*row.inputs, *row.outputs)],
        part_counts=[len(row.inputs) + len(row.outputs) for row in rows],
        n_inputs=[len(row.inputs) for row in rows],
        digests=list(digests),
        producers=[back for row in rows for back in row.producers],
        rng=[row.rng for row in rows],
        peer=[row.peer for row in rows],
        rows=[row.rows for row in rows],
    )


def attempt_in(folder: Path, arm: str) -> AttemptFolder:
    """The folder of an arm's first attempt."""
    return AttemptFolder(folder / arm / "attempt-0", arm, 0)
