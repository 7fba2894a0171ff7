"""Reads the records of many ranks on several CPUs, a slice of ranks a task; few are read where we are."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TypeVar

PARALLEL_FROM_BYTES = 64 << 20
"""Less than this is compared sooner than a process is started."""

SLICE = 16
"""Ranks a task."""

Task = TypeVar("Task")
Part = TypeVar("Part")


def slices(ranks: int) -> list[range]:
    """All ranks, a slice a task."""
    return [range(start, min(start + SLICE, ranks)) for start in range(0, ranks, SLICE)]


def read_all(
    read: Callable[[Task], Part], tasks: Sequence[Task], size: Callable[[], int], processes: int | None = None
) -> list[Part]:
    """`read` of every task, in order. size: a guess of the records' bytes. processes: how many read at most;
    default: one a CPU this process may use."""
    workers = min(processes or len(os.sched_getaffinity(0)), len(tasks))
    if workers < 2 or size() < PARALLEL_FROM_BYTES:
        return [read(task) for task in tasks]
    # spawn: a caller with threads (a live display) must not be forked.
    try:
        with ProcessPoolExecutor(workers, get_context("spawn"), _leave_interrupts_to_the_caller) as pool:
            return list(pool.map(read, tasks))
    except (BrokenProcessPool, OSError):
        # No room for another process, or one was killed for its memory: slower, but the answer is the same.
        return [read(task) for task in tasks]


def _leave_interrupts_to_the_caller() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
