"""Reads one rank's state at a boundary, written by a process that may have been killed, on whatever disk.

Nothing in a file is taken for granted: types, ranges and keys of every row are checked, kept bytes are read only where
they lie inside their file, and held against the row's digest.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import pyarrow
import pyarrow.ipc

from detrun.errors import RecordError
from detrun.fingerprint.byte_digest import ALGORITHM, digest_parts
from detrun.records.files import one_line, open_plain, read_plain
from detrun.records.layout import AttemptFolder
from detrun.records.state_row import NOT_KEPT, Component, Standing, StateRow
from detrun.records.state_writer import COLUMNS, METADATA, SCHEMA_VERSION

MAX_FILE_BYTES = 4 << 30
MAX_ROWS = 4_000_000

_BOUNDARY = re.compile(r"(begin|end)-([0-9]{8,15})(?:\.([1-9][0-9]{0,8}))?")
_digest = re.compile(r"[a-z][a-z0-9_]*:[0-9a-f]{8,128}").fullmatch
_COMPONENTS = frozenset(get_args(Component))
_STANDINGS = frozenset(get_args(Standing))
_TYPES = {"string": pyarrow.string(), "int64": pyarrow.int64(), "list": pyarrow.list_(pyarrow.int64())}


@dataclass(frozen=True)
class Boundary:
    """A folder under `state/`. step, microbatch: those in its name, `begin-00000011.2`: before the third micro-batch of
    step 11."""

    kind: Literal["begin", "end"]
    step: int
    microbatch: int
    name: str

    @property
    def position(self) -> tuple[int, int]:
        """(steps that are complete, micro-batches of the next one)."""
        return (self.step - (self.kind == "begin"), self.microbatch)


@dataclass(frozen=True)
class StateTable:
    """What one rank had at a boundary.

    scope: `light` holds only what is looked at one step after a restore. cpu_seconds: what the capture cost. missing:
    components that the process did not live to capture there.
    """

    rows: tuple[StateRow, ...]
    step: int
    microbatch: int
    scope: Literal["full", "light"]
    cpu_seconds: float
    missing: tuple[str, ...] = ()
    folder: AttemptFolder | None = field(default=None, repr=False)
    boundary: str = ""
    rank: int = 0

    @functools.cached_property
    def by_key(self) -> dict[tuple[str, str, str], StateRow]:
        return {row.key: row for row in self.rows}

    def bytes_of(self, row: StateRow) -> bytes | None:
        """The bytes of a row, None if they were not kept; RecordError where they are not what the row says."""
        if row.offset < 0 or self.folder is None:
            return None
        path = self.folder.state_bytes(self.boundary, self.rank)
        descriptor = open_plain(path)
        with os.fdopen(descriptor, "rb") as file:
            try:
                if row.offset + row.nbytes > os.fstat(file.fileno()).st_size:
                    raise RecordError(f"is cut off before the end of {one_line(row.name, 80)}", where=str(path))
                file.seek(row.offset)
                raw = file.read(row.nbytes)
            except OSError as error:
                raise RecordError(f"cannot be read: {error.strerror}", where=str(path)) from None
        if not _matches(row, raw):
            raise RecordError(f"holds other bytes of {one_line(row.name, 80)} than its row says", where=str(path))
        return raw


def boundaries(attempt: AttemptFolder) -> list[Boundary]:
    """The boundaries that have a folder, in the order in which a run comes past them."""
    try:
        names = os.listdir(attempt.state_dir)  # noqa: PTH208
    except OSError:
        return []
    found = [boundary for name in names if (boundary := parse_boundary(name)) is not None]
    return sorted(found, key=lambda b: (*b.position, b.kind == "begin"))


def parse_boundary(name: str) -> Boundary | None:
    """The boundary that a folder's name stands for, None if it is no such name."""
    match = _BOUNDARY.fullmatch(name)
    if match is None:
        return None
    kind: Literal["begin", "end"] = "begin" if match[1] == "begin" else "end"
    return Boundary(kind, int(match[2]), int(match[3] or 0), name)


