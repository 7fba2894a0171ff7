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
from typing import Any

from detrun.records.trace_row import METADATA, SCHEMA_VERSION, TRACE_FIELDS, TRACE_KIND


@dataclass
class TraceBatch:
    """Rows in columns, as the tracer gathers them. All columns are of one length.

    A text column holds numbers of entries in the table of its name in `texts`; `parts` and `producers` are the lists
    of all rows one behind the other, with the number of each row's entries in `part_counts` and `n_inputs`. `digests`:
    the entries that `parts` counts from. A table may be longer than the batch needs: one that continues the one of the
    batch before begins with the same entries.
    """

    seq: Sequence[int]
    step: Sequence[int]
    microbatch: Sequence[int]
    occurrence: Sequence[int]
    numbers: Mapping[str, Sequence[int]]
    texts: Mapping[str, Sequence[str]]
    parts: Sequence[int]
    part_counts: Sequence[int]
    n_inputs: Sequence[int]
    digests: Sequence[bytes]
    producers: Sequence[int]
    rng: Sequence[bytes | None]
    peer: Sequence[int]
    rows: Sequence[Sequence[int] | None] = field(default_factory=list)


class TraceWriter:
    """Appends to the two files of one rank. Every call opens and closes them: a program may close descriptors that it
    does not know. Raises OSError; ImportError where pyarrow is not installed."""

    def __init__(self, attempt: Path, rank: int, head: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
        """Begins both files anew. head: what the first line of the index says beside version and rank; metadata: what
        the stream's description says beside version and kind."""
        self.rank = rank
        self.bytes = 0
        """Bytes written to both files."""
        self.batches = 0
        self._folder = attempt / "trace"
        self._arrow_path = self._folder / f"rank{rank:05d}.arrow"
        self._index_path = self._folder / f"rank{rank:05d}.jsonl"
        self._metadata = dict(metadata)
        self._sink = io.BytesIO()
        self._stream: Any = None
        self._arrow: Any = None
        self._schema: Any = None
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
        self._schema = trace_schema(pyarrow, self.rank, self._metadata)
        options = pyarrow.ipc.IpcWriteOptions(
            compression="zstd", emit_dictionary_deltas=True, unify_dictionaries=False, use_threads=False
        )
        self._stream = pyarrow.ipc.new_stream(pyarrow.PythonFile(self._sink, "w"), self._schema, options=options)

    def _flush(self, most: int | None) -> bool:
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
        columns: list[Any] = []
        for name, kind in TRACE_FIELDS:
            if kind == "text":
                texts = [text if text.isascii() else _encodable(text) for text in batch.texts[name]]
                numbers = arrow.array(batch.numbers[name], arrow.int32())
                column = arrow.DictionaryArray.from_arrays(numbers, arrow.array(texts, arrow.string()))
            elif kind == "digests":
                digests = arrow.array(batch.digests, arrow.binary(16))
                values = arrow.DictionaryArray.from_arrays(arrow.array(batch.parts, arrow.int32()), digests)
                column = arrow.ListArray.from_arrays(_offsets(arrow, batch.part_counts), values)
            elif kind == "int32-list":
                values = arrow.array(batch.producers, arrow.int32())
                column = arrow.ListArray.from_arrays(_offsets(arrow, batch.n_inputs), values)
            elif kind == "digest":
                column = arrow.array(batch.rng, arrow.binary(16))
            elif kind == "uint64-list":
                column = arrow.array(batch.rows or [None] * len(batch.seq), arrow.list_(arrow.uint64()))
            else:
                column = arrow.array(getattr(batch, name), arrow.int64() if kind == "int64" else arrow.int32())
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


def _offsets(arrow: Any, counts: Sequence[int]) -> Any:
    offsets, total = [0], 0
    for count in counts:
        total += count
        offsets.append(total)
    return arrow.array(offsets, arrow.int32())


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
