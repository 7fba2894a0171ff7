"""What a comparison of one rank's traces says about files that do not hold everything, and how it stays small."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from detrun.compare import trace_history
from detrun.compare.trace_rank import compare_rank
from detrun.compare.trace_summary import RankReading
from detrun.records.trace_reader import open_trace
from tests.trace_factory import Arm, Value, attempt_in, write_trace


def steps(count: int, plant: str = "", at: int = 2, level: int = 4) -> Arm:
    arm = Arm(level=level, plant=lambda event: plant if event.step == at and event.op == "aten.mm.default" else "")
    w = Value("w")
    for step in range(1, count + 1):
        arm.step = step
        (x,) = arm.op("aten.mm.default", [Value(f"batch {step}"), w], scope="layers.0")
        arm.op("aten.add_.Tensor", [w, x], phase="optimizer", into=[w])
    return arm


def read(folder: Path, **options: bool) -> RankReading:
    with open_trace(attempt_in(folder, "a"), 0) as a, open_trace(attempt_in(folder, "b"), 0) as b:
        return compare_rank(a, b, **options)


def test_steps_whose_digests_agree_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps(4).write(attempt_in(tmp_path, "a"))
    steps(4).write(attempt_in(tmp_path, "b"))
    opened: list[int] = []
    monkeypatch.setattr("detrun.records.trace_reader.TraceFile.table", lambda self, step: opened.append(step))
    reading = read(tmp_path)
    assert not opened
    assert (reading.events, reading.equal, reading.skipped_steps, reading.steps) == (8, 8, 4, (1, 2, 3, 4))


def test_without_digests_equal_bytes_are_equal_events(tmp_path: Path) -> None:
    for name in "ab":
        steps(3).write(attempt_in(tmp_path, name), digests=False)
    reading = read(tmp_path)
    assert (reading.skipped_steps, reading.equal) == (3, 6)
    steps(3, "!").write(attempt_in(tmp_path, "b"), digests=False)
    reading = read(tmp_path)
    assert (reading.skipped_steps, reading.differing) == (1, 4)
    assert [lead.event.key.step for lead in reading.leads] == [2]


def test_an_unfinished_trace_is_compared_as_far_as_it_goes(tmp_path: Path) -> None:
    whole = steps(3)
    whole.write(attempt_in(tmp_path, "a"))
    torn = [event for event in whole.events if event.seq < 5]
    write_trace(attempt_in(tmp_path, "b"), 0, torn, steps=(1, 3), end=False, unfinished=True)
    reading = read(tmp_path)
    assert (reading.events, reading.equal, reading.missing, reading.extra, reading.leads) == (5, 5, 0, 0, [])
    assert reading.incomplete == ["B: the trace of rank 0 its index has no end line"]


def test_a_trace_that_ran_out_of_its_budget_says_so(tmp_path: Path) -> None:
    steps(3).write(attempt_in(tmp_path, "a"))
    steps(2).write(attempt_in(tmp_path, "b"), steps=(1, 3), complete=False, reason="byte budget")
    reading = read(tmp_path)
    assert "B: the trace of rank 0 is incomplete: byte budget" in reading.incomplete
    assert "step 3 of rank 0 is only in A" in reading.incomplete
    assert not reading.differs


def test_events_that_differ_under_equal_digests_were_changed_later(tmp_path: Path) -> None:
    a, b = (attempt_in(tmp_path, name) for name in "ab")
    steps(2).write(a)
    steps(2, "!").write(b)
    b.trace_index(0).write_bytes(a.trace_index(0).read_bytes())
    assert not read(tmp_path).incomplete
    reading = read(tmp_path, skip_equal=False)
    assert "holds other events than its digest was made of" in reading.incomplete[0]
    assert not reading.differs


def test_steps_of_the_window_that_neither_arm_has_are_missed(tmp_path: Path) -> None:
    for name in "ab":
        steps(2).write(attempt_in(tmp_path, name), steps=(1, 4))
    reading = read(tmp_path)
    assert reading.incomplete[0] == "A: rank 0 lacks 2 of the steps 1 to 4, the first is 3"


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"algorithm": "ml128"}, "the digest algorithm is xxh3-128 in A and ml128 in B"),
        ({"level": 3}, "the level is 4 in A and 3 in B"),
        ({"scopes": ["layers.*"]}, "the scope patterns is None in A and ('layers.*',) in B"),
        ({"coordinates": '{"tp": 1}'}, "the layout of ranks is {} in A and {'tp': 1} in B"),
    ],
)
def test_traces_of_other_settings_are_not_held_against_each_other(
    tmp_path: Path, settings: dict[str, object], what: str
) -> None:
    arm = steps(1)
    arm.write(attempt_in(tmp_path, "a"))
    write_trace(attempt_in(tmp_path, "b"), 0, arm.events, **{"level": 4, **settings})  # type: ignore[arg-type]
    reading = read(tmp_path)
    assert (reading.problem, reading.events, reading.steps) == (what, 0, ())


def test_a_step_that_cannot_be_read_ends_the_comparison_and_not_the_program(tmp_path: Path) -> None:
    steps(3).write(attempt_in(tmp_path, "a"))
    broken = steps(3, "!")
    broken.events[2] = replace(broken.events[2], producers=(-7, 0))  # written by an event to come
    broken.write(attempt_in(tmp_path, "b"))
    reading = read(tmp_path)
    assert reading.steps == (1,)
    assert "rank 0 is not compared from step 2 on" in reading.incomplete[0]


def test_an_event_named_twice_is_refused(tmp_path: Path) -> None:
    arm = steps(1)
    arm.op("aten.mm.default", [Value("z")], scope="layers.0", occurrence=0)
    arm.write(attempt_in(tmp_path, "a"))
    steps(1).write(attempt_in(tmp_path, "b"))
    assert "twice" in read(tmp_path).incomplete[0]


@pytest.mark.parametrize("remembered", [1, 2_000_000])
def test_what_was_written_long_ago_explains_as_what_was_written_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remembered: int
) -> None:
    monkeypatch.setattr(trace_history, "MAX_REMEMBERED", remembered)
    steps(8).write(attempt_in(tmp_path, "a"))
    steps(8, "!").write(attempt_in(tmp_path, "b"))
    reading = read(tmp_path, skip_equal=False)
    assert [(lead.role, lead.event.step, lead.event.op) for lead in reading.leads] == [("origin", 2, "aten.mm.default")]
    assert reading.leads_total == 1
    assert reading.differing == 14


def test_the_writer_in_a_step_that_was_skipped_is_found(tmp_path: Path) -> None:
    for name, content in (("a", ""), ("b", "!")):
        arm = steps(2)
        arm.step = 3
        arm.op("aten.sum.default", [Value(f"w{content}", writer=3)])
        arm.write(attempt_in(tmp_path, name))
    (lead,) = read(tmp_path).leads
    assert (lead.role, lead.after and lead.after.key.step) == ("uncaptured-producer", 2)


def test_leads_are_kept_to_a_limit_and_counted_beyond(tmp_path: Path) -> None:
    for name, content in (("a", ""), ("b", "!")):
        arm = Arm()
        for number in range(30):
            arm.op("aten.sin.default", [Value(f"x{number}")], content=[f"y{number}{content}"])
        arm.write(attempt_in(tmp_path, name))
    with open_trace(attempt_in(tmp_path, "a"), 0) as a, open_trace(attempt_in(tmp_path, "b"), 0) as b:
        reading = compare_rank(a, b, limit=5)
    assert (len(reading.leads), reading.leads_total) == (5, 30)
    assert [lead.event.seq for lead in reading.leads] == [0, 1, 2, 3, 4]


def test_microbatches_are_told_apart(tmp_path: Path) -> None:
    for name, faulty in (("a", -1), ("b", 1)):
        arm = Arm(plant=lambda event, faulty=faulty: "!" if event.microbatch == faulty else "")  # type: ignore[misc]
        for microbatch in range(3):
            arm.microbatch = microbatch
            arm.op("aten.mm.default", [Value(f"x{microbatch}")], scope="layers.0")
        arm.write(attempt_in(tmp_path, name))
    (lead,) = read(tmp_path).leads
    assert (lead.event.microbatch, lead.event.occurrence) == (1, 0)
