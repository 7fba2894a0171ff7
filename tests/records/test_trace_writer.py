"""A trace's files: what is written stays, in columns that others can read, within its budget."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow
import pyarrow.ipc
import pytest

from detrun.records.trace_row import TRACE_FIELDS, TraceEvent
from detrun.records.trace_writer import TraceBatch, TraceWriter
from tests.trace_factory import TEXTS, make_batch

ROWS = [
    TraceEvent(
        seq=n, step=1, microbatch=0, phase="forward", scope=f"layers.{n % 2}", op="aten.mm.default", kind="op",
        occurrence=n // 2, inputs=(b"%16d" % n, b"w" * 16), outputs=(b"%16d" % (n + 1),), producers=(n, 0),
        rng=b"r" * 16 if n == 1 else None, rows=(1, 2, 1 << 63) if n == 2 else None, peer=3 if n == 3 else -1,
    )
    for n in range(6)
]  # fmt: skip


def writer(folder: Path, compression: Literal["zstd", "lz4"] = "zstd") -> TraceWriter:
    return TraceWriter(folder, 2, head={"level": 4}, metadata={"level": "4"}, compression=compression)


def tables() -> dict[str, dict[Any, int]]:
    return {name: {} for name in (*TEXTS, "digests")}


def arrow_file(folder: Path) -> Path:
    return folder / "trace" / "rank00002.arrow"


def read(folder: Path) -> list[dict[str, Any]]:
    with pyarrow.ipc.open_stream(arrow_file(folder).read_bytes()) as stream:
        assert stream.schema.names == [name for name, _ in TRACE_FIELDS]
        return [row for batch in stream for row in batch.to_pylist()]


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
@pytest.mark.parametrize("size", [1, 4, 6])
def test_every_field_comes_back(tmp_path: Path, compression: Literal["zstd", "lz4"], size: int) -> None:
    made, known = writer(tmp_path, compression), tables()
    for at in range(0, len(ROWS), size):
        assert made.write_batch(make_batch(ROWS[at : at + size], known))
    made.close()
    for row, event in zip(read(tmp_path), ROWS, strict=True):
        assert row.pop("parts") == [*event.inputs, *event.outputs]
        assert row.pop("n_inputs") == len(event.inputs)
        assert row.pop("rows") == (None if event.rows is None else list(event.rows))
        assert row.pop("producers") == list(event.producers)
        assert row == {name: getattr(event, name) for name in row}


def test_columns_of_numbers_may_be_arrays_and_columns_of_nothing_empty(tmp_path: Path) -> None:
    plain = [replace(row, rng=None, rows=None) for row in ROWS]
    lists = make_batch(plain, tables())
    numbers = ("seq", "step", "microbatch", "occurrence", "parts", "part_counts", "n_inputs", "producers", "peer")
    arrays = {name: np.array(getattr(lists, name), np.int64) for name in numbers}
    texts = {name: np.array(column, np.int32) for name, column in lists.numbers.items()}
    given = {**vars(lists), **arrays, "numbers": texts, "rng": [], "rows": []}
    for name, batch in (("lists", lists), ("arrays", TraceBatch(**given))):
        made = writer(tmp_path / name)
        made.write_batch(batch)
        made.close()
    assert arrow_file(tmp_path / "lists").read_bytes() == arrow_file(tmp_path / "arrays").read_bytes()


def test_what_was_written_before_a_crash_can_be_read(tmp_path: Path) -> None:
    made, known = writer(tmp_path), tables()
    made.write_batch(make_batch(ROWS[:3], known))
    made.write_batch(make_batch(ROWS[3:5], known))
    assert [row["seq"] for row in read(tmp_path)] == [0, 1, 2, 3, 4]


def test_a_batch_over_the_budget_is_not_written_at_all(tmp_path: Path) -> None:
    made, known = writer(tmp_path), tables()
    assert made.write_batch(make_batch(ROWS[:3], known))
    before = made.bytes
    assert before == sum(path.stat().st_size for path in (tmp_path / "trace").iterdir())
    assert not made.write_batch(make_batch(ROWS[3:], known), before + 10)
    made.close()
    assert (made.bytes, made.batches) == (before, 1)
    assert [row["seq"] for row in read(tmp_path)] == [0, 1, 2]


def test_the_description_may_be_completed_until_the_first_batch(tmp_path: Path) -> None:
    made = writer(tmp_path)
    made.metadata["coordinates"] = '{"dp": 1}'
    made.write_batch(make_batch(ROWS, tables()))
    metadata = pyarrow.ipc.open_stream(arrow_file(tmp_path).read_bytes()).schema.metadata
    expected = {"schema_version": "1", "kind": "trace", "rank": "2", "level": "4", "coordinates": '{"dp": 1}'}
    assert metadata == {f"detrun.{key}".encode(): value.encode() for key, value in expected.items()}


def test_the_index_begins_with_version_and_rank_and_grows_by_lines(tmp_path: Path) -> None:
    made = writer(tmp_path)
    made.write_line({"step": 1, "scopes": {"ä": "0"}})
    lines = (tmp_path / "trace" / "rank00002.jsonl").read_text(encoding="ascii").splitlines()
    assert [json.loads(line) for line in lines] == [{"v": 1, "rank": 2, "level": 4}, {"step": 1, "scopes": {"ä": "0"}}]


def test_a_text_that_is_no_unicode_is_written_escaped(tmp_path: Path) -> None:
    made = writer(tmp_path)
    made.write_batch(make_batch([replace(ROWS[0], scope="a\udcffb"), replace(ROWS[1], scope="ä")], tables()))
    assert [row["scope"] for row in read(tmp_path)] == ["a\\udcffb", "ä"]


def test_files_of_a_run_before_are_begun_anew(tmp_path: Path) -> None:
    for _ in range(2):
        made = writer(tmp_path)
        made.write_batch(make_batch(ROWS, tables()))
        made.close()
    assert len(read(tmp_path)) == len(ROWS)
