"""Finds the moment in the middle of a save: for an interruption that leaves half a checkpoint behind.

A thread watches for a save call of this process or, in a program whose saves go through no call that is known, for a
new entry in the checkpoint directory. The delay from there is a share of how long earlier saves took, drawn from a
seed, or until that share of an earlier save's bytes is there, whichever comes first: a first save is often many times
slower than the next. If the save is over sooner, the next one gets a smaller share.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

FIRST_GUESS = 0.05
"""Seconds that a save is expected to take where none was seen."""

LOOK = 0.001
LOOK_TO_LEARN = 0.005
LOOK_AT_PEERS = 0.02


class SaveWatch:
    """Watches the saves of one rank. `begins`, `ends` and `idle` are told by the training thread.

    interrupted: the folder where a rank that was hit leaves a file; the others follow it at once. leads: this rank
    watches the directory where no save call is seen. kill: does not return; gets what is to be said of the save.
    """

    def __init__(
        self,
        *,
        directory: Path | None,
        interrupted: Path,
        seed: int,
        leads: bool,
        kill: Callable[[dict[str, Any]], None],
        warn: Callable[[str], object],
    ) -> None:
        self.directory = directory
        self.interrupted = interrupted
        self.leads = leads
        self.durations: list[float] = []
        self.largest = 0
        """Bytes that the largest save so far added to the directory."""
        self.attempts = 0
        self._kill = kill
        self._warn = warn
        self._draws = random.Random(seed)
        self._share = self._draws.uniform(0.1, 0.9)
        self._lock = threading.RLock()
        self._depth = 0
        self._began: float | None = None
        self._path: str | None = None
        self._by_call = False
        self._known = self._entries()
        self._armed = threading.Event()
        threading.Thread(target=self._watch, name="detrun-save-watch", daemon=True).start()

    def arm(self) -> None:
        """From now on a save is to be hit; until then it is learned how long they take."""
        self._armed.set()

    def idle(self) -> None:
        """A step begins: no save is under way, and what the directory holds now is not new."""
        with self._lock:
            if self._began is None and not self._by_call and self.leads and self._new():
                self._began = time.monotonic()  # it was over before it was seen
            if self._began is not None:
                self._over()
            self._known = self._entries()

    def begins(self, path: str | None) -> None:
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._by_call, self._began, self._path = True, time.monotonic(), path

    def ends(self, _path: str | None) -> None:
        with self._lock:
            self._depth = max(0, self._depth - 1)
            if self._depth == 0 and self._began is not None:
                self._over()

    def delay(self) -> float:
        """Seconds from a save's begin to the kill."""
        return self.expected() * self._share * 0.5**self.attempts

    def expected(self) -> float:
        """Seconds that a save takes, by those seen so far."""
        return sum(self.durations) / len(self.durations) if self.durations else FIRST_GUESS

    def _far_enough(self) -> bool:
        """Whether so much is written of this save that it is in its middle, however long it takes."""
        share = self._share * 0.5**self.attempts
        return self.largest > 0 and self._written(self._new())[1] >= share * self.largest

    def _over(self) -> None:
        assert self._began is not None
        if self.directory is not None:
            self.largest = max(self.largest, self._written(self._new())[1])
        took = time.monotonic() - self._began
        if self._armed.is_set():
            self._warn(f"kill-during-save: a save was over after {took:.3g} s, before the kill at {self.delay():.3g} s")
            self.attempts += 1
        self.durations.append(took)
        self._began = self._path = None

    def _watch(self) -> None:
        looked = 0.0
        while True:
            armed = self._armed.is_set()
            time.sleep(LOOK if armed else LOOK_TO_LEARN)
            now = time.monotonic()
            if armed and now - looked >= LOOK_AT_PEERS:
                looked = now
                if names := _names(self.interrupted):
                    # Whoever saves with this rank was hit: the same end for all.
                    with self._lock:
                        self._kill({**self._so_far(now), "followed": names[0].partition(".")[0]})
            with self._lock:
                if self._began is None:
                    if not self._by_call and self.leads and self._new():
                        self._began = now
                    continue
                due = armed and (now - self._began >= self.delay() or self._far_enough())
                if due and self._has_begun_to_write():
                    self._kill(self._so_far(now))

    def _has_begun_to_write(self) -> bool:
        """Killed before anything is there, it would be no save that was cut short. At the first try, not before the
        first byte; after a save that was too fast for that, its entry will do."""
        if self.directory is None:
            return True
        if new := self._new():
            return self.attempts > 0 or self._written(new)[1] > 0
        if self._path is None:
            return False
        path = Path(self._path)
        return path.exists() or self.directory not in path.parents

    def _so_far(self, now: float) -> dict[str, Any]:
        new = self._new()
        files, size = self._written(new)
        return {
            "delay_seconds": round(self.delay(), 6),
            "after_seconds": None if self._began is None else round(now - self._began, 6),
            "expected_seconds": round(self.expected(), 6),
            "saves_seen": len(self.durations),
            "attempts": self.attempts + 1,
            "path": self._path,
            "entries": sorted(new),
            "files": files,
            "bytes": size,
        }

    def _written(self, entries: Iterable[str]) -> tuple[int, int]:
        """Files and bytes in these entries of the directory."""
        files = size = 0
        for name in entries:
            path = (self.directory or Path()) / name
            for root, _folders, names in os.walk(path) if path.is_dir() else [(str(path.parent), [], [path.name])]:
                for file in names:
                    try:
                        size += os.lstat(os.path.join(root, file)).st_size  # noqa: PTH118 - a walk's own pieces
                    except OSError:
                        continue
                    files += 1
        return files, size

    def _new(self) -> set[str]:
        return self._entries() - self._known

    def _entries(self) -> set[str]:
        return set() if self.directory is None else set(_names(self.directory))


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - names only, a thousand times a second
    except OSError:
        return []
