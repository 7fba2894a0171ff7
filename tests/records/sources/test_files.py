"""JSON lines, CSV, event files and wandb's offline files, read as they were written, also where they are torn."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detrun.records.sources import Part, Pattern, SourceSpec, Stream, read_attempt
from detrun.records.sources.number import parse_number
from detrun.records.sources.reading import Found, Reading, merge


def stream_of(source: str, *paths: Path | Part, metrics: tuple[str, ...] = ("loss",), **spec: object) -> Stream:
    parts = [(path if isinstance(path, Part) else Part(path), "f") for path in paths]
    named = [(part, part.path.name) for part, _ in parts]
    return read_attempt(SourceSpec(source, "x", **spec), Pattern(), named, metrics)  # type: ignore[arg-type]


def texts(stream: Stream, metric: str = "loss") -> dict[int, str]:
    return {step: str(reading.number.printed) for step, reading in stream.series[metric].items() if reading.number}


def kinds(stream: Stream) -> list[str]:
    return [problem.kind for problem in stream.problems]


def test_json_numbers_keep_their_digits(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "loss": 1.2300000E+1}\n{"step": 2, "loss": "0x1.8p+1"}\n{"event": "start"}\n')
    stream = stream_of("jsonl", path)
    assert texts(stream) == {1: "1.2300000E+1", 2: "0x1.8p+1"}
    assert [r.number.resolution for r in stream.series["loss"].values() if r.number] == ["decimal", "exact"]
    assert stream.series["loss"][2].place == "m.jsonl:2"
    assert not stream.problems


def test_bits_in_json_are_exact(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "loss": {"bits": "0x3f800001", "dtype": "float32"}}\n')
    (reading,) = stream_of("jsonl", path).series["loss"].values()
    assert reading.number is not None and (reading.number.bits, reading.number.dtype) == (0x3F800001, "float32")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"step": 2, "loss": 1', "cut off"),
        ('{"step": 2, "loss": tru}\n', "no valid JSON"),
        ('{"step": 2, "loss": 1.0, "loss": 2.0}\n', "twice"),
        ('{"loss": 1.0}\n', "no step"),
        ('{"step": 2.5, "loss": 1.0}\n', "no step"),
        ('{"step": 2, "loss": "1,024.0"}\n', "no number"),
        ('{"step": 2, "loss": true}\n', "no number"),
    ],
)
def test_what_json_cannot_be_taken_is_a_problem(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n' + line)
    stream = stream_of("jsonl", path)
    assert texts(stream) == {1: "1.0"}
    (problem,) = stream.problems
    assert said.replace("no valid", "not valid") in problem.what


def test_nested_keys_and_steps_from_zero(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"it": 0, "train": {"loss": 1.5}}\n{"it": 1, "train": {"loss": 1.25}}\n')
    stream = stream_of("jsonl", path, step="it", first_step=0, names={"loss": "train.loss"})
    assert texts(stream, "train.loss") == {1: "1.5", 2: "1.25"}


def test_attempts_that_append_to_one_file_are_told_apart_by_its_size(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    before = '{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 2.0}\n{"step": 3, "lo'
    path.write_text(before + '{"step": 2, "loss": 2.5}\n{"step": 3, "loss": 3.5}\n')
    first = stream_of("jsonl", Part(path, 0, len(before)))
    second = stream_of("jsonl", Part(path, len(before)))
    assert texts(first) == {1: "1.0", 2: "2.0"} and kinds(first) == ["torn"]
    assert texts(second) == {2: "2.5", 3: "3.5"} and not second.problems
    assert second.series["loss"][2].line == 3


def test_csv_with_a_second_header_and_empty_cells(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    path.write_text("step,loss,val\n1,1.0,\n1,,0.5\nstep,loss,val\n2,1.50,\n3,0x1.8p+0,\n")
    stream = stream_of("csv", path)
    assert texts(stream) == {1: "1.0", 2: "1.50", 3: "0x1.8p+0"}
    assert not stream.problems


def test_csv_of_a_later_attempt_has_the_header_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    head = "loss,step\n1.0,1\n"
    path.write_text(head + "2.0,2\n3.0,3")
    stream = stream_of("csv", Part(path, len(head)))
    assert texts(stream) == {2: "2.0"}
    assert kinds(stream) == ["torn"]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("a,loss\n1,2.0\n", "no column"),
        ("step,loss\n1,2.0,3\n", "3 cells"),
        ("step,loss,loss\n1,2,3\n", "twice"),
        ("step,loss\nx,2.0\n", "no step"),
        ("step,loss\n1,2.0 s\n", "no number"),
    ],
)
def test_what_csv_cannot_be_taken_is_a_problem(tmp_path: Path, rows: str, said: str) -> None:
    path = tmp_path / "m.csv"
    path.write_text(rows)
    (problem,) = stream_of("csv", path).problems
    assert said in problem.what


def event_file(folder: Path, values: dict[int, float], tag: str = "loss", double: bool = False) -> Path:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    for step, value in values.items():
        if double:
            tensor = TensorProto(dtype=2, double_val=[value])
            entry = Summary.Value(tag=tag, tensor=tensor)
        else:
            entry = Summary.Value(tag=tag, simple_value=value)
        writer.add_event(Event(step=step, wall_time=0.0, summary=Summary(value=[entry])))
    writer.close()
    (path,) = folder.glob("*tfevents*")
    return path


def test_event_files_hold_float32(tmp_path: Path) -> None:
    path = event_file(tmp_path, {1: 0.1, 2: math.nan})
    series = stream_of("tensorboard", path).series["loss"]
    numbers = [series[step].number for step in (1, 2)]
    assert [number.resolution for number in numbers if number] == ["float32", "float32"]
    assert numbers[0] is not None and numbers[0].bits == struct.unpack("<I", struct.pack("<f", 0.1))[0]
    assert numbers[1] is not None and numbers[1].is_nan


def test_event_files_may_hold_doubles(tmp_path: Path) -> None:
    series = stream_of("tensorboard", event_file(tmp_path, {1: 0.1}, double=True)).series["loss"]
    assert series[1].number is not None and (series[1].number.resolution, series[1].number.value) == ("exact", 0.1)


def test_an_event_file_that_was_cut_off_is_torn_and_keeps_what_is_whole(tmp_path: Path) -> None:
    path = event_file(tmp_path, {1: 1.0, 2: 2.0, 3: 3.0})
    os.truncate(path, path.stat().st_size - 5)
    stream = stream_of("tensorboard", path)
    assert sorted(stream.series["loss"]) == [1, 2]
    assert kinds(stream) == ["torn"]


def test_a_damaged_event_file_is_a_problem(tmp_path: Path) -> None:
    path = event_file(tmp_path, {1: 1.0, 2: 2.0})
    raw = bytearray(path.read_bytes())
    raw[-6] ^= 0xFF
    path.write_bytes(raw)
    assert kinds(stream_of("tensorboard", path)) == ["invalid"]


def test_overlapping_event_files_that_differ_are_a_conflict_and_neither_wins(tmp_path: Path) -> None:
    one = event_file(tmp_path / "one", {1: 1.0, 2: 2.0, 3: 3.0})
    two = event_file(tmp_path / "two", {3: 3.5, 4: 4.0})
    stream = stream_of("tensorboard", one, two)
    assert sorted(stream.series["loss"]) == [1, 2, 4]
    assert kinds(stream) == ["conflict"]


def wandb_file(path: Path, records: list[bytes]) -> Path:
    import zlib

    raw = b":W&B\xe1\xbe\x00"
    for body in records:
        first, rest = True, body
        while first or rest:
            room = 32768 - len(raw) % 32768
            if room < 7:
                raw += b"\0" * room
                room = 32768
            piece, rest = rest[: room - 7], rest[room - 7 :]
            kind = (1 if not rest else 2) if first else (4 if not rest else 3)
            raw += struct.pack("<IHB", zlib.crc32(bytes([kind]) + piece), len(piece), kind) + piece
            first = False
    path.write_bytes(raw)
    return path


def history(step: int, **values: object) -> bytes:
    from importlib import import_module

    record = import_module("wandb.proto.wandb_internal_pb2").Record()
    record.history.step.num = step
    for key, value in values.items():
        item = record.history.item.add()
        item.key, item.value_json = key, json.dumps(value)
    return bytes(record.SerializeToString())


def test_wandb_records_over_block_bounds(tmp_path: Path) -> None:
    records = [history(step, loss=1 / step, note="x" * (9000 * step)) for step in range(1, 9)]
    stream = stream_of("wandb", wandb_file(tmp_path / "run-1.wandb", records))
    assert texts(stream) == {step: repr(1 / step) for step in range(1, 9)}
    assert not stream.problems


def test_a_wandb_file_that_was_cut_off_is_torn(tmp_path: Path) -> None:
    path = wandb_file(tmp_path / "run-1.wandb", [history(step, loss=0.5) for step in (1, 2)])
    os.truncate(path, path.stat().st_size - 3)
    stream = stream_of("wandb", path)
    assert list(stream.series["loss"]) == [1] and kinds(stream) == ["torn"]


def test_a_damaged_wandb_file_is_a_problem(tmp_path: Path) -> None:
    path = wandb_file(tmp_path / "run-1.wandb", [history(1, loss=0.5)])
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert kinds(stream_of("wandb", path)) == ["invalid"]


@pytest.mark.slow
@pytest.mark.full  # it starts a server of its own, which on a busy machine comes too late for it
def test_what_wandb_itself_writes_offline_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="p", mode="offline", dir=str(tmp_path))
    for step in (1, 2, 3):
        run.log({"loss": 1 / (step + 2)}, step=step)
    run.finish()
    (path,) = tmp_path.glob("**/*.wandb")
    assert texts(stream_of("wandb", path)) == {step: repr(1 / (step + 2)) for step in (1, 2, 3)}


def test_a_link_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "real.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "real.jsonl")
    stream = stream_of("jsonl", tmp_path / "link.jsonl")
    assert not stream.series and kinds(stream) == ["file"]


readings = st.lists(st.tuples(st.integers(1, 6), st.sampled_from(["1.0", "2.0", "1.00"])), max_size=8)


@given(st.lists(readings, max_size=4), st.randoms())
def test_merging_files_knows_no_order_and_no_first_value_wins(
    files: list[list[tuple[int, str]]], random: object
) -> None:
    def of(file: list[tuple[int, str]], name: str) -> tuple[str, Found]:
        made = [
            Reading("loss", step, parse_number(text), name, line, step) for line, (step, text) in enumerate(file, 1)
        ]
        return name, Found(made)

    named = [of(file, f"f{index}") for index, file in enumerate(files)]
    shuffled = list(named)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    a, b = merge(named), merge(shuffled)
    given_ = {}
    for file in files:
        for step, text in file:
            given_.setdefault(step, set()).add(float(text))
    agreed = {step for step, values in given_.items() if len(values) == 1}
    for stream in (a, b):
        assert set(stream.series.get("loss", {})) == agreed
        assert len([p for p in stream.problems if p.kind == "conflict"]) == len(given_) - len(agreed)
