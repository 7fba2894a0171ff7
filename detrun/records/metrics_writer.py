"""Writes `metrics/rank<r>.jsonl`: a line a step, exact bits, appended at once. Standard library only.

Nothing volatile (no times, no hosts) is in a line, so that equal runs give equal bytes.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from detrun.fingerprint.scalar import format_bits, json_value

VERSION = 1

_quoted = json.encoder.encode_basestring_ascii

DERIVED = "derived"
"""The source of an adapter's bookkeeping; its names say so too."""

PRECEDENCE = ("record", "adapter", "clip_grad_norm_", "backward", "recorder")
"""Whose word on a metric keeps the plain name, best first."""


class MetricValue(NamedTuple):
    """One recorded scalar: `bits` of `dtype` (torch's name without "torch."), and who said so."""

    name: str
    source: str
    bits: int
    dtype: str


class StepLine(NamedTuple):
    """What the main line of a step holds. Digests carry their algorithm in front; None and empty are left out.

    first_microbatch: the first micro-batch of the step that is here, where an earlier attempt took those before it."""

    step: int
    metrics: Sequence[MetricValue]
    microbatches: int | None = None
    batch: str | None = None
    state: Mapping[str, str] | None = None
    rng: str | None = None
    skipped: bool = False
    first_microbatch: int = 0


def encode(line: StepLine) -> bytes:
    """The line as UTF-8 JSON with its newline. Equal steps give equal bytes."""
    text = _head(line.step, line.metrics)
    if line.batch is not None:
        text += f',"batch":"{line.batch}"'
    if line.microbatches is not None:
        text += f',"microbatches":{line.microbatches}'
    if line.first_microbatch:
        text += f',"first_microbatch":{line.first_microbatch}'
    if line.skipped:
        text += ',"skipped":true'
    if line.state:
        text += ',"state":{' + ",".join([f'"{name}":"{digest}"' for name, digest in line.state.items()]) + "}"
    if line.rng is not None:
        text += f',"rng":"{line.rng}"'
    return f"{text}}}\n".encode()


def encode_supplement(step: int, metrics: Sequence[MetricValue]) -> bytes:
    """Metrics that became known after the step's main line was written; readers merge lines by step."""
    return f"{_head(step, metrics)}}}\n".encode()


class RankTaken(Exception):  # noqa: N818 - it says what happened, and is no error of the program
    """Another process already writes as this rank; a note for the reader lies beside its file."""


class MetricsWriter:
    """Appends lines to one rank's file. One `write` a line: a killed process loses at most its unfinished tail.

    A program may close descriptors that it does not know and open files of its own under their numbers: so it is looked
    whether the descriptor is still the file before anything is written.
    """

    def __init__(self, attempt: Path, rank: int) -> None:
        """Create the file. Raises RankTaken if it exists, OSError if it cannot be created."""
        folder = attempt / "metrics"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank{rank:05d}.jsonl"
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            note = folder / f"rank{rank:05d}.conflict-{os.getpid()}"
            if _open_in_ancestor(path):
                # The rank itself started this process, to try something or to evaluate.
                note = attempt / "recorder" / f"rank{rank:05d}.helper-{os.getpid()}"
                note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(f"process {os.getpid()} also ran as rank {rank} and was not recorded\n", encoding="utf-8")
            raise RankTaken(f"{path} is written by another process") from None
        self._path = path
        self._identity = _identity(self._file)

    def write(self, line: bytes) -> None:
        """Append a line. Raises OSError (a full disk, a lost mount); nothing more should be written then."""
        if _identity(self._file) != self._identity:
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            if _identity(self._file) != self._identity:
                os.close(self._file)
                raise FileNotFoundError(errno.ENOENT, "the metrics file was replaced", str(self._path))
        written = os.write(self._file, line)
        while written < len(line):
            written += os.write(self._file, line[written:])

    def close(self) -> None:
        os.close(self._file)


def _identity(file: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(file)
    except OSError:
        return None  # closed by somebody else
    return status.st_dev, status.st_ino


def _open_in_ancestor(path: Path) -> bool:
    """Whether a process that this one descends from has the file open. False where /proc does not tell."""
    sought = os.path.realpath(path)
    try:
        process = os.getppid()
        while process > 1:
            held = Path(f"/proc/{process}/fd")
            if any(_target(entry) == sought for entry in held.iterdir()):
                return True
            process = int(Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return False
    return False


def _target(entry: Path) -> str:
    try:
        return os.readlink(entry)  # noqa: PTH115 - compared as text
    except OSError:
        return ""  # closed meanwhile


def _named(metrics: Sequence[MetricValue]) -> dict[str, MetricValue]:
    """By name; where sources compete the better one has the plain name and the other is kept as `name (source)`."""
    named: dict[str, MetricValue] = {}
    for value in metrics:
        if value.source == DERIVED:
            named[f"{value.name} ({DERIVED})"] = value
            continue
        held = named.get(value.name)
        if held is None or held.source == value.source:
            named[value.name] = value  # the program's last word counts
            continue
        winner, loser = sorted((held, value), key=lambda v: PRECEDENCE.index(v.source))
        named[value.name] = winner
        named[f"{value.name} ({loser.source})"] = loser
    return named


def _head(step: int, metrics: Sequence[MetricValue]) -> str:
    # Put together by hand: a general encoder costs more than everything else that is recorded of a small step.
    fields = []
    for name, metric in _named(metrics).items():
        shown = json_value(metric.bits, metric.dtype)
        value = f'"{shown}"' if isinstance(shown, str) else repr(shown)
        fields.append(
            f'{_quoted(name)}:{{"bits":"{format_bits(metric.bits, metric.dtype)}","dtype":"{metric.dtype}",'
            f'"value":{value},"source":"{metric.source}"}}'
        )
    return f'{{"v":{VERSION},"step":{step},"metrics":{{{",".join(fields)}}}'
