"""Figures as data: packed arrays, colors and names that say the same without color, sizes within bounds."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from detrun.experiments.judge import judge
from detrun.records.verdict import Finding
from detrun.report.chart import label, packed
from detrun.report.chart_bars import attempts_figure, times_figure
from detrun.report.chart_lines import distance_figure, values_figure
from detrun.report.chart_map import map_data, spread_figure
from detrun.report.html import render_html
from detrun.report.page_data import page_data
from detrun.report.series import Apart, Pair, Run, Series, Values
from tests.records_factory import make_experiment
from tests.report import localize_scenes, resume_scenes


def large(ranks: int = 64, steps: int = 2000, metrics: int = 5, runs: int = 2) -> Series:
    """Everything differs everywhere, in numbers that no compression makes small."""
    random = np.random.default_rng(6)
    names = tuple(f"metric_{at}" for at in range(metrics))

    def line() -> Any:
        return random.random(steps).astype(np.float32)

    return Series(
        columns=np.arange(1, steps + 1),
        width=1,
        ranks=tuple(range(ranks)),
        of_ranks=ranks,
        runs=tuple(Run("abcdefghi"[at], 0, "repeat" if at else "reference", "abcdefghi"[at]) for at in range(runs)),
        metrics=names,
        values=tuple(Values(run, name, 0, line(), line(), line()) for run in range(runs) for name in names),
        pairs=tuple(
            Pair(
                0,
                run,
                tuple(Apart(name, random.random(steps) * 1e9) for name in names),
                random.integers(1, 8, (ranks, steps), np.uint8),
            )
            for run in range(1, runs)
        ),
        streams=("batch", "RNG", "gradients", *names),
    )


def unpacked(array: dict[str, Any]) -> Any:
    return np.frombuffer(base64.b64decode(array["bdata"]), array["dtype"])


def test_a_pair_of_64_ranks_and_2000_steps_stays_below_5_megabytes(tmp_path: Any) -> None:
    made = make_experiment(tmp_path)
    verdict = judge(made.folder, write=False)
    page = render_html(verdict, made.file, large(), plotly_link="../assets/plotly.min.js")
    assert 100_000 < len(page.encode()) < 1_500_000


def test_the_arrays_are_those_of_the_series() -> None:
    series = large(ranks=3, steps=10, metrics=2)
    data = values_figure(series)["data"]
    lines = [trace for trace in data if "fill" not in trace and trace["line"].get("width")]
    assert np.array_equal(unpacked(lines[0]["y"]), series.values[0].shown)
    found = map_data(series)
    assert found is not None
    assert np.array_equal(unpacked(found["pairs"][0]).reshape(3, 10), series.pairs[0].cells)


def test_a_distance_begins_at_the_first_step_that_differs() -> None:
    series = large(ranks=1, steps=6, metrics=1)
    ulp = np.array([np.nan, np.nan, 3.0, np.nan, 2.0**40, 1.0])
    pair = Pair(0, 1, (Apart("metric_0", ulp, (3,)),), series.pairs[0].cells)
    figure = distance_figure(Series(**{**_fields(series), "pairs": (pair,)}))
    assert figure is not None
    line, marks = figure["data"]
    assert line["from"] == 2
    assert np.array_equal(unpacked(line["y"]), ulp[2:], equal_nan=True)
    assert marks["x"] == [4]  # it differs there, by no number
    assert figure["layout"]["yaxis"]["range"][1] > np.log10(2.0**40)


def test_lines_differ_in_more_than_color() -> None:
    figure = distance_figure(large(ranks=1, steps=8, metrics=5))
    assert figure is not None
    told = [(trace["line"]["dash"], trace["marker"]["symbol"]) for trace in figure["data"]]
    assert len({*told}) == 5


def test_equal_runs_have_neither_distances_nor_a_map() -> None:
    series = large(ranks=2, steps=4, metrics=1)
    equal = Pair(0, 1, (), np.zeros((2, 4), np.uint8))
    series = Series(**{**_fields(series), "pairs": (equal,)})
    assert distance_figure(series) is None
    assert map_data(series) is None


@pytest.mark.parametrize("name", ["</script>", "<b>", "a\u202eb", "%{y}", "x" * 500])
def test_names_in_figures_are_plain_and_short(name: str) -> None:
    assert len(label(name)) <= 90
    assert not {"<", "\u202e"} & {*label(name)}


def test_the_way_a_difference_went_on_is_numbered_by_rank() -> None:
    figure = spread_figure(localize_scenes.many_origins()[0])
    assert figure is not None
    (trace,) = figure["data"]
    assert trace["x"] == ["rank 0", "rank 1"]
    assert trace["y"][0] == "layers.0, forward"
    assert trace["z"][:2] == [[1, None], [None, 1]]
    assert spread_figure(localize_scenes.origin()[0]) is None


def test_attempts_have_bars_and_their_checkpoints() -> None:
    verdict, experiment = resume_scenes.lost_moments()
    figure = attempts_figure(verdict, experiment, None)
    assert figure is not None
    bars, saves, ended = figure["data"]
    assert list(zip(bars["base"], bars["x"], strict=True)) == [(0, 30), (0, 14), (10, 20)]
    assert (saves["x"], saves["marker"]["symbol"]) == ([10], ["diamond"])
    assert (ended["x"], ended["text"]) == ([14], ["SIGKILL"])


def test_step_times_are_boxes_and_what_is_no_time_is_left_out() -> None:
    verdict, experiment = localize_scenes.origin()
    assert times_figure(verdict) is None
    seconds = [0.1, 0.2, float("nan"), -1, "x", None, True, 0.3]
    finding = Finding(kind="step-times", severity="info", where={"arm": "a"}, what="", evidence={"seconds": seconds})
    verdict = verdict.model_copy(update={"findings": [finding]})
    figure = times_figure(verdict)
    assert figure is not None
    assert figure["data"][0]["y"] == [0.1, 0.2, 0.3]
    assert figure["data"][0]["name"] == "arm a"
    data = page_data(verdict, experiment, None)
    assert data is not None
    assert "How long a step takes" in render_html(verdict, experiment, plotly_link="x.js")


def test_arrays_are_little_endian() -> None:
    assert packed(np.array([1], ">i4")) == {"dtype": "i4", "bdata": "AQAAAA=="}


def _fields(series: Series) -> dict[str, Any]:
    return {name: getattr(series, name) for name in Series.__slots__}
