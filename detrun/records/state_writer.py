"""Writes one rank's state at a boundary: `state/<boundary>/rank<r>.arrow`, a row a piece, and `rank<r>.bytes`, what was
kept of their bytes.

Runs in the training process. pyarrow is imported with the first writer: a training environment may not have it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from detrun.records.state_row import StateRow

SCHEMA_VERSION = 1

COLUMNS = (
    ("component", "string"),
    ("name", "string"),
    ("part", "string"),
    ("standing", "string"),
    ("dtype", "string"),
    ("shape", "list"),
    ("elements", "int64"),
    ("digest", "string"),
    ("value", "string"),
    ("offset", "int64"),
    ("nbytes", "int64"),
    ("info", "string"),
)
"""The fields of a row, and what each is on disk; `list` is one of int64. info is the text of a JSON object."""

METADATA = "detrun."
"""Before every key of a file's own description."""


class StateWriter:
    """One rank's two files of one boundary. Readers see them when `write` has ended, by rename; a file of that name
    from before is replaced."""

    def __init__(self, attempt: Path, boundary: str, rank: int) -> None:
        """Raises ImportError where pyarrow is not installed; touches no disk."""
        import pyarrow

        self._arrow: Any = pyarrow
        self.boundary = boundary
        self.rank = rank
        self._folder = attempt / "state" / boundary
        self._path = self._folder / f"rank{rank:05d}.arrow"
        self._bytes = self._folder / f"rank{rank:05d}.bytes"
        self._draft = self._folder / f".rank{rank:05d}.bytes.{os.getpid()}"
        self._file: int | None = None
        self.kept = 0

    def keep(self, raw: Any) -> int:
        """Append bytes (any contiguous buffer); returns where they begin. Raises OSError.

        `rest` closes the file between two moments: a program may close descriptors that it does not know and open
        its own under their numbers.
        """
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (0 if self.kept else os.O_TRUNC)
            self._file = os.open(self._draft, flags, 0o644)
        view = memoryview(raw).cast("B")
        offset, written = self.kept, 0
        while written < len(view):
            written += os.write(self._file, view[written:])
        self.kept += written
        return offset

    def rest(self) -> None:
        """The end of a moment at which bytes were kept."""
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)

    def discard(self) -> None:
        """Forget what was kept."""
        self.rest()
        self.kept = 0
        self._draft.unlink(missing_ok=True)

    def write(
        self,
        rows: Sequence[StateRow],
        *,
        step: int,
        microbatch: int,
        scope: Literal["full", "light"],
        cpu_seconds: float,
        missing: Sequence[str] = (),
    ) -> None:
        """Write the rows, whose keys are unique. step, microbatch: those in the boundary's name. cpu_seconds: what
        the capture cost until now. missing: components that the process did not live to see. Raises OSError."""
        self.rest()
        self._folder.mkdir(parents=True, exist_ok=True)
        table = self._table(rows, step, microbatch, scope, cpu_seconds, missing)
        if self.kept:
            self._draft.replace(self._bytes)
        else:
            self._bytes.unlink(missing_ok=True)
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with (
            self._arrow.OSFile(str(draft), "wb") as sink,
            self._arrow.ipc.new_stream(sink, table.schema, options=self._options()) as stream,
        ):
            stream.write_table(table)
        draft.replace(self._path)

    def _options(self) -> Any:
        return self._arrow.ipc.IpcWriteOptions(use_threads=False)

    def _table(
        self, rows: Sequence[StateRow], step: int, microbatch: int, scope: str, seconds: float, missing: Sequence[str]
    ) -> Any:
        arrow = self._arrow
        metadata = {
            "schema_version": SCHEMA_VERSION,
            "boundary": self.boundary,
            "rank": self.rank,
            "step": step,
            "microbatch": microbatch,
            "scope": scope,
            "cpu_seconds": f"{seconds:.6f}",
            "missing": ",".join(missing),
        }
        types = {"string": arrow.string(), "int64": arrow.int64(), "list": arrow.list_(arrow.int64())}
        schema = arrow.schema(
            [arrow.field(name, types[kind]) for name, kind in COLUMNS],
            metadata={f"{METADATA}{key}": str(value) for key, value in metadata.items()},
        )
        return arrow.Table.from_arrays([_column(arrow, rows, field) for field in schema], schema=schema)


def _column(arrow: Any, rows: Sequence[StateRow], field: Any) -> Any:
    values: list[Any] = [getattr(row, field.name) for row in rows]
    if field.name == "info":
        values = [json.dumps(value, sort_keys=True) if value else "{}" for value in values]
    elif field.type == arrow.string():
        # A name may hold what is no Unicode: dictionary keys of a program are any text.
        values = [None if value is None else _encodable(value) for value in values]
    return arrow.array(values, type=field.type)


def _encodable(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
