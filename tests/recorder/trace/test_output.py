"""What the tracer's rows become on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.ipc

from detrun.recorder.trace.draft import Draft
from detrun.recorder.trace.heads import Heads
from detrun.recorder.trace.output import TraceOutput, fetch_digests
from detrun.recorder.trace.rows import Rows
from detrun.recorder.trace.window import TraceSettings

SETTINGS = TraceSettings(level=4, first=1, last=2)


def rows(count: int, step: int = 1, first: int = 0) -> Rows:
    heads, made = Heads(lambda _: True), Rows(step, first)
    for number in range(count):
        begun = heads.begin(("forward", f"layers.{number % 3}", 0), "aten.mm.default", "op", step)
        assert begun is not None
        draft = Draft(begun[0], step, begun[1], "")
        draft.parts, draft.writers, draft.n_inputs = [b"%16d" % number, b"o" * 16], [first + number - 1], 1
        draft.texts = ["float32[1]", "->", "float32[1]"]
        made.add(draft)
    return made


def index(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "trace" / "rank00000.jsonl").read_text().splitlines()]


def test_the_place_among_the_ranks_is_asked_for_when_rows_are_there(tmp_path: Path) -> None:
    known: dict[str, int] = {}
    output = TraceOutput(tmp_path, 0, SETTINGS, lambda: known)
    known["dp"] = 3
    assert output.write(rows(2))
    stream = pyarrow.ipc.open_stream((tmp_path / "trace" / "rank00000.arrow").read_bytes())
    assert json.loads(stream.schema.metadata[b"detrun.coordinates"]) == {"dp": 3}


def test_a_step_in_several_batches_has_the_digest_of_the_step_in_one(tmp_path: Path) -> None:
    for name, cuts in (("one", [7]), ("three", [2, 1, 4])):
        output, left = TraceOutput(tmp_path / name, 0, SETTINGS), rows(7)
        for cut in cuts:
            some, left = left.split(cut)
            assert output.write(some)
        output.end_step(1)
    one, three = index(tmp_path / "one")[1], index(tmp_path / "three")[1]
    assert three.pop("batches") == [0, 2]
    assert one.pop("batches") == [0, 0]
    assert one == three


def test_how_far_back_a_writer_lies_is_counted_over_the_whole_trace(tmp_path: Path) -> None:
    output = TraceOutput(tmp_path, 0, SETTINGS)
    output.write(rows(2))
    output.end_step(1)
    output.write(rows(2, step=2, first=2))
    stream = pyarrow.ipc.open_stream((tmp_path / "trace" / "rank00000.arrow").read_bytes())
    read = [row for batch in stream for row in batch.to_pylist()]
    assert [row["producers"] for row in read] == [[0], [1], [1], [1]]
    assert [(row["seq"], row["step"], row["scope"]) for row in read] == [
        (0, 1, "layers.0"), (1, 1, "layers.1"), (2, 2, "layers.0"), (3, 2, "layers.1"),
    ]  # fmt: skip


def test_digests_on_the_host_need_no_fetching() -> None:
    parts = [b"a" * 16]
    fetch_digests(parts, lambda _: (_ for _ in ()).throw(AssertionError("nothing is on a device")))
    assert parts == [b"a" * 16]
