"""What a person sees, held against golden files at 80 columns. UPDATE_GOLDEN=1 writes them anew."""

from __future__ import annotations

import os
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from detrun.experiments.judge import judge
from detrun.records.verdict import Verdict
from detrun.report.terminal import render
from tests.records_factory import (
    MadeExperiment,
    digest,
    flip_metric,
    flip_state,
    flip_stream,
    make_experiment,
)

GOLDEN = Path(__file__).parent / "golden"
ID = "hybrid-cpu-pair-20261129T101502-3f9a"


def make(tmp_path: Path, **fields: Any) -> MadeExperiment:
    return make_experiment(tmp_path, id=ID, steps=fields.pop("steps", 30), **fields)


def identical(tmp_path: Path) -> MadeExperiment:
    return make(tmp_path)


def micro_batches(tmp_path: Path) -> MadeExperiment:
    return make(tmp_path, steps=18, recorded_steps=6, microbatches=3)


def repeats(tmp_path: Path) -> MadeExperiment:
    return make(tmp_path, arms=[f"{letter}{other}" for letter in "abcd" for other in "abcdefghijklmno"], steps=2)


def diverged(tmp_path: Path) -> MadeExperiment:
    made = make(tmp_path, declared={"b": {"args": ["--fault", "nudge@step=7,rank=1"]}})
    made.edit_every("b", 1, flip_state("gradients"), range(7, 31))
    for rank in (0, 1):
        made.edit_every("b", rank, flip_state("parameters"), range(7, 31))
        made.edit_every("b", rank, flip_metric("grad_norm", 2), range(9, 31))
        made.edit_every("b", rank, flip_metric("loss", 2), range(23, 24))
        made.edit_every("b", rank, flip_metric("loss", 1 << 14), range(24, 31))
    return made


def diverged_and_back(tmp_path: Path) -> MadeExperiment:
    made = make(tmp_path)
    made.edit("b", 1, 12, flip_metric("load_balancing_loss", 1))
    return made


def invisible(tmp_path: Path) -> MadeExperiment:
    made = make(tmp_path)
    made.edit_every("b", 0, flip_state("parameters"), range(5, 31))
    return made


def other_data(tmp_path: Path) -> MadeExperiment:
    made = make(tmp_path)
    for rank in (0, 1):
        made.edit_every("b", rank, flip_stream("batch"), range(4, 31))
        made.edit_every("b", rank, flip_metric("loss", 1 << 20), range(4, 31))
    return made


def long_values(tmp_path: Path) -> MadeExperiment:
    made = make(tmp_path)

    def wide(arm: str) -> Callable[[dict[str, Any]], None]:
        last = {"a": "d", "b": "e"}[arm]
        metric = {"bits": f"0x4012cccccccccca{last}", "dtype": "float64", "value": 4.7, "source": "record"}
        return lambda line: line["metrics"].__setitem__("load_balancing_loss", metric)

    for arm in "ab":
        made.edit(arm, 0, 3, wide(arm))
    return made


def initial(tmp_path: Path) -> MadeExperiment:
    made = make(tmp_path)
    for rank in (0, 1):
        made.edit_environment("b", rank, lambda d: d["initial"].__setitem__("parameters", digest("other")))
        made.edit_every("b", rank, flip_state("parameters"))
    return made


def not_verified(tmp_path: Path) -> MadeExperiment:
    made = make(tmp_path, ranks=4, nodes=("node1", "node2", "node3", "node4"))
    for rank in range(4):
        made.edit_every("b", rank, lambda line: line["metrics"].pop("load_balancing_loss"))
    raw = made.metrics_path("b", 3).read_bytes().splitlines(keepends=True)
    made.metrics_path("b", 3).write_bytes(b"".join(raw[:28]) + raw[28][:40])
    made.edit_environment("b", 2, lambda d: d["torch"].__setitem__("num_threads", 2))
    return made


