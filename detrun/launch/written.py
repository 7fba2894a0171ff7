"""What a program writes of its metrics itself: noted when an attempt begins, so that each attempt's part of a file is
known, and looked at while it runs, where no recorder tells how far it is."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detrun.errors import RecordError
from detrun.launch.spec import Segment
from detrun.records.files import read_object, write_atomically
from detrun.records.layout import AttemptFolder
from detrun.records.sources import FILE_NAMES, Part, SourceSpec, load_pattern, read_attempt

VERSION = 1
MAX_FILES = 2000
TAIL_BYTES = 256 * 1024
MAX_BINARY_BYTES = 64 << 20

_RANK_LOG = re.compile(r"rank([0-9]{5,})\.log")
_TASK_LOG = re.compile(r"task([0-9]{5,})\.log")


def files_of(spec: SourceSpec, attempt: AttemptFolder) -> list[tuple[int, Path]]:
    """The files that a source has now, each with the rank whose own it is (0 where they are the whole run's)."""
    if spec.path is None:
        names = sorted(path.name for path in attempt.log_dir.glob("*.log"))
        for kind in (_RANK_LOG, _TASK_LOG):
            if found := [(int(match[1]), attempt.log_dir / name) for name in names if (match := kind.fullmatch(name))]:
                return found
        return []
    paths: list[Path] = []
    for place in sorted(glob.glob(spec.path, recursive=True))[:MAX_FILES]:  # noqa: PTH207  (an absolute pattern)
        path = Path(place)
        paths += sorted(path.glob(FILE_NAMES[spec.source])) if path.is_dir() else [path]
    return [(0, path) for path in dict.fromkeys(paths) if path.is_file()][:MAX_FILES]


def note_sources(attempt: AttemptFolder, segment: Segment) -> None:
    """Writes written.json: the sources, and what of their files is there before the attempt begins."""
    if not segment.sources:
        return
    there: dict[str, list[Any]] = {}
    for data in segment.sources:
        spec = SourceSpec.read(data)
        if spec.path is not None:
            for _, path in files_of(spec, attempt):
                size = path.stat().st_size
                there[str(path)] = [size, digest_of(path, size)]
    document = {"schema_version": VERSION, "recorder": segment.recorder, "sources": segment.sources, "there": there}
    write_atomically(attempt.written, json.dumps(document, indent=1).encode() + b"\n")


def digest_of(path: Path, size: int) -> str:
    """A digest of a file's first `size` bytes: whether it was written anew or only went on."""
    digest, left = hashlib.blake2b(digest_size=16), size
    with path.open("rb") as file:
        while left > 0 and (piece := file.read(min(left, 1 << 20))):
            digest.update(piece)
            left -= len(piece)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Written:
    """written.json of an attempt. there: size and digest of what lay there when it began, by path."""

    recorder: bool
    sources: list[SourceSpec]
    there: Mapping[str, tuple[int, str]]

    @staticmethod
    def read(attempt: AttemptFolder) -> Written:
        """Raises RecordError where it is missing or not as `note_sources` writes it."""
        document = read_object(attempt.written)
        try:
            there = {str(path): (int(size), str(digest)) for path, (size, digest) in document["there"].items()}
            sources = [SourceSpec.read(data) for data in document["sources"]]
            return Written(bool(document["recorder"]), sources, there)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise RecordError("does not tell the sources of its metrics", where=str(attempt.written)) from None


class Watch:
    """How far an attempt is by its own writing, read from the ends of its files and not more often than is cheap."""

    def __init__(self, attempt: AttemptFolder, segment: Segment) -> None:
        self.attempt = attempt
        self.active = not segment.recorder and bool(segment.sources)
        self.step = 0
        self._seen: tuple[tuple[str, int], ...] = ()
        self._metrics: tuple[str, ...] = ()
        if not self.active:
            return
        try:
            written = Written.read(attempt)
            self._there, self._spec = written.there, written.sources[0]
            self._pattern = load_pattern(self._spec.pattern)
            self._metrics = tuple(segment.metrics)
        except (RecordError, IndexError):
            self.active = False

    def look(self) -> int:
        """The last step that is there to be read; written to progress/source, where others look."""
        if not self.active:
            return 0
        files = files_of(self._spec, self.attempt)
        sizes = tuple((str(path), path.stat().st_size) for _, path in files if path.exists())
        if sizes == self._seen:
            return self.step
        self._seen = sizes
        parts = [(part, str(part.path)) for path, size in sizes if (part := self._tail(Path(path), size)) is not None]
        # A tail begins in the middle of a line, and what cannot be read is the judge's to say.
        stream = read_attempt(self._spec, self._pattern, parts, self._metrics)
        if stream.last > self.step:
            self.step = stream.last
            self.attempt.progress_dir.mkdir(parents=True, exist_ok=True)
            write_atomically(self.attempt.source_progress, f"{self.step} {time.time():.3f}\n".encode())
        return self.step

    def _tail(self, path: Path, size: int) -> Part | None:
        size_before, _ = self._there.get(str(path), (0, ""))
        start = size_before if size_before <= size else 0
        if start == size:
            return None
        if self._spec.source in ("tensorboard", "wandb"):
            return Part(path) if size <= MAX_BINARY_BYTES else None
        return Part(path, max(start, size - TAIL_BYTES))

    @property
    def alive(self) -> int:
        """Bytes in its files and its logs: whether anything moves where no step can be seen yet."""
        total = sum(size for _, size in self._seen)
        for path in self.attempt.log_dir.glob("*.log"):
            try:
                total += path.stat().st_size
            except OSError:
                continue
        return total


def claim_interrupted(attempt: AttemptFolder, ranks: list[int], kind: str, step: int) -> None:
    """Writes for each rank what the recorder would have written before it ends its process."""
    document = {"kind": kind, "step": step, "microbatch": 0, "moment": "end", "detail": {"seen": "by what it wrote"}}
    attempt.interrupt_dir.mkdir(parents=True, exist_ok=True)
    for rank in ranks:
        write_atomically(attempt.interrupt(rank), json.dumps({**document, "pid": os.getpid()}).encode() + b"\n")
