"""Two small files beside the metrics: where a rank is now, and what the recorder itself has cost."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path


class Progress:
    """`progress/rank<r>`: step and phase, one line of fixed width overwritten in place, so that a reader never sees a
    half of two lines. Phases: start, forward, backward, optimizer, between, end."""

    def __init__(self, attempt: Path, rank: int) -> None:
        folder = attempt / "progress"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank{rank:05d}"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._path = path
        self._inode = os.fstat(self._file).st_ino

    def show(self, step: int, phase: str) -> None:
        try:
            same = os.fstat(self._file).st_ino == self._inode
        except OSError:
            same = False
        if not same:  # the program closed it, and the number may be a file of its own by now
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._inode = os.fstat(self._file).st_ino
        os.pwrite(self._file, b"%-31s\n" % f"{step} {phase}".encode(), 0)


def write_atomically(path: Path, document: object) -> None:
    """Write JSON so that a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


@dataclass
class AdapterFacts:
    """What is known of one framework's adapter in this process. lacks: what it relies on and did not find."""

    name: str
    tried: list[str]
    version: str | None = None
    lacks: list[str] = field(default_factory=list)


class Cost:
    """CPU seconds spent in the recorder, by purpose: `metrics`, `state` (digests of every step), `capture` (state
    files at boundaries), `other` (environment, files)."""

    def __init__(self) -> None:
        self.cpu_seconds = {"metrics": 0.0, "state": 0.0, "capture": 0.0, "other": 0.0}
        self.warnings: list[str] = []
        self.adapters: list[AdapterFacts] = []

    def warn(self, text: str) -> bool:
        """Keep a warning once; True if it is new."""
        if text in self.warnings or len(self.warnings) >= 100:
            return False
        self.warnings.append(text)
        return True

    def write(self, attempt: Path, rank: int, steps: int) -> None:
        """`recorder/rank<r>.json`. Raises OSError."""
        document = {
            "schema_version": 1,
            "steps": steps,
            "cpu_seconds": {name: round(seconds, 6) for name, seconds in self.cpu_seconds.items()},
            "process_cpu_seconds": round(time.process_time(), 6),
            "warnings": self.warnings,
            "adapters": [asdict(facts) for facts in self.adapters],
        }
        write_atomically(attempt / "recorder" / f"rank{rank:05d}.json", document)
