"""A trace gives back what was written, tells what is missing, and believes nothing that stands in a hostile file."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from detrun.errors import RecordError
from detrun.records import trace_table
from detrun.records.arrow_messages import END_MARK, StreamIndex
from detrun.records.layout import AttemptFolder
from detrun.records.trace_reader import open_trace
from detrun.records.trace_row import TraceEvent
from tests.trace_factory import Arm, Value, attempt_in, write_trace


def program(steps: int = 3, calls: int = 20) -> list[TraceEvent]:
    arm = Arm()
    w = Value("w")
    for step in range(1, steps + 1):
        arm.step = step
        for number in range(calls):
            arm.microbatch = number % 2
            out = arm.op(
                f"aten.op{number % 5}.default", [Value(f"x{number}"), w], 1 + number % 2, scope=f"layers.{number % 3}",
                rng=f"state {number}" if number % 4 == 0 else None, flags="o0:in-flight" if number == 7 else "",
                scalars="0x1p+0" if number % 3 else "",
            )  # fmt: skip
            if number % 6 == 0:
                arm.op("c10d.allreduce_", [out[0]], kind="collective", group="0-3", into=[out[0]])
        arm.op("aten.add_.Tensor", [w, out[0]], phase="optimizer", into=[w])
        arm.op("c10d.send", [w], 0, kind="send", peer=3)
    return [replace(event, rows=(1, 2, event.seq) if event.seq % 5 == 0 else None) for event in arm.events]


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptFolder:
    return attempt_in(tmp_path, "a")


@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_events_come_back_as_they_were_written(attempt: AttemptFolder, batch: int) -> None:
    events = program()
    write_trace(attempt, 0, events, batch=batch)
    with open_trace(attempt, 0) as trace:
        assert [entry.step for entry in trace.index] == [1, 2, 3]
        read = [event for entry in trace.index for event in trace.events(entry.step)]
        assert list(trace.events(2)) == [event for event in events if event.step == 2]  # any step, in any order
        assert (trace.level, trace.digest, trace.scopes, trace.torn) == (4, "xxh3-128", None, None)
        assert trace.end is not None
        assert trace.end.complete
        assert trace.end.coverage["events"] == len(events)
    assert read == events


def test_events_that_were_written_late_are_in_execution_order(attempt: AttemptFolder) -> None:
    events = program(1)
    write_trace(attempt, 0, [*events[5:], *events[:5]], batch=4)
    with open_trace(attempt.path, 0) as trace:
        assert list(trace.events(1)) == events


def test_a_long_trace_is_read_a_step_at_a_time(attempt: AttemptFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    write_trace(attempt, 0, program(6), batch=9)
    read: list[int] = []
    raw = StreamIndex.raw
    monkeypatch.setattr(StreamIndex, "raw", lambda self, message: read.append(message.start) or raw(self, message))
    with open_trace(attempt, 0) as trace:
        trace.table(2)
        once = len(read)
        trace.table(5)
        batches = [trace.step(step).batches for step in (2, 5)]  # type: ignore[union-attr]
        assert len(set(read[1:once]) & set(read[once:])) <= 6  # dictionaries that did not change, and the schema
        assert batches == [(3, 5), (12, 14)]


def test_a_trace_without_an_end_line_is_torn_and_its_last_step_unfinished(attempt: AttemptFolder) -> None:
    events = program()
    write_trace(attempt, 0, events, batch=8, end=False, unfinished=True)
    with open_trace(attempt, 0) as trace:
        assert trace.torn == "its index has no end line"
        assert trace.end is None
        assert [(entry.step, entry.finished) for entry in trace.index] == [(1, True), (2, True), (3, False)]
        assert list(trace.events(3)) == [event for event in events if event.step == 3]


@pytest.mark.parametrize("cut", [1, 9, 200, 3000])
def test_a_cut_file_gives_what_is_whole_in_it(attempt: AttemptFolder, cut: int) -> None:
    events = program()
    write_trace(attempt, 0, events, batch=8)
    os.truncate(attempt.trace(0), attempt.trace(0).stat().st_size - cut)
    with open_trace(attempt, 0) as trace:
        assert trace.torn == "is cut off"
        assert list(trace.events(1)) == [event for event in events if event.step == 1]
        if cut > 9:
            with pytest.raises(RecordError, match="ends after batch"):
                trace.table(3)


@pytest.mark.parametrize("cut", [1, 40])
def test_an_index_that_ends_within_a_line_is_torn(attempt: AttemptFolder, cut: int) -> None:
    write_trace(attempt, 0, program(), end=False)
    os.truncate(attempt.trace_index(0), attempt.trace_index(0).stat().st_size - cut)
    with open_trace(attempt, 0) as trace:
        assert trace.torn == "its index ends within a line"
        assert [(entry.step, entry.finished) for entry in trace.index] == [(1, True), (2, True), (3, False)]


def test_a_trace_of_nothing_is_a_trace(attempt: AttemptFolder) -> None:
    write_trace(attempt, 0, [])
    with open_trace(attempt, 0) as trace:
        assert (trace.index, trace.torn) == ([], None)
        with pytest.raises(RecordError, match="has no step 1"):
            trace.table(1)


def changed(attempt: AttemptFolder, change: Callable[[list[bytes]], list[bytes]]) -> None:
    lines = attempt.trace_index(0).read_bytes().split(b"\n")
    attempt.trace_index(0).write_bytes(b"\n".join(change(lines)))


@pytest.mark.parametrize(
    ("line", "new", "what"),
    [
        (0, b'{"v":9,"rank":0}', "has schema version 9"),
        (0, b'{"v":1,"rank":4}', "is the index of rank 4"),
        (0, b"[]", "is not"),
        (1, b'{"step":-1,"events":3,"batches":[0,0]}', "tells of no step"),
        (1, b'{"step":1,"events":1e999,"batches":[0,0]}', "JSON|tells of no step"),
        (1, b'{"step":1,"events":99999999999999999999,"batches":[0,0]}', "tells of no step"),
        (1, b'{"step":1,"events":3,"batches":[5,2]}', "cannot be"),
        (1, b'{"step":1,"events":3,"batches":[-4,-2]}', "cannot be"),
        (1, b'{"step":7,"events":3,"batches":[0,0]}', "cannot be"),
        (1, b"{" * 100_000, "not valid JSON"),
    ],
)
def test_an_index_that_says_what_cannot_be_is_refused(attempt: AttemptFolder, line: int, new: bytes, what: str) -> None:
    write_trace(attempt, 0, program())
    changed(attempt, lambda lines: [*lines[:line], new, *lines[line + 1 :]])
    with pytest.raises(RecordError, match=what):
        open_trace(attempt, 0)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ('"events":26', '"events":25', "holds 26 events of step 1, its index says 25"),
        ('"batches":[0,0]', '"batches":[0,900]', "cannot be"),
        ('"batches":[2,2]', '"batches":[2,1000000000]', "ends after batch 2"),
        ('"batches":[0,0]', '"batches":[1,1]', "cannot be"),
    ],
)
def test_an_index_and_a_stream_that_do_not_fit_are_refused(
    attempt: AttemptFolder, old: str, new: str, what: str
) -> None:
    write_trace(attempt, 0, program(), batch=100)
    changed(attempt, lambda lines: [line.replace(old.encode(), new.encode()) for line in lines])
    with pytest.raises(RecordError, match=what), open_trace(attempt, 0) as trace:
        for entry in trace.index:
            trace.table(entry.step)


def rewritten(attempt: AttemptFolder, **columns: Callable[[pyarrow.Array], pyarrow.Array]) -> None:
    """The first batch's columns replaced, the rest of the stream left out."""
    stream = pyarrow.ipc.open_stream(attempt.trace(0).read_bytes())
    batch = stream.read_next_batch()
    arrays = [
        columns[name](batch.column(name)) if name in columns else batch.column(name) for name in batch.schema.names
    ]
    with pyarrow.OSFile(str(attempt.trace(0)), "wb") as sink, pyarrow.ipc.new_stream(sink, stream.schema) as writer:
        writer.write_batch(pyarrow.RecordBatch.from_arrays(arrays, schema=stream.schema))


