"""Metric sources beside the recorder: what a program writes itself, read as exactly as it was written.

`read_attempt` reads all files of one attempt. One module a source; each hands on `Found`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from detrun.errors import RecordError
from detrun.records.files import open_plain
from detrun.records.sources import csv, jsonl, log, tensorboard, wandb
from detrun.records.sources.patterns import Pattern, load_pattern
from detrun.records.sources.reading import Found, Part, Reading, SourceProblem, Stream, merge
from detrun.records.sources.spec import SourceSpec, candidates, sources_of

__all__ = [
    "FILE_NAMES",
    "Found",
    "Part",
    "Pattern",
    "Reading",
    "SourceProblem",
    "SourceSpec",
    "Stream",
    "candidates",
    "load_pattern",
    "read_attempt",
    "read_part",
    "sources_of",
    "wanted_names",
]

FILE_NAMES = {
    "tensorboard": "**/*tfevents*",
    "jsonl": "**/*.jsonl",
    "csv": "**/*.csv",
    "wandb": "**/*.wandb",
    "log": "**/*.log",
}
"""What a source's files are called, where a recipe gives a folder."""


def wanted_names(spec: SourceSpec, pattern: Pattern, metrics: Iterable[str]) -> frozenset[str]:
    """By which names a source may have these metrics."""
    return frozenset(name for metric in metrics for name in candidates(spec, metric, pattern.names))


def read_attempt(
    spec: SourceSpec, pattern: Pattern, parts: Sequence[tuple[Part, str]], metrics: Sequence[str], begins: int = 1
) -> Stream:
    """All parts that one attempt wrote, as one stream with detrun's step numbers.

    parts: each with the name by which it is spoken of. metrics: those wanted, by detrun's names. begins: the attempt's
    first step. A part that cannot be read is a problem of the stream.
    """
    wanted = wanted_names(spec, pattern, metrics)
    found = []
    for part, name in parts:
        try:
            one = read_part(spec, pattern, part, name, wanted, begins)
        except RecordError as error:
            one = Found()
            one.note("file", f"{error.what}{f' ({error.hint})' if error.hint else ''}", name)
        found.append((name, _shifted(one, 1 - spec.first_step)))
    return merge(found)


def read_part(
    spec: SourceSpec, pattern: Pattern, part: Part, name: str, wanted: frozenset[str], begins: int = 1
) -> Found:
    """One part, with the program's own step numbers. Raises RecordError where it cannot be read at all."""
    _is_plain(part.path)
    if spec.source == "tensorboard":
        return tensorboard.read(part, name, wanted)
    if spec.source == "wandb":
        return wandb.read(part, name, spec.step, wanted)
    if spec.source == "jsonl":
        return jsonl.read(part, name, spec.step, wanted)
    if spec.source == "csv":
        return csv.read(part, name, spec.step, wanted)
    if spec.source == "log":
        if pattern.log is None:
            raise RecordError("cannot be read: its pattern says nothing of log lines", where=name)
        return log.read(part, name, pattern.log, wanted, begins + spec.first_step - 1)
    raise RecordError(f"is of no known source ({spec.source})", where=name)


def _is_plain(path: Path) -> None:
    os.close(open_plain(path))


def _shifted(found: Found, by: int) -> Found:
    if by:
        found.readings = [replace(r, step=r.step + by, first=r.first + by) for r in found.readings]
        found.problems = [replace(p, step=None if p.step is None else p.step + by) for p in found.problems]
    return found