def infrastructure(tmp_path: Path) -> MadeExperiment:
    made = make(tmp_path)
    for rank in (0, 1):
        made.drop("b", rank, *range(15, 31))
    made.edit_job(
        "b",
        state="failed",
        exit_code=1,
        reason="rank 1 ended with exit code 1",
        failed_rank=1,
        log="arms/b/attempt-0/log/rank00001.log",
        log_tail=[
            "Traceback (most recent call last):",
            '  File "train.py", line 88, in <module>',
            "\x1b[31mRuntimeError\x1b[0m: CUDA error: an illegal memory access was encountered",
        ],
    )
    return made


def warnings(tmp_path: Path) -> MadeExperiment:
    made = make(tmp_path)
    for arm in "ab":
        made.edit_every(arm, 1, flip_state("parameters"), range(20, 31))
    made.edit_job("b", nodes=["node3", "node4"], state="failed", exit_code=139, reason="SIGSEGV")
    return made


SCENES = [
    identical,
    micro_batches,
    repeats,
    diverged,
    diverged_and_back,
    invisible,
    other_data,
    long_values,
    initial,
    not_verified,
    infrastructure,
    warnings,
]


def printed(verdict: Verdict, made: MadeExperiment, **options: Any) -> str:
    out = StringIO()
    settings: dict[str, Any] = {"force_terminal": True, "no_color": True, "color_system": None, "width": 80}
    render(verdict, made.file, Console(file=out, **{**settings, **options}))
    return out.getvalue()


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_screens(scene: Callable[[Path], MadeExperiment], tmp_path: Path) -> None:
    made = scene(tmp_path)
    verdict = judge(made.folder, report=False)
    text = printed(verdict, made)
    assert all(len(line) <= 80 for line in text.splitlines()), text
    golden = GOLDEN / f"{scene.__name__}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


def test_in_a_pipe_nothing_is_wrapped_cut_or_colored(tmp_path: Path) -> None:
    made = not_verified(tmp_path)
    verdict = judge(made.folder, report=False)
    out = StringIO()
    render(verdict, made.file, Console(file=out))
    text = out.getvalue()
    assert "\x1b" not in text
    assert (
        "  arm b, every rank: load_balancing_loss is missing (required by the recipe, line 14; recorded were " in text
    )
    assert text.splitlines()[0].endswith("it does not prove identity:")


def test_color_only_repeats_what_words_say(tmp_path: Path) -> None:
    made = diverged(tmp_path)
    verdict = judge(made.folder, report=False)
    colored = printed(verdict, made, no_color=False, color_system="standard")
    assert "\x1b[1;31mDIVERGED" in colored
    assert "DIVERGED at step 7" in printed(verdict, made)


def test_no_record_moves_the_cursor_or_writes_markup(tmp_path: Path) -> None:
    made = make(tmp_path, metrics=("[bold]x[/]", "\x1b[2J<script>"), required=())
    made.edit("b", 0, 3, flip_metric("\x1b[2J<script>"))
    text = printed(judge(made.folder, report=False), made)
    assert "\x1b" not in text
    assert "\\x1b[2J<script>" in text
    assert "[bold]x[/]" in text


def test_hints_name_only_commands_that_exist(tmp_path: Path) -> None:
    made = diverged(tmp_path)
    verdict = judge(made.folder, report=False)
    for commands, hint in [({"report"}, "detrun report 3f9a"), ({"report", "localize"}, "detrun localize 3f9a")]:
        out = StringIO()
        render(verdict, made.file, Console(file=out), commands)
        assert out.getvalue().splitlines()[-1] == f"hint: {hint}"


def test_the_screen_is_the_same_from_the_archive_alone(tmp_path: Path) -> None:
    made = diverged(tmp_path)
    verdict = judge(made.folder)
    assert printed(Verdict.read(made.folder.verdict_file), made) == printed(verdict, made)
