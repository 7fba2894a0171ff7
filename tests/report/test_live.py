"""What is shown while the arms of a resume check run."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console

from detrun.report.live import ArmView, LiveDisplay

NAMES = {"a": "uninterrupted", "b": "interrupted", "g": "broken: scheduler"}


def ago(seconds: float) -> str:
    return (datetime.now(timezone.utc) - timedelta(seconds=seconds)).isoformat()


def arms() -> list[ArmView]:
    """Done, resumed and waiting. A resumed attempt may count its steps from where the program began."""
    return [
        ArmView("a", "done", 40, started=ago(400), ended=ago(200)),
        ArmView("b", "running", 21, started=ago(190), attempt=1, resumed=10),
        ArmView("g", "waiting", 0, attempt=1),
    ]


def test_a_block_with_control_arms_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    out = StringIO()
    console = Console(file=out, width=80, force_terminal=True, no_color=True)
    display = LiveDisplay(console, "hybrid-cpu", 30, slurm=False, names=NAMES)
    seconds = iter((100.0, 107.7))
    # The module's own clock, not everybody's: a watching thread of another test may still ask for the time.
    monkeypatch.setattr("detrun.report.live.time", SimpleNamespace(monotonic=lambda: next(seconds), time=time.time))
    first = ArmView("b", "running", 11, started=ago(180), attempt=1, resumed=10)
    display._block([first])
    console.print(display._block(arms()))
    rows = [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]
    assert len(rows) == 4
    assert rows[2].startswith("  b interrupted       ")
    assert rows[2].endswith("21/30 attempt 1  from step 10  190 s  0.77 s a step")


def test_without_a_terminal_a_change_of_state_is_a_line() -> None:
    out = StringIO()
    with LiveDisplay(Console(file=out), "hybrid-cpu", 30, slurm=False, names=NAMES) as display:
        display.show(arms())
        display.show(arms())
    assert out.getvalue().splitlines() == [
        "hybrid-cpu",
        "a uninterrupted  done at step 30/30",
        "b interrupted  attempt 1  resumed from step 10",
        "g broken: scheduler  attempt 1  waiting",
    ]