def int32(*values: int | None) -> pyarrow.Array:
    return pyarrow.array(values, pyarrow.int32())


@pytest.mark.parametrize(
    ("column", "change", "what"),
    [
        ("seq", lambda a: pyarrow.array([*a.to_pylist()[:-1], None], pyarrow.int64()), "lacks seq"),
        ("seq", lambda a: pyarrow.array([0] * len(a), pyarrow.int64()), "two events with one number"),
        ("seq", lambda a: pyarrow.array([*range(len(a) - 1), -5], pyarrow.int64()), "seq below 0"),
        ("step", lambda a: int32(*[9] * len(a)), "events of other steps"),
        ("occurrence", lambda a: int32(*[-1] * len(a)), "occurrence below 0"),
        ("n_inputs", lambda a: int32(*[-1] * len(a)), "do not fit"),
        ("n_inputs", lambda a: int32(*[2_000_000_000] * len(a)), "do not fit"),
        ("producers", lambda a: pyarrow.array([[-1 for _ in row] for row in a.to_pylist()], a.type), "later event"),
        ("producers", lambda a: pyarrow.array([[] for _ in a], a.type), "do not fit"),
        ("producers", lambda a: pyarrow.array([None for _ in a], a.type), "lacks producers"),
        ("op", lambda a: pyarrow.array([None] * len(a), pyarrow.string()).dictionary_encode().cast(a.type), "lacks op"),
        ("parts", lambda a: pyarrow.array([[None for _ in row] for row in a.to_pylist()], a.type), "lacks parts"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_are_refused(
    attempt: AttemptFolder, column: str, change: Callable[[pyarrow.Array], pyarrow.Array], what: str
) -> None:
    write_trace(attempt, 0, program(1), batch=100)
    rewritten(attempt, **{column: change})
    with open_trace(attempt, 0) as trace, pytest.raises(RecordError, match=what):
        trace.table(1)


def test_a_code_that_stands_for_nothing_is_refused(attempt: AttemptFolder) -> None:
    write_trace(attempt, 0, program(1), batch=100)
    unsafe = lambda a: pyarrow.DictionaryArray.from_arrays(  # noqa: E731
        int32(*[99] * len(a)), a.dictionary, safe=False
    )
    rewritten(attempt, op=unsafe)
    with open_trace(attempt, 0) as trace, pytest.raises(RecordError, match="refers to a value of op"):
        trace.table(1)


def test_other_columns_another_rank_and_another_kind_of_file_are_refused(attempt: AttemptFolder) -> None:
    write_trace(attempt, 0, program(1))
    stream = pyarrow.ipc.open_stream(attempt.trace(0).read_bytes())
    whole = stream.read_all()
    for schema, what in (
        (whole.schema.with_metadata({**whole.schema.metadata, b"detrun.schema_version": b"2"}), "has schema version 2"),
        (whole.schema.with_metadata({**whole.schema.metadata, b"detrun.rank": b"3"}), "is the trace of rank 3"),
        (whole.schema.with_metadata({}), "is no trace"),
    ):
        with pyarrow.OSFile(str(attempt.trace(0)), "wb") as sink, pyarrow.ipc.new_stream(sink, schema) as writer:
            writer.write_table(whole.replace_schema_metadata(schema.metadata))
        with pytest.raises(RecordError, match=what):
            open_trace(attempt, 0)
    fewer = whole.drop_columns(["peer"])
    with pyarrow.OSFile(str(attempt.trace(0)), "wb") as sink, pyarrow.ipc.new_stream(sink, fewer.schema) as writer:
        writer.write_table(fewer)
    with pytest.raises(RecordError, match="has other columns"):
        open_trace(attempt, 0)


def test_a_count_that_only_the_file_believes_in_allocates_nothing(attempt: AttemptFolder) -> None:
    write_trace(attempt, 0, program(1), batch=100)
    raw = bytearray(attempt.trace(0).read_bytes())
    with open_trace(attempt, 0) as trace:
        message = trace._events().needed(0, 0)[-1]
    offset = next(offset for offset, size in message.buffers if size >= 16)
    raw[message.body + offset : message.body + offset + 8] = struct.pack("<q", 1 << 50)
    attempt.trace(0).write_bytes(raw)
    with open_trace(attempt, 0) as trace, pytest.raises(RecordError, match="is too large: 1,125,899,906"):
        trace.table(1)


def test_a_step_past_all_measure_is_refused(attempt: AttemptFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    write_trace(attempt, 0, program(1))
    monkeypatch.setattr("detrun.records.trace_reader.MAX_STEP_BYTES", 1000)
    with open_trace(attempt, 0) as trace, pytest.raises(RecordError, match="is too large"):
        trace.table(1)
    monkeypatch.undo()
    monkeypatch.setattr(trace_table, "MAX_WORDS", 2)
    with open_trace(attempt, 0) as trace, pytest.raises(RecordError, match="different values of"):
        trace.table(1)


def test_what_is_no_plain_file_is_refused(attempt: AttemptFolder, tmp_path: Path) -> None:
    write_trace(attempt, 0, program(1))
    target = tmp_path / "elsewhere"
    attempt.trace(0).rename(target)
    attempt.trace(0).symlink_to(target)
    with pytest.raises(RecordError, match="symbolic link"):
        open_trace(attempt, 0)
    attempt.trace(0).unlink()
    os.mkfifo(attempt.trace(0))
    with pytest.raises(RecordError, match="not a plain file"):
        open_trace(attempt, 0)
    attempt.trace(0).unlink()
    for content, what in ((b"", "is empty"), (b"PAR1" * 99, "no Arrow stream"), (END_MARK, "no Arrow stream")):
        attempt.trace(0).write_bytes(content)
        with pytest.raises(RecordError, match=what):
            open_trace(attempt, 0)
    attempt.trace(0).unlink()
    with pytest.raises(RecordError, match="is missing"):
        open_trace(attempt, 0)


FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(st.data())
def test_a_file_with_any_bytes_changed_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    attempt = attempt_in(tmp_path, "fuzz")
    write_trace(attempt, 0, program(2, 8), batch=8)
    path = data.draw(st.sampled_from([attempt.trace(0), attempt.trace_index(0)]))
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        new = data.draw(st.sampled_from([b"\xff\xff\xff\xff", b"\0\0\0\0\0\0\0\0", b"\x7f", b"\x01", b'"', b"9"]))
        raw[at : at + len(new)] = new
    path.write_bytes(raw[: data.draw(st.sampled_from([len(raw), len(raw) // 2]))])
    try:
        with open_trace(attempt, 0) as trace:
            for entry in trace.index:
                for event in trace.events(entry.step):
                    assert len(event.producers) == len(event.inputs)
                    json.dumps([event.op, event.scope, event.signature])
    except RecordError as error:
        assert error.where
