"""From where a later attempt goes on: the newest complete checkpoint, and the position in the training it stands for.

A checkpoint whose save was cut short never counts, whatever its files look like: what the recorder saw of the saves
decides that. The position comes from there too, since a name need not tell it;
where no save was seen, the name is asked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from detrun.checkpoints.find import Found, find_checkpoints
from detrun.errors import RecordError
from detrun.records.files import read_plain
from detrun.records.jobs import RejectedCheckpoint, ResumedFrom
from detrun.records.layout import AttemptFolder, rank_files

MAX_LOG_BYTES = 64 << 20
NEAR = 2.0
"""Seconds by which a file's time may lie beside the save that wrote it: clocks of two machines differ."""

MAX_FILES_LOOKED_AT = 64


@dataclass(frozen=True)
class Save:
    """One save of one rank: its position in the training, and when it began and ended (None: it never did)."""

    rank: int
    path: Path | None
    step: int
    microbatch: int
    began: float
    ended: float | None

    @property
    def position(self) -> tuple[int, int]:
        return (self.step, self.microbatch)


class NoCheckpoint(Exception):  # noqa: N818 - an answer of this module, which its caller writes down
    """Why there is nothing to go on from."""


def read_saves(attempt: AttemptFolder) -> list[Save]:
    """What the recorder saw of an attempt's saves, by all ranks; a line that cannot be read counts for nothing."""
    saves: list[Save] = []
    for rank in sorted(rank_files(attempt.saves_dir, "jsonl").ranks):
        try:
            raw = read_plain(attempt.saves(rank), MAX_LOG_BYTES)
        except RecordError:
            continue
        saves += _saves_of(rank, raw.splitlines())
    return saves


def _saves_of(rank: int, lines: Iterable[bytes]) -> list[Save]:
    found: list[Save] = []
    for line in lines:
        try:
            entry = json.loads(line)
            path = Path(os.path.realpath(entry["path"])) if entry["path"] else None
            step, microbatch = int(entry["step"]), int(entry.get("microbatch") or 0)
            event, when = entry["event"], float(entry["time"])
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if event == "begin":
            found.append(Save(rank, path, step, microbatch, when, None))
            continue
        for index in range(len(found) - 1, -1, -1):
            begun = found[index]
            if begun.path == path and begun.ended is None:
                found[index] = Save(rank, path, begun.step, begun.microbatch, begun.began, when)
                break
    return found


def find_start(
    directory: Path,
    pattern: str | None,
    attempts: Sequence[AttemptFolder],
    *,
    given: bool,
    ranks: int | None = None,
) -> ResumedFrom:
    """The checkpoint to go on from. attempts: those that may have written it, oldest first.

    given: the program is told the checkpoint; one that looks for itself may also begin anew. ranks: of the job. Raises
    NoCheckpoint, which says what is there and why it does not count.
    """
    saves = [save for attempt in attempts for save in read_saves(attempt)]
    rejected: list[RejectedCheckpoint] = []
    for found in reversed(find_checkpoints(directory, pattern, ranks)):
        why = found.why or found.no_resume or _cut_short(found.path, saves)
        if why:
            rejected.append(RejectedCheckpoint(path=str(found.path), why=why))
            continue
        position = _position(found, saves)
        if position is None:
            raise NoCheckpoint(
                f"no save was seen and the name of {found.path} tells no step (checkpoint.pattern says how it does)"
            )
        step, microbatch, seen = position
        return ResumedFrom(
            path=str(found.path),
            step=step,
            microbatch=microbatch,
            source="saves" if seen else "pattern",
            named=found.step if pattern else None,
            rejected=rejected,
        )
    if not given:
        return ResumedFrom(path=None, step=0, source="none", rejected=rejected)
    if rejected:
        there = "; ".join(f"{Path(each.path).name}: {each.why}" for each in rejected[:5])
        raise NoCheckpoint(f"there is no complete checkpoint in {directory} ({there})")
    empty = _what_is_there(directory)
    last = next((save.path for save in reversed(saves) if save.path is not None), None)
    instead = f"; the last save went to {last}" if last is not None else ""
    raise NoCheckpoint(f"there is no checkpoint: {directory} {empty} (checkpoint.directory){instead}")


def _what_is_there(directory: Path) -> str:
    if not directory.is_dir():
        return "does not exist"
    names = sorted(path.name for path in directory.iterdir())
    if not names:
        return "has none"
    more = ", …" if len(names) > 3 else ""
    return f"has {', '.join(names[:3])}{more}, whose names tell no step (checkpoint.pattern says how they do)"


def _cut_short(checkpoint: Path, saves: Sequence[Save]) -> str:
    """Why a checkpoint that looks whole is not: on some rank the last save into it began and never ended."""
    last: dict[tuple[int, Path], Save] = {}
    for save in _into(checkpoint, saves):
        assert save.path is not None
        last[(save.rank, save.path)] = save
    cut = sorted({save.rank for save in last.values() if save.ended is None})
    return f"its save was cut short on rank {', '.join(map(str, cut[:8]))}" if cut else ""


def _into(checkpoint: Path, saves: Sequence[Save]) -> list[Save]:
    """The saves that wrote this checkpoint or a part of it, by their paths."""
    place = Path(os.path.realpath(checkpoint))
    return [
        save
        for save in saves
        if save.path is not None and (save.path == place or place in save.path.parents or save.path in place.parents)
    ]


def _position(found: Found, saves: Sequence[Save]) -> tuple[int, int, bool] | None:
    """(steps, micro-batches of the next one, whether a save that was seen says so); None if nothing does."""
    into = [save for save in _into(found.path, saves) if save.ended is not None]
    if into:
        last = max(into, key=lambda save: save.began)
        newest = {save.rank: save for save in into}
        if all(save.position == last.position for save in newest.values()):
            return (*last.position, True)
    by_time = _saved_when_written(found.path, saves)
    if by_time is not None:
        return (*by_time, True)
    return None if found.step is None else (found.step, 0, False)


def _saved_when_written(checkpoint: Path, saves: Sequence[Save]) -> tuple[int, int] | None:
    """The position of the save during which the checkpoint's files were written: its folder may have got another name
    since, and the number in that need not be a step."""
    written = _times(checkpoint)
    if not written:
        return None
    spans: dict[tuple[int, int], tuple[float, float]] = {}
    for save in saves:
        if save.ended is not None:
            began, ended = spans.get(save.position, (save.began, save.ended))
            spans[save.position] = (min(began, save.began), max(ended, save.ended))
    apart = {
        position: max(max(began - when, when - ended, 0.0) for when in written)
        for position, (began, ended) in spans.items()
    }
    ordered = sorted(((position, far) for position, far in apart.items() if far <= NEAR), key=lambda item: item[1])
    if not ordered or (len(ordered) > 1 and ordered[0][1] == ordered[1][1]):
        return None
    return ordered[0][0]


def _times(checkpoint: Path) -> list[float]:
    """When some of the files of a checkpoint were written."""
    times: list[float] = []
    paths = [checkpoint] if checkpoint.is_file() else sorted(checkpoint.rglob("*"))
    for path in paths:
        try:
            if path.is_file() and not path.is_symlink():
                times.append(path.stat().st_mtime)
        except OSError:
            continue
        if len(times) >= MAX_FILES_LOOKED_AT:
            break
    return times
