"""Writes one rank's trace: `trace/rank<r>.arrow`, an Arrow IPC stream of events, and `trace/rank<r>.jsonl`, a line a
step.

Runs in the training process. pyarrow is imported with the first batch: a training environment may not have it. What
was written once stays: a crash loses the events since the last batch, nothing else.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from detrun.records.trace_row import METADATA, SCHEMA_VERSION, TRACE_FIELDS, TRACE_KIND

_EMPTY = [""]
_BUFFERED = 1 << 16
"""Bytes: a batch is written in hundreds of pieces."""

Numbers = npt.NDArray[np.integer[Any]]


@dataclass
class TraceBatch:
    """Rows in columns, as the tracer gathers them. All columns are of one length.

    A text column holds numbers of entries in the table of its name in `texts`; `parts` and `producers` are the lists
    of all rows one behind the other, with the number of each row's entries in `part_counts` and `n_inputs`. `digests`:
    the entries that `parts` counts from. A table may be longer than the batch needs: one that continues the one of the
    batch before begins with the same entries. `rng` and `rows` may be empty: then no row has any.
    """

    seq: Sequence[int] | Numbers
    step: Sequence[int] | Numbers
    microbatch: Sequence[int] | Numbers
    occurrence: Sequence[int] | Numbers
    numbers: Mapping[str, Sequence[int] | Numbers]
    texts: Mapping[str, Sequence[str]]
    parts: Sequence[int] | Numbers
    part_counts: Sequence[int] | Numbers
    n_inputs: Sequence[int] | Numbers
    digests: Sequence[bytes]
    producers: Sequence[int] | Numbers
    rng: Sequence[bytes | None]
    peer: Sequence[int] | Numbers
    rows: Sequence[Sequence[int] | None] = field(default_factory=list)


class TraceWriter:
    """Appends to the two files of one rank. Every call opens and closes them: a program may close descriptors that it
    does not know. Raises OSError; ImportError where pyarrow is not installed."""

    def __init__(
        self,
        attempt: Path,
        rank: int,
        head: Mapping[str, Any],
        metadata: Mapping[str, str],
        compression: Literal["zstd", "lz4"] = "zstd",
    ) -> None:
        """Begins both files anew. head: what the first line of the index says beside version and rank; metadata: what
        the stream's description says beside version and kind."""
        self._compression = compression
        self.rank = rank
        self.bytes = 0
        """Bytes written to both files."""
        self.batches = 0
        self._folder = attempt / "trace"
        self._arrow_path = self._folder / f"rank{rank:05d}.arrow"
        self._index_path = self._folder / f"rank{rank:05d}.jsonl"
        self.metadata = dict(metadata)
        """May be changed until the first batch."""
        self._sink = io.BytesIO()
        self._stream: Any = None
        self._buffer: Any = None
        self._arrow: Any = None
        self._schema: Any = None
        self._empty: Any = None
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in (self._arrow_path, self._index_path):
            path.write_bytes(b"")
        self.write_line({"v": SCHEMA_VERSION, "rank": rank, **head})

    def write_line(self, line: Mapping[str, Any]) -> None:
        """Append a line to the index."""
        raw = json.dumps(line, ensure_ascii=True, separators=(",", ":")).encode() + b"\n"
        self._append(self._index_path, raw)

    def write_batch(self, batch: TraceBatch, most: int | None = None) -> bool:
        """Append the rows as one batch. False, and nothing is written, if both files together would then be longer
        than `most`."""
        if self._stream is None:
            self._open()
        self._stream.write_batch(self._record_batch(batch))
        return self._flush(most)

    def close(self) -> None:
        """Mark the end of the stream; a stream without the mark can be read as well."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
            self._flush(None)

    def _open(self) -> None:
        import pyarrow

        self._arrow = pyarrow
        self._empty = pyarrow.array(_EMPTY, pyarrow.string())
        self._schema = trace_schema(pyarrow, self.rank, self.metadata)
        options = pyarrow.ipc.IpcWriteOptions(
            compression=self._compression, emit_dictionary_deltas=True, unify_dictionaries=False, use_threads=False
        )
        self._buffer = pyarrow.BufferedOutputStream(pyarrow.PythonFile(self._sink, "w"), _BUFFERED)
        self._stream = pyarrow.ipc.new_stream(self._buffer, self._schema, options=options)

    def _flush(self, most: int | None) -> bool:
        self._buffer.flush()
        raw = self._sink.getvalue()
        self._sink.seek(0)
        self._sink.truncate()
        if most is not None and self.bytes + len(raw) > most:
            self._stream = None
            return False
        self._append(self._arrow_path, raw)
        self.batches += 1
        return True

    def _append(self, path: Path, raw: bytes) -> None:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            view = memoryview(raw)
            while view:
                view = view[os.write(file, view) :]
        finally:
            os.close(file)
        self.bytes += len(raw)

    def _record_batch(self, batch: TraceBatch) -> Any:
        arrow = self._arrow
        count = len(batch.seq)
        columns: list[Any] = []
        for name, kind in TRACE_FIELDS:
            if kind == "text":
                table = batch.texts[name]
                texts = self._empty if table == _EMPTY else arrow.array([*map(_encodable, table)], arrow.string())
                numbers = _numbers(arrow, batch.numbers[name])
                column = arrow.DictionaryArray.from_arrays(numbers, texts, safe=False)
            elif kind == "digests":
                raw = arrow.py_buffer(b"".join(batch.digests))
                digests = arrow.Array.from_buffers(arrow.binary(16), len(batch.digests), [None, raw])
                values = arrow.DictionaryArray.from_arrays(_numbers(arrow, batch.parts), digests, safe=False)
                column = arrow.ListArray.from_arrays(_offsets(arrow, batch.part_counts), values)
            elif kind == "int32-list":
                column = arrow.ListArray.from_arrays(_offsets(arrow, batch.n_inputs), _numbers(arrow, batch.producers))
            elif kind == "digest":
                binary = arrow.binary(16)
                column = arrow.array(batch.rng, binary) if len(batch.rng) else arrow.nulls(count, binary)
            elif kind == "uint64-list":
                lists = arrow.list_(arrow.uint64())
                column = arrow.array(batch.rows, lists) if len(batch.rows) else arrow.nulls(count, lists)
            else:
                column = _numbers(arrow, getattr(batch, name), np.int64 if kind == "int64" else np.int32)
            columns.append(column)
        return arrow.RecordBatch.from_arrays(columns, schema=self._schema)


def trace_schema(arrow: Any, rank: int, metadata: Mapping[str, str]) -> Any:
    """The schema of a trace file, with its description. arrow: the module pyarrow."""
    text = arrow.dictionary(arrow.int32(), arrow.string())
    types = {
        "int32": arrow.int32(),
        "int64": arrow.int64(),
        "text": text,
        "digests": arrow.list_(arrow.dictionary(arrow.int32(), arrow.binary(16))),
        "int32-list": arrow.list_(arrow.int32()),
        "digest": arrow.binary(16),
        "uint64-list": arrow.list_(arrow.uint64()),
    }
    described = {"schema_version": str(SCHEMA_VERSION), "kind": TRACE_KIND, "rank": str(rank), **metadata}
    return arrow.schema(
        [arrow.field(name, types[kind]) for name, kind in TRACE_FIELDS],
        metadata={f"{METADATA}{key}": value for key, value in described.items()},
    )


def _numbers(arrow: Any, values: Sequence[int] | Numbers, kind: type = np.int32) -> Any:
    return arrow.array(np.asarray(values, kind))


def _offsets(arrow: Any, counts: Sequence[int] | Numbers) -> Any:
    return _numbers(arrow, np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64))))


def _encodable(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
