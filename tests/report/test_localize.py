"""What a person sees of a localization, held against golden files. UPDATE_GOLDEN=1 writes them anew."""

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
from detrun.records.verdict import Verdict
from detrun.report.html import render_html
from detrun.report.localize_words import in_bytes, steps_in_words, window
from detrun.report.terminal import render
from tests.report.localize_scenes import (
    READING,
    SCENES,
    a_pair_was_enough,
    coverage,
    culprit,
    descent,
    experiment,
    finding,
    from_data,
    kernels,
    many_origins,
    origin,
    outside_the_capture,
    pair_not_verified,
    uncaptured,
    verdict,
)
from tests.report.test_html import EVIL, Tags

GOLDEN = Path(__file__).parent / "golden" / "localize"
Scene = Callable[[], tuple[Verdict, ExperimentFile]]
each_scene = pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)


def printed(found: Verdict, asked: ExperimentFile, width: int = 80, **options: Any) -> str:
    out = StringIO()
    settings: dict[str, Any] = {"force_terminal": True, "no_color": True, "color_system": None, "width": width}
    render(found, asked, Console(file=out, **{**settings, **options}))
    return out.getvalue()


def piped(found: Verdict, asked: ExperimentFile) -> str:
    out = StringIO()
    render(found, asked, Console(file=out))
    return out.getvalue()


def golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@each_scene
@pytest.mark.parametrize("width", [80, 200])
def test_screens(scene: Scene, width: int) -> None:
    text = printed(*scene(), width=width)
    assert all(len(line) <= width for line in text.splitlines()), text
    golden(f"{scene.__name__}{'' if width == 80 else f'.{width}'}.txt", text)


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
    text = piped(*scene())
    assert "\x1b" not in text
    assert text == printed(*scene(), width=10_000)


@pytest.mark.parametrize("width", [40, 60, 80, 133, 200])
@each_scene
def test_nothing_is_lost_at_any_width(scene: Scene, width: int) -> None:
    found, asked = scene()
    whole, shown = ("".join(text.split()) for text in (piped(found, asked), printed(found, asked, width=width)))
    assert shown == whole


@pytest.mark.parametrize(
    ("role", "head"),
    [
        ("origin", "ORIGIN  "),
        ("uncaptured-producer", "UNCAPTURED PRODUCER  "),
        ("outside-the-trace", "FROM OUTSIDE THE TRACE  "),
        ("receiver", "RECEIVED  by "),
        ("of a newer version", "DIVERGED "),
    ],
)
def test_the_first_words_say_what_kind_of_answer_it_is(role: str, head: str) -> None:
    found = verdict("diverged", [descent(4, 10, 1)], culprit(role=role))
    assert piped(found, experiment()).startswith(head)


def test_nothing_but_a_difference_is_called_one() -> None:
    assert piped(verdict("diverged", []), experiment()).startswith("DIVERGED at step 1, rank 0; no operation can be ")


def test_the_place_is_told_in_the_words_of_the_field() -> None:
    def first(**fields: Any) -> str:
        return piped(verdict("diverged", [], culprit(**fields)), experiment()).splitlines()[0]

    assert first() == "ORIGIN  aten.index_put_ in layers.1.moe, backward, step 1, rank 0"
    assert (
        first(name="aten.add.Tensor", scope="") == "ORIGIN  aten.add.Tensor outside modules, backward, step 1, rank 0"
    )
    assert first(ranks=[0, 1]).endswith("step 1, every rank")
    assert first(phase="optimizer", scope="layers.1.weight", name="aten.lerp_.Scalar") == (
        "ORIGIN  aten.lerp_.Scalar of layers.1.weight, optimizer, step 1, rank 0"
    )
    assert first(kind="recompute").startswith("ORIGIN  recomputation that differs from its forward: aten.index_put_")
    assert "between" not in first(phase="between")


def test_an_uncaptured_producer_stands_between_the_events_that_bracket_it() -> None:
    found, asked = uncaptured()
    rows = [line.split("  ")[0] for line in piped(found, asked).splitlines()]
    assert [row for row in rows if row in ("written by", "then", "read by")] == ["written by", "then", "read by"]
    found.culprit = {**(found.culprit or {}), "after": None}
    assert re.search(r"^written by +nothing that was traced$", piped(found, asked), re.MULTILINE)


def test_of_a_batch_the_operation_is_no_news() -> None:
    assert piped(*from_data()).splitlines()[0] == "FROM OUTSIDE THE TRACE  input data: the batch"


