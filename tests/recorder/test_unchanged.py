"""The first rule: a recorded run ends with the very bytes of an unrecorded one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.recorder import programs
from tests.recorder.harness import run


@pytest.mark.parametrize("program", programs.ALL, ids=lambda program: program.__name__)
def test_recording_changes_no_byte_and_repeats_itself(program: Callable[[], dict[str, bytes]], tmp_path: Path) -> None:
    plain = run(program, tmp_path / "plain", recorded=False)
    runs = [run(program, tmp_path / name) for name in ("a", "b")]
    for recorded in runs:
        assert recorded.result == plain.result
        assert recorded.cost()["warnings"] == []
        assert not list((recorded.attempt / "recorder").glob("failed-*"))
    texts = [(recorded.attempt / "metrics" / "rank00000.jsonl").read_bytes() for recorded in runs]
    assert texts[0] == texts[1]
    assert texts[0].count(b"\n") >= 2
    initial = [recorded.environment()["initial"] for recorded in runs]
    assert initial[0] == initial[1]


@pytest.mark.parametrize("program", programs.ALL, ids=lambda program: program.__name__)
def test_capturing_state_changes_no_byte(program: Callable[[], dict[str, bytes]], tmp_path: Path) -> None:
    plain = run(program, tmp_path / "plain", recorded=False)
    every = ",".join(str(step) for step in range(10))
    captured = run(program, tmp_path / "a", DETRUN_STATE_AT=every)
    assert captured.result == plain.result
    assert captured.cost()["warnings"] == []
    assert list((captured.attempt / "state").glob("begin-*/rank00000.arrow"))
    without = run(program, tmp_path / "b", DETRUN_STATE_AT="none")
    lines = [(one.attempt / "metrics" / "rank00000.jsonl").read_bytes() for one in (captured, without)]
    assert lines[0] == lines[1]
