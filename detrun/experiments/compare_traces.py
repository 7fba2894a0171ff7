"""Reads the traces of two attempts and has them compared: rank by rank, in several processes where there are many."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from detrun.compare.folding import ranks_in_words
from detrun.compare.trace_join import join
from detrun.compare.trace_rank import compare_rank
from detrun.compare.trace_summary import RankReading, TraceComparison
from detrun.compare.trace_tally import Tallies, table_of, tally
from detrun.errors import RecordError
from detrun.experiments.slices import read_all
from detrun.records.layout import AttemptFolder, rank_files, rank_name
from detrun.records.trace_reader import open_trace

RANKS_A_TASK = 4


def compare_traces(
    a: AttemptFolder,
    b: AttemptFolder,
    ranks: Sequence[int] | None = None,
    processes: int | None = None,
    *,
    recompute: bool = False,
    skip_equal: bool = True,
    from_batch: bool = False,
) -> TraceComparison:
    """Holds the traces of two attempts against each other. Never raises for what is wrong with a file: it is in the
    result.

    ranks: those that were asked to trace; default: all that either attempt has a file of. processes: how many read at
    most; default: one a CPU. recompute, skip_equal, from_batch: as `compare_rank` has them.
    """
    asked = traced_ranks(a) | traced_ranks(b) if ranks is None else set(ranks)
    order = sorted(asked)
    chunks = [order[at : at + RANKS_A_TASK] for at in range(0, len(order), RANKS_A_TASK)]
    tasks = [_Task(a, b, tuple(chunk), recompute, skip_equal, from_batch) for chunk in chunks]
    size = _size_of(a, b, order)
    readings = [reading for part in read_all(_compare, tasks, lambda: size, processes) for reading in part]
    result = join(readings)
    if not order:
        result.incomplete.append("neither folder holds a trace")
    lead = result.lead
    if lead is not None and lead.role in ("origin", "suspect"):
        tallies = [_TallyTask(a, b, tuple(chunk), lead.event.step, lead.event.op) for chunk in chunks]
        # One step of each trace is read for it, of however many there are.
        steps = max((len(reading.steps) for reading in readings), default=1) or 1
        parts = read_all(_tally, tallies, lambda: size // steps, processes)
        result.table = table_of(entry for part in parts for entry in part)
    return result


def traced_ranks(attempt: AttemptFolder) -> set[int]:
    """The ranks that have any file of a trace in an attempt."""
    folder = attempt.trace_dir
    return set(rank_files(folder, "arrow").ranks | rank_files(folder, "jsonl").ranks)


@dataclass(frozen=True)
class _Task:
    a: AttemptFolder
    b: AttemptFolder
    ranks: tuple[int, ...]
    recompute: bool
    skip_equal: bool
    from_batch: bool


@dataclass(frozen=True)
class _TallyTask:
    a: AttemptFolder
    b: AttemptFolder
    ranks: tuple[int, ...]
    step: int
    op: str


def keep_freed_memory() -> None:
    """Lets this process keep what it frees: a step's columns are given back to the system otherwise and taken anew for
    the next step, a page at a time, which takes a third of the time. Does nothing where the C library is not glibc."""
    with suppress(OSError, AttributeError, TypeError):
        adjust = ctypes.CDLL(None).mallopt
        for parameter, value in ((_TRIM_THRESHOLD, 512 << 20), (_MMAP_THRESHOLD, 32 << 20), (_TOP_PAD, 16 << 20)):
            adjust(parameter, value)


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # malloc.h


def _compare(task: _Task) -> list[RankReading]:
    keep_freed_memory()
    return [_compare_rank(task, rank) for rank in task.ranks]


def _compare_rank(task: _Task, rank: int) -> RankReading:
    here, there = _has(task.a, rank), _has(task.b, rank)
    if not here or not there:
        where = "either arm" if not here and not there else "A" if not here else "B"
        return RankReading(rank, problem=f"{ranks_in_words([rank])} has no trace in {where}")
    try:
        with open_trace(task.a, rank) as a, open_trace(task.b, rank) as b:
            return compare_rank(a, b, recompute=task.recompute, skip_equal=task.skip_equal, from_batch=task.from_batch)
    except RecordError as error:
        return RankReading(rank, problem=str(error))


def _tally(task: _TallyTask) -> list[Tallies]:
    found: list[Tallies] = []
    for rank in task.ranks:
        # A rank whose files cannot be read was named by the comparison before.
        with suppress(RecordError), open_trace(task.a, rank) as a, open_trace(task.b, rank) as b:
            found.append(tally(a, b, task.step, task.op))
    return found


def _has(attempt: AttemptFolder, rank: int) -> bool:
    return any(os.path.lexists(attempt.trace_dir / rank_name(rank, kind)) for kind in ("arrow", "jsonl"))


def _size_of(a: AttemptFolder, b: AttemptFolder, ranks: Sequence[int]) -> int:
    """Bytes of the events' files, guessed from the first rank's."""
    for attempt in (a, b):
        for rank in ranks[:1]:
            with suppress(OSError):
                return 2 * len(ranks) * (attempt.trace_dir / rank_name(rank, "arrow")).stat().st_size
    return 0