@pytest.mark.parametrize(
    ("evidence", "said"),
    [
        ({"elements": 8, "differing": 0}, "all 8 elements are equal: its bytes do not show what its digests did"),
        ({"elements": 1, "differing": 1}, "1 of 1 element differs"),
        ({"elements": 9000, "differing": 3, "max_ulp": 4, "min_ulp": 4}, "3 of 9,000 elements differ, by 4 ULP"),
        ({"elements": 9, "differing": 3, "min_ulp": 1, "max_ulp": 4}, "3 of 9 elements differ, by 1 to 4 ULP"),
        ({"elements": 9, "differing": 3, "max_ulp": None, "nan": 3}, "3 of 9 elements differ     3 NaN"),
        ({"elements": 9, "differing": 2, "rows": [7], "rows_total": 1}, "2 of 9 elements differ, in row 7"),
        ({"elements": 9, "differing": 2, "rows": [7, 8]}, "2 of 9 elements differ, in rows 7, 8"),
        (
            {"elements": 9, "differing": 9, "permutation": "rows"},
            "9 of 9 elements differ     the same rows in another order",
        ),
        ({"elements": 9, "differing": 1, "signed_zeros": 1}, "1 of 9 elements differs     1 only in the sign of zero"),
        ({"elements": "many", "differing": None}, "as they are"),
    ],
)
def test_how_bytes_differ(evidence: dict[str, Any], said: str) -> None:
    found = verdict("diverged", [finding("bytes", "as they are", **evidence)], culprit())
    assert re.search(rf"^bytes +{re.escape(said)}$", piped(found, experiment()), re.MULTILINE)


def test_what_made_no_difference_is_not_called_a_confirmation() -> None:
    tried = [finding("confirmed", experiment=f"try {n}", identical=n, of=2) for n in range(3)]
    text = piped(verdict("diverged", tried, culprit()), experiment())
    for label, number in (("no change", 0), ("in part", 1), ("confirmed", 2)):
        assert re.search(rf"^{label} +try {number}: identical, {number} of 2$", text, re.MULTILINE)


def test_one_result_in_all_runs_is_no_reproduction() -> None:
    for distinct, said in ((1, "does not reproduce alone: 1 distinct result in 12 runs"), (12, "12 distinct results")):
        shown = finding("reproduction", script="repro/x.py", distinct=distinct, runs=12)
        assert f"repro/x.py: {said}" in piped(verdict("diverged", [shown], culprit()), experiment())


def test_coverage_is_always_told() -> None:
    assert "not captured         nothing that the tracer knows of" in piped(*many_origins())
    parts = [f"part {number}" for number in range(20)]
    text = piped(verdict("diverged", [coverage(*parts, opaque={"x": 3})], culprit()), experiment())
    assert "part 7; and 12 more; seen from outside alone: x × 3" in text


def test_what_the_ranks_say_is_told_once_an_operation() -> None:
    text = piped(*many_origins())
    assert text.count(READING) == 1
    assert re.search(r"^elsewhere +aten.mm in layers.1.attention, .*every rank     on all ranks", text, re.MULTILINE)
    assert re.search(r"^went on through +layers.0, layers.1, layers.2, layers.3 and 2 more$", text, re.MULTILINE)


def test_events_of_one_arm_alone_are_counted() -> None:
    found = verdict("diverged", [descent(4, 10, 2, missing=1, extra=3)], culprit())
    assert "8 equal, 2 different, 1 in arm a alone, 3 in arm b alone" in piped(found, experiment())


def test_many_tensors_are_told_one_by_one_up_to_a_limit() -> None:
    parts = [finding("bytes", tensor=f"output {n}", elements=4, differing=1) for n in range(9)]
    text = piped(verdict("diverged", parts, culprit()), experiment())
    assert "output 3: 1 of 4 elements differs" in text
    assert "output 4" not in text
    assert "and 5 more tensors, all in report.html" in text


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (kernels("x", "y"), kernels("x", "y"), "the same in both arms: x and y"),
        (kernels("x"), kernels("x", threads=1), "in arm a alone: threads = 2     in arm b alone: threads = 1"),
        (kernels("x", "y"), kernels("y", "x"), "the same in both arms, in another order or number"),
        (kernels("x", "y"), kernels("y"), "in arm a alone: x"),
        (None, kernels("y"), "as they are"),
    ],
)
def test_kernels_are_held_against_each_other(a: Any, b: Any, said: str) -> None:
    found = verdict("diverged", [finding("kernels", "as they are", a=a, b=b)], culprit())
    assert re.search(rf"^kernels +{re.escape(said)}$", piped(found, experiment()), re.MULTILINE)


def test_only_the_likeliest_cause_is_explained() -> None:
    causes = [
        finding("cause", catalog=f"c{n}", title=f"title {n}.", why=f"why {n}", confirm=f"do {n}") for n in range(5)
    ]
    text = piped(verdict("diverged", causes, culprit()), experiment())
    assert re.search(r"^likely cause +title 0     catalog: c0     since why 0$", text, re.MULTILINE)
    assert re.search(r"^to confirm +do 0$", text, re.MULTILINE)
    assert re.findall(r"^or +(.*)$", text, re.MULTILINE) == ["title 1     catalog: c1", "title 2     catalog: c2"]


