"""Doctor's screen and its exit code."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from detrun.report.doctor_screen import Check, Checkup, Status, render

WELL = Check("git", "ok", "git version 2.39.5", "not shown")
BAD = Check("torch", "fail", "import torch: ModuleNotFoundError: No module named 'torch'", "install torch")


def screen(*checks: Check, width: int | None = None) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width or 80, force_terminal=width is not None, color_system=None)
    render(Checkup("Slurm", (("here", checks), ("none", ())), 12.3, job="4182"), console)
    return out.getvalue()


def test_the_first_line_answers_and_each_remedy_is_below_its_check() -> None:
    assert screen(WELL, BAD).splitlines() == [
        "NOT READY  Slurm: 1 of 2 checks are well, 1 would stop a first run (12 s)",
        "",
        "here",
        "ok       git: git version 2.39.5",
        "fail     torch: import torch: ModuleNotFoundError: No module named 'torch'",
        "         remedy: install torch",
        "",
        "job 4182 has ended, and its files are removed",
    ]


@pytest.mark.parametrize(
    ("statuses", "code", "word"),
    [
        (["ok", "warn"], 0, "READY"),
        (["ok", "unknown", "warn"], 3, "NOT KNOWN"),
        (["unknown", "fail"], 4, "NOT READY"),
    ],
)
def test_the_exit_code_says_the_worst(statuses: list[Status], code: int, word: str) -> None:
    checks = tuple(Check("x", status, "y") for status in statuses)
    checkup = Checkup("here", (("all", checks),), 1.0)
    assert checkup.exit_code == code == checkup.as_dict()["exit_code"]
    assert screen(*checks).startswith(f"{word}  ")


def test_a_terminal_gets_whole_lines_of_its_width() -> None:
    long = Check("archive", "warn", "a rather long measurement " * 6, "a rather long remedy " * 6)
    lines = screen(long, width=60).splitlines()
    assert max(map(len, lines)) <= 60
    assert "".join(lines).count("measurement") == 6 and "".join(lines).count("remedy") == 7


def test_what_a_node_says_moves_no_cursor() -> None:
    text = screen(Check("torch", "fail", "boom \x1b[2J\nok  forged: line", "none"))
    assert "\x1b" not in text
    assert not any(line.startswith("ok") for line in text.splitlines())
