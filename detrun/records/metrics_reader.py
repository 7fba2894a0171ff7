"""Reads one rank's metrics file: a JSON line a step, written by a process that may have been killed.

Nothing is guessed and nothing skipped in silence: a line that cannot be taken as it is becomes a `Problem`
with its number, and reading goes on behind it, so that what is whole can still be compared.

A step's main line closes the step; supplements carry only `v`, `step` and `metrics` and add to it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic_core import from_json

from detrun.errors import RecordError
from detrun.records.files import open_plain, read_plain
from detrun.records.metrics_line import Contents, LineReader, Metric, StepRecord, UnusableLine, shown_name
from detrun.records.metrics_writer import PRECEDENCE

MAX_FILE_BYTES = 1 << 30
MAX_PROBLEMS = 20
"""After so many a file is not worth listing further."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in a file that keeps it from being taken as it is."""

    kind: str
    what: str
    line: int | None = None
    step: int | None = None


@dataclass(slots=True)
class RankMetrics:
    """One rank's file: its records by step and by line as far as they could be read, and what was wrong."""

    steps: dict[int, StepRecord] = field(default_factory=dict)
    lines: dict[bytes, StepRecord] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    raw: bytes = b""

    def note(self, problem: Problem) -> None:
        """Keeps a problem; beyond MAX_PROBLEMS only that there are more."""
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)
        elif len(self.problems) == MAX_PROBLEMS:
            self.problems.append(Problem("invalid", "further lines cannot be taken either", problem.line))


def read_rank_metrics(path: Path, known: RankMetrics | None = None, reader: LineReader | None = None) -> RankMetrics:
    """Reads a rank's metrics file; one that cannot be read at all is a problem of kind `missing` or `file`.

    known: another arm's file of the same rank. A line that is found there is not parsed again and its record
    is the same object, which tells a comparison at once that nothing in it differs; of a file with the same
    bytes, `known` itself is returned. reader: remembers what lines look like; share it between files.
    """
    try:
        raw = read_plain(path, MAX_FILE_BYTES)
    except RecordError as error:
        missing = error.what == "is missing"
        return RankMetrics(problems=[Problem("missing" if missing else "file", f"the metrics file {error.what}")])
    return parse_rank_metrics(raw, known, reader)


def parse_rank_metrics(raw: bytes, known: RankMetrics | None = None, reader: LineReader | None = None) -> RankMetrics:
    """The same for bytes at hand."""
    if known is not None and raw and raw == known.raw:
        return known
    result = RankMetrics(raw=raw)
    if not raw:
        result.note(Problem("empty", "the metrics file is empty"))
        return result
    lines = raw.split(b"\n")
    tail = lines.pop()
    parsed: Mapping[bytes, StepRecord] = known.lines if known else {}
    parse = (reader or LineReader()).parse
    last = 0
    for number, line in enumerate(lines, 1):
        repeated = result.lines.get(line)
        if repeated is not None:
            # A program may record the same number twice; that a step was taken twice is no such thing.
            if not repeated.supplement:
                what = f"line {number} repeats step {repeated.step}"
                result.note(Problem("duplicate", what, number, repeated.step))
            continue
        record = parsed.get(line)
        if record is None:
            try:
                record = parse(line)
            except UnusableLine as error:
                result.note(Problem(error.kind, f"line {number} {error}", number, error.step))
                continue
        result.lines[line] = record
        step = record.step
        earlier = result.steps.get(step)
        if earlier is None:
            if step < last:
                what = f"line {number} holds step {step} after step {last}"
                result.note(Problem("order", what, number, step))
            else:
                last = step
            result.steps[step] = record
        elif record.supplement:
            result.steps[step] = _merge(result, earlier, record, number)
        elif earlier.supplement:
            result.steps[step] = _merge(result, record, earlier, number)
        else:
            what = f"line {number} is a second record of step {step}"
            result.note(Problem("duplicate", what, number, step))
    spoken_of = [step for step, record in result.steps.items() if record.supplement]
    if len(spoken_of) < len(result.steps):  # of a program that records its metrics alone, all lines look so
        for step in spoken_of:
            what = f"step {step} was not finished: only what the program recorded for it is there"
            result.note(Problem("short", what, None, step))
    if tail:
        number = len(lines) + 1
        result.note(Problem("torn", f"line {number} is cut off", number))
    return result


def _merge(result: RankMetrics, main: StepRecord, more: StepRecord, number: int) -> StepRecord:
    """The main record with a supplement's metrics; of two sources of a name the better keeps it."""
    metrics = dict(main.contents.metrics)
    for name, metric in more.contents.metrics.items():
        before = metrics.get(name)
        if before is None:
            metrics[name] = metric
        elif before.get("source") == metric.get("source"):
            if (before["bits"], before["dtype"]) != (metric["bits"], metric["dtype"]):
                what = f"line {number} gives {shown_name(name)} a second time, with other bits"
                result.note(Problem("conflict", what, number, main.step))
        else:
            better, other = (metric, before) if _rank_of(metric) < _rank_of(before) else (before, metric)
            metrics[name] = better
            metrics[f"{name} ({other.get('source')})"] = other
    old = main.contents
    contents = Contents(metrics, old.batch, old.state, old.rng, old.other)
    return StepRecord(
        main.step, main.microbatches, main.skipped, contents=contents, first_microbatch=main.first_microbatch
    )


def _rank_of(metric: Metric) -> int:
    source = metric.get("source")
    return PRECEDENCE.index(source) if source in PRECEDENCE else len(PRECEDENCE)


@dataclass(frozen=True, slots=True)
class TailLine:
    """A complete line as it stands in the file, with its step number if it has a readable one."""

    step: int | None
    raw: bytes


@dataclass(frozen=True, slots=True)
class Tail:
    """The complete lines since a byte position, and the position to go on from."""

    lines: tuple[TailLine, ...]
    position: int

    @property
    def last_step(self) -> int | None:
        """The highest step among the lines."""
        return max((line.step for line in self.lines if line.step is not None), default=None)


def tail_steps(path: Path, position: int = 0, limit: int = 16 << 20) -> Tail:
    """The complete lines of a metrics file behind byte `position`, at most `limit` bytes of them.

    For showing progress only: a file that is not there yet or cannot be read has no lines, and a last line
    without its newline waits for the next call.
    """
    try:
        raw = _some_bytes(path, position, limit)
    except (RecordError, OSError):
        return Tail((), position)
    end = raw.rfind(b"\n") + 1
    lines = tuple(TailLine(_step_of(line), line) for line in raw[:end].split(b"\n")[:-1])
    if not end and len(raw) == limit:  # a line longer than we are willing to hold: pass over it
        end = limit
    return Tail(lines, position + end)


def _some_bytes(path: Path, position: int, limit: int) -> bytes:
    with os.fdopen(open_plain(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(position)
        return file.read(max(0, min(limit, size - position)))


def _step_of(line: bytes) -> int | None:
    try:
        step = from_json(line)["step"]
    except (ValueError, TypeError, KeyError):
        return None
    return step if type(step) is int else None
