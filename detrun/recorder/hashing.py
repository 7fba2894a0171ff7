"""Digests large tensors of host memory on threads of their own, while the caller looks at the rest of the state."""

from __future__ import annotations

import os
import queue
import threading
import time
from dataclasses import dataclass

from torch import Tensor

from detrun.fingerprint.byte_digest import digest_parts
from detrun.fingerprint.host import memory_of

LARGE = 1 << 20
"""Bytes from which on a digest is worth a thread."""

MOST_THREADS = 2


@dataclass
class Job:
    """The digest of a contiguous host tensor behind its description; known after `Hashing.finish`."""

    description: bytes
    memory: Tensor
    digest: str = ""

    def run(self) -> None:
        self.digest = digest_parts(self.description, memory_of(self.memory))


class Hashing:
    """Threads that live from the first job to `finish`. The digest itself runs without the interpreter's lock."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._jobs: list[Job] = []
        self._seconds = 0.0

    def add(self, description: bytes, memory: Tensor) -> Job:
        job = Job(description, memory)
        self._jobs.append(job)
        self._queue.put(job)
        if len(self._threads) < min(MOST_THREADS, _cores()):
            # With a name of its own: a thread without one would change the names of the program's.
            thread = threading.Thread(target=self._work, name="detrun-hashing", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is shutting down, or there may be no more threads
                return job
            self._threads.append(thread)
        return job

    def finish(self) -> float:
        """Wait for all jobs; returns the CPU seconds that the threads took."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        for job in self._jobs:
            if not job.digest:
                job.run()
        seconds, self._seconds = self._seconds, 0.0
        self._threads, self._jobs, self._queue = [], [], queue.SimpleQueue()
        return seconds

    def _work(self) -> None:
        try:
            while (job := self._queue.get()) is not None:
                job.run()
        finally:
            self._seconds += time.thread_time()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