def test_where_a_pair_was_enough_its_words_are_used() -> None:
    text = piped(*a_pair_was_enough())
    assert text.startswith("IDENTICAL  nothing to localize: hybrid-cpu: 2 ranks × 30 steps, every bit of 2 metrics and")
    assert "captured" not in text
    assert piped(*pair_not_verified()).startswith("NOT VERIFIED  there is nothing that both arms recorded:")


def test_the_fix_of_the_culprit_goes_before_that_of_the_catalog() -> None:
    found, asked = origin()
    assert "fix: torch.use_deterministic_algorithms(True), or" in piped(found, asked)
    found.culprit = {**(found.culprit or {}), "fix": "sort first"}
    assert "fix: sort first\n" in piped(found, asked)
    found.verdict = "not-verified"
    assert "fix:" not in piped(found, asked)


def test_outside_the_capture_the_next_command_is_wider() -> None:
    assert piped(*outside_the_capture()).endswith("hint: detrun localize recipes/hybrid-cpu.yaml --steps 1-3\n")


def test_environments_that_were_not_compared_are_not_called_equal() -> None:
    assert "environments" not in piped(*origin())


def test_foreign_text_moves_no_cursor_and_is_text_on_the_page() -> None:
    evil = f"{EVIL}\x1b[2J\n"
    findings = [
        descent(4, 3, 1, 1, name=evil),
        finding("bytes", evil, elements=1, differing=1, dtype=evil, shape=[evil], rows=[evil], bitmap=evil),
        finding("cause", evil, catalog=evil, title=evil, why=evil, confirm=evil, fix=evil),
        finding("confirmed", experiment=evil, identical=1, of=1),
        finding("reproduction", script=evil, text=evil),
        finding("spread", places=[{"scope": evil, "rank": evil, "op": evil, "step": evil}, evil]),
        finding("clean-table", rows=[{"by": evil, "value": evil, "clean": evil, "differing": 1}, evil]),
        finding("kernels", a=[evil], b=[]),
        coverage(evil, opaque={evil: evil}, steps=evil, ranks=evil),
    ]
    blamed = culprit(name=evil, scope=evil, phase=evil, call_site=evil, inputs=evil, coordinates={evil: evil})
    asked = experiment(id=evil, recipe_path=evil, command_line=[evil])
    for role in ("origin", "uncaptured-producer", "outside-the-trace", "receiver"):
        found = verdict("diverged", findings, {**blamed, "role": role, "after": {"op": evil, "scope": evil}}, id=evil)
        page = render_html(found, asked, plotly_link="x.js")
        assert EVIL not in page
        assert html.escape(EVIL) in page
        assert "\x1b" not in page
        assert Tags(page).tags.get("script", 0) == 0
        for width in (80, 200):
            assert "\x1b" not in printed(found, asked, width=width)


def test_the_page_holds_what_the_screen_has_no_room_for() -> None:
    page = Tags(render_html(*many_origins(), plotly_link="x.js")).text
    for scope in ("layers.1.attention", "layers.3.attention"):
        assert scope in page
    assert "splitk_reduce" in page
    assert "float32[512,64] float32[64,64]" in page


def test_numbers_in_words() -> None:
    assert [in_bytes(number) for number in (0, 1, 999, 1000, 60_200, 1_200_000, 2.5e12)] == [
        *("0 bytes", "1 byte", "999 bytes", "1.0 kB", "60.2 kB", "1.2 MB", "2500.0 GB"),
    ]
    assert [steps_in_words(steps) for steps in (None, 3, [3, 3], [3, 9])] == ["", "step 3", "step 3", "steps 3 to 9"]
    assert window({"level": 2, "steps": [1, 2], "ranks": None}, 4) == "level 2, steps 1 to 2, every rank"
    assert window({"level": 2, "steps": [1, 2], "ranks": [0, 2]}, 4) == "level 2, steps 1 to 2, ranks 0, 2"
    assert window({}, 4) == ""


def test_settings_that_differ_stand_beside_the_kernels() -> None:
    for a, b in ((["aten::sum"], ["aten::sum"]), (["aten::sum"], ["aten::sum", "aten::copy_"]), ([], [])):
        kernels = finding("kernels", "other kernels in the arms", a=a, b=b, settings={"threads": ["1", "3"], "x": 4})
        text = piped(verdict("diverged", [kernels], culprit()), experiment())
        assert "threads: 1 in arm a, 3 in arm b" in text


def test_a_script_that_did_not_run_counts_no_results() -> None:
    broken = finding("reproduction", script="repro/x.py", distinct=0, runs=12, text="it did not run: no such operator")
    text = piped(verdict("diverged", [broken], culprit()), experiment())
    assert "repro/x.py: it did not run: no such operator" in text
    assert "distinct" not in text
