"""What a person sees of a resume check, held against golden files. UPDATE_GOLDEN=1 writes them anew."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from detrun.cli.app import COMMANDS
from detrun.records.jobs import ExperimentFile
from detrun.records.verdict import Finding, Verdict
from detrun.report import timeline
from detrun.report.html import render_html
from detrun.report.terminal import render
from tests.report.resume_scenes import (
    KILL,
    SCENES,
    elsewhere,
    experiment,
    lost,
    lost_moments,
    lost_stream,
    metric,
    overlap,
    table,
    verdict,
)
from tests.report.test_html import EVIL, Tags

GOLDEN = Path(__file__).parent / "golden" / "resume"
Scene = Callable[[], tuple[Verdict, ExperimentFile]]
each_scene = pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)


def printed(found: Verdict, asked: ExperimentFile, width: int = 80, **options: Any) -> str:
    out = StringIO()
    settings: dict[str, Any] = {"force_terminal": True, "no_color": True, "color_system": None, "width": width}
    render(found, asked, Console(file=out, **{**settings, **options}))
    return out.getvalue()


def golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@each_scene
def test_screens_at_80_columns(scene: Scene) -> None:
    text = printed(*scene())
    assert all(len(line) <= 80 for line in text.splitlines()), text
    golden(f"{scene.__name__}.txt", text)


@each_scene
def test_screens_at_200_columns(scene: Scene) -> None:
    text = printed(*scene(), width=200)
    assert all(len(line) <= 200 for line in text.splitlines()), text
    golden(f"{scene.__name__}.200.txt", text)


@each_scene
def test_pages(scene: Scene) -> None:
    page = render_html(*scene(), plotly_link="../assets/plotly.min.js")
    golden(f"{scene.__name__}.html", page.partition("</style>")[2].partition("<script src=")[0])


@each_scene
def test_the_last_line_names_a_command_that_exists(scene: Scene) -> None:
    last = printed(*scene(), width=400).splitlines()[-1]
    named = re.findall(r"detrun ([a-z-]+)", last)
    assert named
    assert set(named) <= set(COMMANDS)


@each_scene
def test_in_a_pipe_nothing_is_wrapped_cut_or_colored(scene: Scene) -> None:
    found, asked = scene()
    out = StringIO()
    render(found, asked, Console(file=out))
    assert "\x1b" not in out.getvalue()
    wide = printed(found, asked, width=10_000)
    # Only what is known of why stands below the table where it has no room beside it.
    assert out.getvalue().splitlines()[0] == wide.splitlines()[0]
    assert out.getvalue().splitlines()[-1] == wide.splitlines()[-1]


def test_what_is_to_blame_stands_out_without_color() -> None:
    found, asked = lost_stream()
    assert re.search(r"^RNG numpy +1 +equal +DIFFERENT +every rank$", printed(found, asked), re.MULTILINE)
    assert re.search(r"every rank  at its state of the very first step", printed(found, asked, width=200))


def test_all_of_an_optimizer_is_not_named_parameter_by_parameter() -> None:
    found, asked = lost_moments()
    first = printed(found, asked, width=400).splitlines()[0]
    assert first.endswith(
        "the optimizer's exp_avg, exp_avg_sq and step of all 75 parameters were not restored (rank 1)"
    )
    finding = found.of_kind("restore")[0]
    finding.evidence["count"] -= 1
    assert "blocks.0.weight" in printed(found, asked, width=400).splitlines()[0]


def test_a_program_that_was_told_of_no_checkpoint() -> None:
    found, _ = elsewhere()
    for args in ([], ["--resume", "{checkpoint}"]):
        asked = experiment(recipe={"name": "hybrid-cpu", "checkpoint": {"resume_args": args}})
        assert ("checkpoint.resume_args is empty" in printed(found, asked)) == (not args)


def test_a_long_table_keeps_what_differs() -> None:
    pieces = {f"parameters (part{number})": 1 for number in range(40)}
    mark = {"parameters (part39)": ("different", [1])}
    findings = [*lost_stream()[0].of_kind("metric"), table(mark, pieces=pieces)]
    culprit = {"name": "parameter x", "kind": "parameter", "step": 10, "others": []}
    text = printed(verdict("diverged", findings, culprit=culprit), experiment())
    assert "parameters (part39)" in text
    assert "and 24 more, none of them to blame, all in report.html" in text


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("steps", [4, 30, 100_000])
def test_a_timeline_of_many_attempts_keeps_its_order(width: int, steps: int) -> None:
    stops: list[Any] = []
    told = None
    for number in range(1, 4):
        at = steps * number // 4
        stops.append((at, {**KILL, "step": at}, told))
        told = max(1, at - 1)
    stops.append((steps, None, told))
    found, asked = verdict("identical", [overlap(), table()], stops=stops), experiment(steps=steps)
    found.arms[0].attempts[0].last_step = steps
    rows = timeline.picture(found, asked, width)
    assert len(rows) == 5
    for row, last in zip(rows, (steps, *(stop[0] for stop in stops)), strict=True):
        named = [int(number) for number in re.findall(r"\d+", row)]
        assert named == sorted(named), rows
        assert named[-1] == last


@pytest.mark.parametrize(
    ("interruption", "said"),
    [
        ({"kind": "kill"}, "SIGKILL after step 14"),
        ({"kind": "kill", "ranks": [1]}, "SIGKILL on rank 1 after step 14"),
        ({"kind": "kill", "microbatch": 2}, "SIGKILL after step 14 and 2 micro-batches"),
        ({"kind": "signal"}, "SIGUSR1 after step 14"),
        ({"kind": "stop"}, "stopped after step 14"),
        ({"kind": "kill-during-save", "step": 20}, "SIGKILL during the save of step 20"),
        ({"kind": "requeue"}, "requeued after step 14"),
        ({"kind": "node-failure", "ranks": [1]}, "a node failed after step 14"),
        ({"kind": "timeout"}, "time limit after step 14"),
    ],
)
def test_each_kind_of_interruption_has_its_words(interruption: dict[str, Any], said: str) -> None:
    stops = [(14, {**KILL, **interruption}, None), (30, None, 10)]
    found = verdict("identical", [table()], stops=stops)
    asked = experiment(interrupts=[{"kind": "signal", "signal": "USR1"}])
    assert printed(found, asked, width=400).startswith(f"IDENTICAL  hybrid-cpu: {said}, resumed from step 10: ")


def test_names_are_text_on_the_page_and_move_no_cursor() -> None:
    evil = f"{EVIL}\x1b[2J"
    name = f"the RNG stream {evil}"
    findings = [
        lost("rng", name, "every rank", [0, 1], evil, [evil]),
        metric(evil, 11, [0, 1], ("0x3f6fd3ce", "0x3f728562"), (0.93682563, 0.94734776)),
        table({f"RNG {evil}": ("different", [0, 1])}, pieces={f"RNG {evil}": 1, f"parameters ({evil})": 1, evil: 2}),
        Finding(kind="explaining", severity="info", what=evil),
    ]
    culprit = {"name": name, "kind": "rng", "step": 10, "fix": evil, "others": [evil]}
    stops = [(14, {**KILL, "kind": evil}, None), (30, None, 10)]
    rejected = [{"path": f"/{evil}", "why": evil}]
    found = verdict("diverged", findings, culprit=culprit, stops=stops, rejected=rejected, recipe=evil, id=evil)
    asked = experiment(id=evil, recipe_path=evil, command_line=[evil])
    page = render_html(found, asked, plotly_link="x.js")
    assert EVIL not in page
    assert html.escape(EVIL) in page
    assert "\x1b" not in page
    assert Tags(page).tags["script"] == 3
    for width in (80, 200):
        assert "\x1b" not in printed(found, asked, width=width)
    found = found.model_copy(update={"verdict": "identical", "first_divergence": None, "culprit": None})
    assert "\x1b" not in printed(found, asked)


def test_of_two_resumes_from_one_checkpoint_the_right_one_is_blamed() -> None:
    findings = [
        lost("rng", "the RNG stream numpy", "every rank", [0, 1], "2 draws ahead", ["numpy"], attempt=2),
        metric("loss", 11, [0, 1], ("0x3f6fd3ce", "0x3f728562"), (0.93682563, 0.94734776)),
        table(),
        table({"RNG numpy": ("different", [0, 1])}, attempt=2),
    ]
    culprit = {"name": "the RNG stream numpy", "kind": "rng", "step": 10, "others": []}
    stops = [(14, KILL, None), (16, {**KILL, "step": 16}, 10), (30, None, 10)]
    text = printed(verdict("diverged", findings, culprit=culprit, stops=stops), experiment())
    assert text.startswith("DIVERGED after the second of 2 resumes: the RNG stream numpy was not restored")
    assert text.count("restored (begin of 11)") == 1
    assert "DIFFERENT" in text


def test_a_signal_that_nothing_was_saved_for_is_told() -> None:
    said = "SIGTERM at step 14 left no newer checkpoint than step 10"
    asked = experiment(interrupts=[{"kind": "signal", "signal": "TERM"}])
    for told in (10, 14):
        stops = [(14, {**KILL, "kind": "signal"}, None), (30, None, told)]
        text = printed(verdict("identical", [table(step=told)], stops=stops), asked)
        assert (said in text) == (told == 10)
