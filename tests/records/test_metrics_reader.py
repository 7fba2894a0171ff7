"""Reading metrics files: whole ones, torn ones, and ones that nobody should trust."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detrun.records.metrics_line import LineReader, UnusableLine, parse_line
from detrun.records.metrics_reader import parse_rank_metrics, read_rank_metrics, tail_steps
from detrun.records.metrics_writer import MetricValue, StepLine, encode, encode_supplement
from tests.records_factory import Made, digest, metrics_bytes

CLEAN = metrics_bytes(Made(steps=5), 0)


def line(step: int = 1, **keys: object) -> bytes:
    return json.dumps({"v": 1, "step": step, "metrics": {}, "microbatches": 1, **keys}).encode() + b"\n"


def test_a_clean_file_has_its_steps_and_no_problems() -> None:
    records = parse_rank_metrics(CLEAN)
    assert list(records.steps) == [1, 2, 3, 4, 5]
    assert records.problems == []
    step = records.steps[3]
    assert list(step.contents.metrics) == ["loss", "lm_loss", "load_balancing_loss", "mtp_loss", "grad_norm"]
    assert step.contents.state["parameters"] == f"xxh3:{step.parameters}"


def test_a_learned_shape_says_the_same_as_a_full_parse() -> None:
    reader = LineReader()
    for raw in CLEAN.splitlines():
        quick, (full, _) = reader.parse(raw), parse_line(raw)
        assert quick.held is full.held
        assert (quick.step, quick.microbatches, quick.parameters) == (full.step, full.microbatches, full.parameters)
        assert quick.contents.metrics == full.contents.metrics
        assert quick.contents.state == full.contents.state
        assert (quick.contents.batch, quick.contents.rng) == (full.contents.batch, full.contents.rng)
    assert len(reader._patterns) == 1


@given(st.integers(0, len(CLEAN.splitlines()[1]) - 1), st.integers(0, 7))
def test_a_learned_shape_lets_nothing_pass_that_a_full_parse_refuses(place: int, bit: int) -> None:
    first, second = CLEAN.splitlines()[:2]
    spoilt = bytearray(second)
    spoilt[place] ^= 1 << bit
    reader = LineReader()
    reader.parse(first)
    try:
        full = parse_line(bytes(spoilt))[0]
    except UnusableLine as refused:
        with pytest.raises(type(refused)):
            reader.parse(bytes(spoilt))
        return
    quick = reader.parse(bytes(spoilt))
    assert quick.step == full.step
    assert quick.contents.metrics == full.contents.metrics
    assert quick.contents.state == full.contents.state
    assert quick.contents.other == full.contents.other
    assert quick.held is full.held


def test_lines_of_another_arm_are_the_same_objects() -> None:
    a = parse_rank_metrics(CLEAN)
    assert parse_rank_metrics(CLEAN, a) is a
    b = parse_rank_metrics(CLEAN[: CLEAN.rindex(b"\n", 0, -1) + 1], a)
    assert all(b.steps[step] is a.steps[step] for step in (1, 2, 3, 4))


@pytest.mark.parametrize(
    ("raw", "kind", "says"),
    [
        (b"", "empty", "empty"),
        (CLEAN[:-1], "torn", "line 5 is cut off"),
        (CLEAN[:30], "torn", "line 1 is cut off"),
        (b"\n" + CLEAN, "invalid", "line 1 is not valid JSON"),
        (b"\0" * 50 + b"\n" + CLEAN, "invalid", "line 1 is not valid JSON"),
        (b"\xff\xfe\n" + CLEAN, "invalid", "line 1 is not valid JSON"),
        (b"[" * 5000 + b"\n" + CLEAN, "invalid", "line 1 is not valid JSON"),
        (b'"' + b"x" * (5 << 20) + b'"\n' + CLEAN, "invalid", "5,242,882 bytes long"),
        (b"7\n", "invalid", "not a JSON object"),
        (line(v=2), "schema", "schema version 2"),
        (line(v=True), "schema", "schema version True"),
        (line(step=0), "invalid", "no step number"),
        (line(step=True), "invalid", "no step number"),
        (line(step="7"), "invalid", "no step number"),
        (line(metrics=None), "invalid", "no metrics"),
        (line(metrics={"loss": 4.7}), "invalid", "gives loss no bits"),
        (line(metrics={"loss": {"bits": "0x4", "dtype": "float32"}}), "invalid", "gives loss no bits"),
        (line(metrics={"loss": {"bits": "0x0000000G", "dtype": "float32"}}), "invalid", "gives loss no bits"),
        (line(metrics={"loss": {"bits": "0x00000000", "dtype": "float31"}}), "invalid", "known dtype"),
        (line(metrics={"loss": {"bits": 5, "dtype": "float32"}}), "invalid", "gives loss no bits"),
        (line(batch="nonsense"), "invalid", "no digest of batch"),
        (line(batch=7), "invalid", "no digest of batch"),
        (line(state={"parameters": None}), "invalid", "no digest of parameters"),
        (line(state=[]), "invalid", "no object"),
        (line(microbatches=-1), "invalid", "micro-batches"),
        (line(skipped="yes"), "invalid", "skipped"),
        (line(1) + line(2) + line(1), "duplicate", "line 3 repeats step 1"),
        (line(1) + line(2) + line(1, batch=digest(1)), "duplicate", "line 3 is a second record of step 1"),
        (line(2) + line(1), "order", "line 2 holds step 1 after step 2"),
    ],
)
def test_whatever_is_wrong_becomes_a_problem_with_its_line(raw: bytes, kind: str, says: str) -> None:
    problems = parse_rank_metrics(raw).problems
    assert problems[0].kind == kind
    assert says in problems[0].what


def test_what_lies_behind_a_bad_line_is_still_read() -> None:
    lines = CLEAN.splitlines(keepends=True)
    records = parse_rank_metrics(b"".join([*lines[:2], b"garbage\n", *lines[3:]]))
    assert list(records.steps) == [1, 2, 4, 5]
    assert [problem.line for problem in records.problems] == [3]


def test_a_file_of_garbage_is_not_listed_line_by_line() -> None:
    assert len(parse_rank_metrics(b"x\n" * 10_000).problems) == 21


def test_supplements_join_their_step_by_precedence() -> None:
    loss = MetricValue("loss", "backward", 0x40000000, "float32")
    ours = MetricValue("loss", "record", 0x40000001, "float32")
    more = MetricValue("aux", "record", 0x3F800000, "float32")
    raw = encode(StepLine(1, [loss], 1)) + encode(StepLine(2, [loss], 1)) + encode_supplement(1, [ours, more])
    records = parse_rank_metrics(raw)
    assert records.problems == []
    metrics = records.steps[1].contents.metrics
    assert metrics["loss"]["bits"] == "0x40000001"
    assert metrics["loss (backward)"]["bits"] == "0x40000000"
    assert metrics["aux"]["source"] == "record"
    assert list(records.steps[2].contents.metrics) == ["loss"]


def test_a_supplement_may_come_before_its_step() -> None:
    more = MetricValue("aux", "record", 0x3F800000, "float32")
    raw = encode_supplement(1, [more]) + encode(StepLine(1, [], 3, batch=digest(1)))
    records = parse_rank_metrics(raw)
    assert records.problems == []
    assert records.steps[1].microbatches == 3
    assert list(records.steps[1].contents.metrics) == ["aux"]


def test_a_step_that_has_supplements_alone_was_not_finished() -> None:
    more = MetricValue("aux", "record", 0x3F800000, "float32")
    records = parse_rank_metrics(encode(StepLine(1, [more], 1)) + encode_supplement(2, [more]))
    assert [(problem.kind, problem.step) for problem in records.problems] == [("short", 2)]


def test_a_program_that_records_its_metrics_alone_finished_its_steps() -> None:
    more = MetricValue("aux", "record", 0x3F800000, "float32")
    records = parse_rank_metrics(encode(StepLine(1, [more])) + encode(StepLine(2, [more])))
    assert (records.problems, list(records.steps)) == ([], [1, 2])


def test_one_source_that_contradicts_itself_is_a_problem() -> None:
    loss = MetricValue("aux", "record", 0x40000000, "float32")
    other = MetricValue("aux", "record", 0x40000001, "float32")
    raw = encode(StepLine(1, [], 1)) + encode_supplement(1, [loss]) + encode_supplement(1, [other])
    assert parse_rank_metrics(raw).problems[0].what == "line 3 gives aux a second time, with other bits"


def test_the_same_number_recorded_twice_is_no_problem() -> None:
    aux = MetricValue("aux", "record", 0x40000000, "float32")
    raw = encode(StepLine(1, [], 1)) + encode_supplement(1, [aux]) + encode_supplement(1, [aux])
    records = parse_rank_metrics(raw)
    assert records.problems == []
    assert list(records.steps[1].contents.metrics) == ["aux"]


def test_links_folders_and_missing_files_are_problems(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(CLEAN)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert "symbolic link" in read_rank_metrics(tmp_path / "link").problems[0].what
    assert "a folder" in read_rank_metrics(tmp_path).problems[0].what
    assert read_rank_metrics(tmp_path / "none").problems[0].kind == "missing"


@given(st.binary(max_size=400))
def test_no_bytes_make_the_reader_fail(raw: bytes) -> None:
    parse_rank_metrics(raw)
    parse_rank_metrics(CLEAN + raw)


def test_following_a_file_yields_each_complete_line_once(tmp_path: Path) -> None:
    path = tmp_path / "rank00000.jsonl"
    assert tail_steps(path).lines == ()
    path.write_bytes(CLEAN[:1000])
    first = tail_steps(path)
    assert [item.step for item in first.lines] == [1]
    path.write_bytes(CLEAN + b"garbage\n")
    second = tail_steps(path, first.position)
    assert [item.step for item in second.lines] == [2, 3, 4, 5, None]
    assert second.last_step == 5
    assert b"".join(item.raw + b"\n" for item in (*first.lines, *second.lines)) == path.read_bytes()
    assert tail_steps(path, second.position).lines == ()
