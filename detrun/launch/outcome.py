"""How an attempt ended, read from what it left: task markers, the launcher's own words, rank logs."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from detrun.errors import RecordError
from detrun.launch.spec import Segment
from detrun.records.files import modified, open_plain
from detrun.records.jobs import TaskMarker
from detrun.records.layout import AttemptFolder

TAIL_LINES = 12
TAIL_BYTES = 64 * 1024

# torchrun's summary of the rank that failed first; its layout has been the same since torch 1.9.
_ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\):.*?rank\s*:\s*(?P<rank>\d+).*?exitcode\s*:\s*(?P<code>-?\d+)",
    re.DOTALL,
)


# What gloo, NCCL and torch's store write when another rank has gone.
_LOST_PEER = re.compile(
    r"connection (closed|reset|was)|by peer|remote process|broken pipe|DistBackendError|gloo/transport", re.IGNORECASE
)


@dataclass(frozen=True)
class Outcome:
    """state: done | failed. log: the path whose tail explains it, relative to the experiment."""

    state: str
    exit_code: int | None
    reason: str | None = None
    failed_rank: int | None = None
    log: str | None = None
    log_tail: tuple[str, ...] = ()


def tail(path: Path, lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a log that say something; empty where there is no such plain file."""
    text = _last_bytes(path).decode("utf-8", "replace")
    return list(deque((line.rstrip() for line in text.splitlines() if line.strip()), maxlen=lines))


def _last_bytes(path: Path) -> bytes:
    """At most the last TAIL_BYTES of a plain file; nothing of a pipe, a device, a link or what is not there."""
    try:
        with os.fdopen(open_plain(path), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read(TAIL_BYTES)
    except (OSError, RecordError):
        return b""


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ended_by(code: int) -> str:
    """An exit status in words; negative or above 128 is a signal."""
    if code < 0 or 128 < code < 192:
        return f"was killed by {signal_name(-code if code < 0 else code - 128)}"
    return f"exited with code {code}"


def read_markers(folder: AttemptFolder, segment: Segment) -> dict[int, TaskMarker]:
    """The markers that are there, by task. One that cannot be read counts as missing."""
    markers = {}
    for task in range(segment.tasks):
        try:
            markers[task] = TaskMarker.read(folder.marker(task))
        except RecordError:
            continue
    return markers


def outcome_of(folder: AttemptFolder, segment: Segment, launcher_code: int | None, root: Path) -> Outcome:
    """Done if every task left a marker with exit code 0; else failed, with the rank that failed first.

    launcher_code: exit status of srun or of the wrapper, for what never came as far as a marker.
    """
    markers = read_markers(folder, segment)
    failed = [marker for marker in markers.values() if marker.exit_code != 0]
    if not failed and len(markers) == segment.tasks:
        return Outcome("done", 0)
    if not markers:
        log = folder.log_dir / "launch.log"
        reason = f"the launcher {ended_by(launcher_code)}" if launcher_code else "no task left a marker"
        return Outcome(
            "failed",
            128 - launcher_code if launcher_code is not None and launcher_code < 0 else launcher_code,
            reason if _began(folder) else f"{reason} before any task had started",
            None,
            _relative(log, root),
            tuple(tail(log)),
        )
    if failed:
        # The first to end is the cause; those that srun or torchrun ended afterwards follow it.
        first = min(failed, key=lambda marker: str(marker.ended))
        rank, code = _failed_rank(folder, segment, first)
        error = (first.model_extra or {}).get("error")
        reason = (
            str(error) if error else f"rank {rank} {ended_by(code)}" if rank is not None else f"it {ended_by(code)}"
        )
        log = _telling_log(folder, segment, rank, first.task)
        exit_code = code if code >= 0 else 128 - code
        return Outcome("failed", exit_code, reason, rank, _relative(log, root), tuple(tail(log)))
    missing = sorted(set(range(segment.tasks)) - set(markers))
    log = folder.log_dir / "launch.log"
    reason = f"task {', '.join(map(str, missing))} left no marker: its node or its wrapper was lost"
    return Outcome("failed", launcher_code, reason, None, _relative(log, root), tuple(tail(log)))


def _began(folder: AttemptFolder) -> bool:
    """Whether a wrapper came as far as opening its task's log."""
    return any(path.name != "launch.log" for path in folder.log_dir.glob("*.log"))


def _failed_rank(folder: AttemptFolder, segment: Segment, marker: TaskMarker) -> tuple[int | None, int]:
    """The rank that failed first and its exit status, as far as anybody knows.

    Every node's torchrun names the first failure it saw, and a rank that dies takes those on other nodes
    along within moments. Of those named, one that complains of a lost peer followed it; among the rest the
    one whose log was quiet first went first.
    """
    code = marker.exit_code if marker.exit_code is not None else 1
    if segment.launcher == "srun" or segment.ranks == 1:
        return marker.task, -int(marker.signal) if isinstance(marker.signal, int) else code
    named = []
    for task in range(segment.tasks):
        text = "\n".join(tail(folder.log_dir / f"task{task:05d}.log", 400))
        if found := _ROOT_CAUSE.search(text):
            rank = int(found["rank"])
            log = folder.log(rank)
            followed = bool(_LOST_PEER.search("\n".join(tail(log, 40))))
            named.append((followed, modified(log), rank, int(found["code"])))
    if not named:
        return None, code
    _, _, rank, code = min(named)
    return rank, code


def _telling_log(folder: AttemptFolder, segment: Segment, rank: int | None, task: int) -> Path:
    own = folder.log(rank if rank is not None else task)
    if tail(own, 1):
        return own
    return own if segment.launcher == "srun" else folder.log_dir / f"task{task:05d}.log"


def _relative(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def last_steps(folder: AttemptFolder, segment: Segment, ranks: Sequence[int] | None = None) -> dict[int, int]:
    """The last step of each rank, or of those given. Without a recorder, the step that the program's own writing tells
    stands for all."""
    if not segment.recorder:
        return {0: seen_step(folder)}
    return {rank: last_step(folder.metrics(rank)) for rank in (range(segment.ranks) if ranks is None else ranks)}


def seen_step(folder: AttemptFolder) -> int:
    """The last step that was seen in what the program writes itself; 0 where none was."""
    try:
        return int(folder.source_progress.read_text(encoding="utf-8").split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def last_step(path: Path) -> int:
    """The last step of a rank's metrics file, from its end alone; 0 where nothing is recorded yet."""
    for line in reversed(_last_bytes(path).splitlines(keepends=True)):
        if line.endswith(b"\n"):
            try:
                step = json.loads(line).get("step")
            except (ValueError, AttributeError, RecursionError):
                continue
            if isinstance(step, int):
                return step
    return 0
