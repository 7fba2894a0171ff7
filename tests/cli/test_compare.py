"""`detrun compare`: the first line answers, the exit code says the same, and no file makes it fall over."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from detrun.cli import main
from detrun.records.archive import Archive
from detrun.records.trace_row import TraceEvent
from tests.trace_factory import Arm, Value, attempt_in, write_trace


def arm(plant: Callable[[TraceEvent], str] = lambda event: "", steps: int = 2, name: str = "layers.1") -> Arm:
    arm = Arm(plant=plant)
    for step in range(1, steps + 1):
        arm.step = step
        x = Value(f"batch {step}")
        (x,) = arm.op("aten.mm.default", [x], scope="layers.0")
        (x,) = arm.op("aten.index_add.default", [x, Value("source")], scope=name)
        arm.op("aten.sum.default", [x])
    return arm


def race(event: TraceEvent) -> str:
    return "!" if event.op == "aten.index_add.default" and event.step == 2 else ""


@pytest.fixture
def folders(tmp_path: Path) -> tuple[str, str]:
    arm().write(attempt_in(tmp_path, "a"))
    arm(race).write(attempt_in(tmp_path, "b"))
    return str(tmp_path / "a" / "attempt-0"), str(tmp_path / "b" / "attempt-0")


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["compare", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_an_origin_is_the_first_line(folders: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *folders)
    assert (code, err) == (1, "")
    first, *rest = out.splitlines()
    assert first == "ORIGIN  aten.index_add.default in layers.1, forward, rank 0, step 2, micro-batch 0, occurrence 0"
    text = "\n".join(rest)
    assert "its inputs match, its outputs do not" in text
    assert "6 events of rank 0, level 4: 4 equal, 2 different; 1 step equal by digest" in text
    assert "next" in text


def test_one_json_document_says_it_all(folders: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *folders, "--json")
    document = json.loads(out)
    assert (code, document["exit_code"], document["verdict"], document["pattern"]) == (1, 1, "diverged", "origin")
    assert document["lead"]["event"]["scope"] == "layers.1"
    assert document["counts"]["differing"] == 2
    assert document["answer"].startswith("ORIGIN")


def test_equal_traces_are_identical(folders: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    for options in ((), ("--full",), ("--recompute",)):
        code, out, _ = run(capsys, folders[0], folders[0], *options)
        assert code == 0
        assert out.startswith("IDENTICAL  6 events of 1 rank in both traces, steps 1-2\n")


def test_what_came_from_outside_names_no_origin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        one = Arm()
        one.op("aten.embedding.default", [Value("table"), Value(f"words {name}")])
        one.write(attempt_in(tmp_path, name))
    code, out, _ = run(capsys, str(tmp_path / "a"), str(tmp_path / "b"))
    assert code == 1
    assert out.startswith("DIFFERENT, no origin inside the trace  data from outside, first at aten.embedding.default")
    assert "seeds" in out


def test_an_unseen_write_is_told_with_both_brackets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        one = Arm()
        (x,) = one.op("aten.mm.default", [Value("x")], scope="layers.0")
        x.content += name
        one.op("aten.relu.default", [x], scope="layers.1")
        one.write(attempt_in(tmp_path, name))
    code, out, _ = run(capsys, str(tmp_path / "a"), str(tmp_path / "b"))
    assert code == 1
    assert out.startswith("DIFFERENT, no origin inside the trace  written unseen after aten.mm.default in layers.0")
    assert "which matches, and aten.relu.default in layers.1" in out


@pytest.mark.parametrize("wrong", ["torn", "incomplete", "rank", "empty"])
def test_nothing_is_identical_by_omission(tmp_path: Path, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = attempt_in(tmp_path, "a"), attempt_in(tmp_path, "b")
    events = arm().events
    write_trace(a, 0, [] if wrong == "empty" else events)
    if wrong == "torn":
        write_trace(b, 0, events, end=False)
    elif wrong == "incomplete":
        write_trace(b, 0, events, complete=False, reason="byte budget")
    else:
        write_trace(b, 0, [] if wrong == "empty" else events)
    if wrong == "rank":
        write_trace(a, 1, events)
    code, out, _ = run(capsys, str(a.path), str(b.path))
    assert code == 3
    assert out.startswith("NOT VERIFIED" if wrong != "empty" else "NOT COMPARABLE")
    assert "incomplete" in out


def test_a_difference_stands_whatever_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arm().write(attempt_in(tmp_path, "a"))
    write_trace(attempt_in(tmp_path, "b"), 0, arm(race).events, complete=False, reason="byte budget")
    code, out, _ = run(capsys, str(tmp_path / "a"), str(tmp_path / "b"))
    assert code == 1
    assert out.startswith("ORIGIN")
    assert "byte budget" in out


@pytest.mark.parametrize("settings", [{"algorithm": "ml128"}, {"coordinates": '{"pp": 1}'}])
def test_other_digests_and_layouts_are_not_comparable(
    tmp_path: Path, settings: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    arm().write(attempt_in(tmp_path, "a"))
    write_trace(attempt_in(tmp_path, "b"), 0, arm(race).events, **settings)  # type: ignore[arg-type]
    code, out, err = run(capsys, str(tmp_path / "a"), str(tmp_path / "b"))
    assert (code, err) == (3, "")
    assert out.startswith("NOT COMPARABLE\n")
    assert "in A and" in out


def test_names_cannot_move_the_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "layers\x1b[2J\n" + "x" * 5000
    arm(name=name).write(attempt_in(tmp_path, "a"))
    arm(race, name=name).write(attempt_in(tmp_path, "b"))
    code, out, _ = run(capsys, str(tmp_path / "a"), str(tmp_path / "b"))
    assert code == 1
    assert "\x1b" not in out
    assert "\\x1b[2J\\n" in out.splitlines()[0]
    assert max(map(len, out.splitlines())) < 1200


def test_garbage_is_told_and_not_raised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = attempt_in(tmp_path, "a"), attempt_in(tmp_path, "b")
    arm().write(a)
    arm().write(b)
    b.trace(0).write_bytes(b"no trace at all" * 500)
    code, out, err = run(capsys, str(a.path), str(b.path))
    assert (code, err) == (3, "")
    assert "is no Arrow stream" in out


def test_arms_are_found_by_folder_and_by_experiment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Archive(tmp_path / "archive").create("tiny", "trace")
    arm().write(folder.attempt("a", 0))
    arm().write(folder.attempt("b", 0))
    arm(race).write(folder.attempt("b", 1))
    where = ("--archive", str(tmp_path / "archive"))
    assert run(capsys, f"{folder.id}:a", f"{folder.id}:b", *where)[0] == 1  # the last attempt of an arm
    assert run(capsys, str(folder.arm_dir("a")), str(folder.attempt("b", 0).path))[0] == 0
    monkeypatch.chdir(folder.attempt("a", 0).path)
    assert run(capsys, "trace", ".")[0] == 0


@pytest.mark.parametrize("name", ["nowhere", "", "a:b", "x\x00y"])
def test_what_names_no_trace_is_a_wrong_command_line(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arm().write(attempt_in(tmp_path, "a"))
    code, out, err = run(capsys, str(tmp_path / "a"), name, "--archive", str(tmp_path))
    assert (code, out) == (2, "")
    assert err.startswith("error: ")


def test_an_experiment_wants_an_arm_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Archive(tmp_path).create("tiny", "trace")
    arm().write(folder.attempt("a", 0))
    code, _, err = run(capsys, str(folder.path), str(folder.path))
    assert code == 2
    assert f"{folder.path}/arms/a" in err