def read_state(folder: AttemptFolder, boundary: str, rank: int) -> StateTable:
    """A rank's rows at a boundary, in the order of the file; RecordError where they are missing, torn or not to be
    trusted."""
    path = folder.state(boundary, rank)
    where = str(path)
    raw = read_plain(path, MAX_FILE_BYTES)
    try:
        rows, metadata = _read(raw, where)
    except (pyarrow.ArrowException, ValueError, TypeError, OSError, MemoryError, OverflowError, KeyError) as error:
        raise RecordError(f"cannot be read as Arrow ({one_line(str(error), 100)})", where=where) from None
    told = (metadata.get("boundary"), metadata.get("rank"))
    if told != (boundary, str(rank)):
        raise RecordError(f"speaks of {one_line(f'{told[0]}, rank {told[1]}', 60)}", where=where)
    step, microbatch = _count(metadata, "step", where), _count(metadata, "microbatch", where)
    named = parse_boundary(boundary)
    if named is not None and (named.step, named.microbatch) != (step, microbatch):
        raise RecordError(f"speaks of step {step}, micro-batch {microbatch}", where=where)
    scope = metadata.get("scope")
    return StateTable(
        rows,
        step,
        microbatch,
        "light" if scope == "light" else "full",
        _seconds(metadata.get("cpu_seconds")),
        tuple(name for name in metadata.get("missing", "").split(",") if name in _COMPONENTS),
        folder,
        boundary,
        rank,
    )


def _read(raw: bytes, where: str) -> tuple[tuple[StateRow, ...], dict[str, str]]:
    if not raw:
        raise RecordError("is empty", where=where)
    reader = pyarrow.ipc.open_stream(raw)
    metadata = _metadata(reader.schema)
    version = metadata.get("schema_version")
    if version != str(SCHEMA_VERSION):
        raise RecordError(
            f"has schema version {one_line(str(version), 20)}, this detrun reads {SCHEMA_VERSION}",
            where=where,
            hint="a detrun of the version that wrote it reads it",
        )
    if [(f.name, f.type) for f in reader.schema] != [(name, _TYPES[kind]) for name, kind in COLUMNS]:
        raise RecordError("has other columns than a state file", where=where)
    rows: list[StateRow] = []
    for batch in reader:
        batch.validate(full=True)
        if len(rows) + batch.num_rows > MAX_ROWS:
            raise RecordError(f"has more than {MAX_ROWS:,} rows", where=where)
        rows.extend(_rows(batch, where, len(rows)))
    # A stream that was cut off between two messages just ends; whole ones end with a mark.
    if not raw.endswith(b"\xff\xff\xff\xff\x00\x00\x00\x00"):
        raise RecordError("is cut off", where=where)
    if len({row.key for row in rows}) != len(rows):
        raise RecordError("names a piece of state twice", where=where)
    return tuple(rows), metadata


def _rows(batch: Any, where: str, before: int) -> Iterator[StateRow]:
    columns = [batch.column(name).to_pylist() for name, _ in COLUMNS]
    for number, values in enumerate(zip(*columns, strict=True), before + 1):
        try:
            yield _row(*values)
        except (ValueError, TypeError, RecursionError) as error:
            raise RecordError(f"row {number} {one_line(str(error), 100)}", where=where) from None


def _row(
    component: Any, name: Any, part: Any, standing: Any, dtype: Any, shape: Any, elements: Any, digest: Any, value: Any,
    offset: Any, nbytes: Any, info: Any,
) -> StateRow:  # fmt: skip
    if component not in _COMPONENTS or standing not in _STANDINGS:
        raise ValueError("is of no known component or standing")
    if None in (name, part, dtype, shape, elements, offset, nbytes, info) or None in shape:
        raise ValueError("is not complete")
    if elements < 0 or nbytes < 0 or offset < NOT_KEPT or any(size < 0 for size in shape):
        raise ValueError("has a negative size")
    if digest is not None and not _digest(digest):
        raise ValueError("has no digest")
    extra = json.loads(info)
    if type(extra) is not dict:
        raise ValueError("has an info that is no object")
    return StateRow(
        component, name, part, standing, dtype, tuple(shape), elements, digest, value, offset, nbytes, extra
    )


def _metadata(schema: Any) -> dict[str, str]:
    found = schema.metadata or {}
    return {
        key.decode("utf-8", "replace").removeprefix(METADATA): value.decode("utf-8", "replace")
        for key, value in found.items()
    }


def _count(metadata: dict[str, str], key: str, where: str) -> int:
    text = metadata.get(key, "")
    if not re.fullmatch(r"[0-9]{1,15}", text):
        raise RecordError(f"does not tell its {key}", where=where)
    return int(text)


def _seconds(text: str | None) -> float:
    try:
        seconds = float(text or 0)
    except ValueError:
        return 0.0
    return seconds if math.isfinite(seconds) and seconds >= 0 else 0.0


def _matches(row: StateRow, raw: bytes) -> bool:
    """Whether bytes are those that the row's digest was made of, as far as that can be told here: devices have another
    algorithm."""
    if len(raw) != row.nbytes:
        return False
    if row.digest is None or not row.digest.startswith(f"{ALGORITHM}:"):
        return True
    description = f"|{row.dtype}|{','.join(map(str, row.shape))};".encode()
    return digest_parts(description, raw) == row.digest
