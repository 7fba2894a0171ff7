"""What a report draws of the records: metrics, distances and a map, within bounds and whatever is broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from detrun.experiments import page
from detrun.experiments.judge import judge
from detrun.experiments.page import gather_series, sample
from detrun.experiments.page import series as binning
from detrun.experiments.page.series import decoded
from detrun.records.jobs import ArmPlan, Interruption, JobFile, Reference, ResumedFrom
from detrun.records.verdict import Verdict
from detrun.report.series import NOT_RECORDED, NOT_RUN, Series, Values
from tests.records_factory import Line, MadeExperiment, flip_metric, flip_state, make_experiment


def series_of(made: MadeExperiment) -> Series:
    found = gather_series(made.folder, made.file, judge(made.folder, write=False))
    assert found is not None
    return found


def values_of(series: Series, run: int, metric: str) -> Values:
    return next(each for each in series.values if (each.run, each.metric) == (run, metric))


def set_metric(name: str, bits: str, value: float | str) -> Callable[[Line], None]:
    def change(line: Line) -> None:
        line["metrics"][name] |= {"bits": bits, "value": value}

    return change


def test_a_metric_is_a_line_of_one_rank_and_a_band_of_all(tmp_path: Path) -> None:
    made = make_experiment(tmp_path)
    made.edit("b", 1, 4, set_metric("loss", "0x41200000", 10.0))
    series = series_of(made)
    assert series.columns.tolist() == [1, 2, 3, 4, 5, 6]
    a, b = values_of(series, 0, "loss"), values_of(series, 1, "loss")
    assert (a.low, a.high) == (None, None)
    assert b.rank == 1  # where it differs
    assert b.low is not None
    assert b.high is not None
    assert (b.low[3], b.high[3], b.shown[3]) == (1.0, 10.0, 10.0)
    assert np.array_equal(np.delete(b.shown, 3), np.delete(a.shown, 3))


def test_distances_are_those_of_the_worst_rank_and_nothing_where_all_are_equal(tmp_path: Path) -> None:
    made = make_experiment(tmp_path)
    made.edit("b", 0, 3, flip_metric("grad_norm"))
    made.edit("b", 1, 3, flip_metric("grad_norm", 16))
    (pair,) = series_of(made).pairs
    (apart,) = pair.apart
    assert apart.metric == "grad_norm"
    assert np.isnan(np.delete(apart.ulp, 2)).all()
    assert apart.ulp[2] == 16


def test_the_map_names_what_comes_first_in_causal_order_and_what_is_missing(tmp_path: Path) -> None:
    made = make_experiment(tmp_path, ranks=3)
    made.edit_every("b", 1, flip_state("gradients"), range(3, 7))
    made.edit_every("b", 1, flip_metric("loss"), range(2, 7))
    made.drop("b", 2, 5, 6)
    series = series_of(made)
    (pair,) = series.pairs
    code = {name: at for at, name in enumerate(series.streams, 1)}
    assert pair.cells.tolist() == [
        [0] * 6,
        [0, code["loss"], *[code["gradients"]] * 4],
        [0, 0, 0, 0, NOT_RECORDED, NOT_RECORDED],
    ]


def test_a_nan_is_marked_and_leaves_no_number(tmp_path: Path) -> None:
    made = make_experiment(tmp_path)
    made.edit("b", 1, 2, set_metric("loss", "0x7fc00000", "nan"))
    made.edit("b", 0, 5, set_metric("loss", "0xff800000", "-inf"))
    series = series_of(made)
    found = values_of(series, 1, "loss")
    assert found.bad == (1, 4)
    for line in (found.shown, found.low, found.high):
        assert line is not None
        assert not np.isinf(line).any()
    (apart,) = series.pairs[0].apart
    assert apart.unmeasured == (1,)


def test_what_is_not_there_is_said_and_costs_nothing_else(tmp_path: Path) -> None:
    made = make_experiment(tmp_path, ranks=4)
    made.metrics_path("b", 2).unlink()
    made.metrics_path("a", 3).write_bytes(b"\x00 no line\n{}\n[[[\n")
    series = series_of(made)
    assert series.notes == ("arm a: no records of rank 3", "arm b: no records of rank 2")
    assert (series.pairs[0].cells[2:] == NOT_RECORDED).all()
    assert not series.pairs[0].differs
    assert series.pairs[0].incomplete


def test_nothing_at_all_is_no_series(tmp_path: Path) -> None:
    made = make_experiment(tmp_path)
    for arm in "ab":
        for rank in range(2):
            made.metrics_path(arm, rank).write_bytes(b"")
    assert gather_series(made.folder, made.file, judge(made.folder, write=False)) is None


def test_of_many_steps_a_column_holds_the_extremes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binning, "MAX_COLUMNS", 50)
    made = make_experiment(tmp_path, ranks=2, steps=120)
    made.edit("b", 1, 50, set_metric("loss", "0x42c80000", 100.0))
    series = series_of(made)
    assert series.width == 3
    assert series.columns.tolist() == list(range(1, 121, 3))
    found = values_of(series, 1, "loss")
    at = series.columns.tolist().index(49)
    assert found.high is not None
    assert found.high[at] == 100
    assert found.shown[at] == np.float32(5 / 50)
    (pair,) = series.pairs
    assert np.flatnonzero(pair.cells[1]).tolist() == [at]
    assert np.flatnonzero(~np.isnan(pair.apart[0].ulp)).tolist() == [at]
    assert "each point stands for 3 steps" in series.notes[-1]


def test_of_many_ranks_those_are_read_that_the_verdict_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MAX_RANKS", 8)
    made = make_experiment(tmp_path, ranks=40)
    made.edit("b", 29, 4, flip_metric("loss"))
    series = series_of(made)
    assert len(series.ranks) <= 8
    assert {0, 29, 39} <= {*series.ranks}
    assert series.pairs[0].differs
    assert series.notes[0].startswith(f"{len(series.ranks)} of 40 ranks are drawn")


def test_bytes_bound_the_ranks_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_experiment(tmp_path, ranks=32)
    runs, _ = page.runs_of(made.folder, made.file, judge(made.folder, write=False))
    size = made.metrics_path("a", 0).stat().st_size
    monkeypatch.setattr(page, "MAX_BYTES", 2 * 16 * size)
    assert len(sample(32, [5], runs)) == 16
    assert 5 in sample(32, [5, 99, -1], runs)


def test_steps_that_no_run_can_have_taken_cost_no_memory(tmp_path: Path) -> None:
    made = make_experiment(tmp_path)

    def later(line: Line) -> None:
        line["step"] = 10**14

    made.edit("b", 0, 6, later)
    assert series_of(made).columns.tolist() == [1, 2, 3, 4, 5, 6, 10**14]


def test_many_arms_keep_those_that_differ(tmp_path: Path) -> None:
    arms = tuple("abcdefghijkl")
    made = make_experiment(tmp_path, arms=arms)
    made.edit("l", 0, 3, flip_metric("loss"))
    series = series_of(made)
    assert [run.label for run in series.runs] == ["a", "b", "c", "d", "e", "f", "g", "h", "l"]
    assert series.notes == ("3 more runs are not shown; the verdict is on all of them",)


def test_attempts_of_a_resume_check_cover_their_own_steps(tmp_path: Path) -> None:
    made = make_experiment(tmp_path)
    plans = [ArmPlan(id="a", role="reference"), ArmPlan(id="b", role="interrupted")]
    made.edit_experiment(experiment="resume-check", arms=plans)
    ended = Interruption(kind="kill", step=4, ranks=[0, 1])
    made.edit_job("b", state="interrupted", exit_code=137, interruption=ended.model_dump())
    second = made.folder.attempt("b", 1)
    for folder in (second.metrics_dir, second.environment_dir, second.saves_dir):
        folder.mkdir(parents=True)
    JobFile(arm="b", attempt=1, state="done", resumed_from=ResumedFrom(path="/c/3", step=3, source="saves")).write(
        second.job_file
    )
    for rank in range(2):
        lines = made.lines("b", rank)
        second.metrics(rank).write_text("".join(json.dumps(line) + "\n" for line in lines[3:]))
        made.write_lines("b", rank, lines[:4])
        events = [{"event": name, "path": "/c/5", "step": 5, "time": 1.0} for name in ("begin", "end")]
        second.saves(rank).write_text("".join(json.dumps(event) + "\n" for event in events))
    series = series_of(made)
    assert [(run.label, run.first, run.saves) for run in series.runs] == [
        ("a", 1, ()),
        ("b, attempt 0", 1, ()),
        ("b, attempt 1", 4, (5,)),
    ]
    first, second_pair = (pair.cells.tolist()[0] for pair in series.pairs)
    assert first == [0, 0, 0, 0, NOT_RUN, NOT_RUN]
    assert second_pair == [NOT_RUN, NOT_RUN, NOT_RUN, 0, 0, 0]


def test_a_localization_draws_the_records_of_what_it_began_from(tmp_path: Path) -> None:
    made = make_experiment(tmp_path)
    made.edit("b", 0, 3, flip_metric("loss"))
    verdict = judge(made.folder)
    other = make_experiment(tmp_path, name="other")
    for arm in "ab":
        for path in sorted((other.folder.path / "arms" / arm).rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
    descent = {"kind": "descent", "severity": "info", "what": "x", "evidence": {"pass": made.folder.id}}
    localized = verdict.model_validate({**verdict.model_dump(), "experiment": "localize", "findings": [descent]})
    series = gather_series(other.folder, other.file, localized)
    assert series is not None
    assert series.pairs[0].differs


def test_an_arm_held_against_an_earlier_nights_is_drawn_from_both_experiments(tmp_path: Path) -> None:
    earlier, later = make_experiment(tmp_path), make_experiment(tmp_path)
    later.edit_every("a", 0, flip_metric("loss"), range(4, 7))
    held = make_experiment(tmp_path, ranks=1, steps=1)
    for path in sorted((held.folder.path / "arms").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    told = [Reference(experiment=each.folder.id, path=str(each.folder.path), arm="a") for each in (earlier, later)]
    candidate = {"candidate": told[1].model_dump(mode="json")}
    held.edit_experiment(experiment="against", reference=told[0], options=candidate, ranks=2, steps=6)
    verdict = judge(later.folder, write=False)
    series = gather_series(held.folder, held.file, verdict)
    assert series is not None
    assert [run.label for run in series.runs] == ["a", "b"]
    assert np.flatnonzero(series.pairs[0].cells[0]).tolist() == [3, 4, 5]


@pytest.mark.parametrize(
    ("dtype", "bits", "value"),
    [
        ("float32", "0x3f800000", 1.0),
        ("float64", "0x3ff0000000000000", 1.0),
        ("bfloat16", "0x3f80", 1.0),
        ("float16", "0x3c00", 1.0),
        ("int32", "0xfffffffe", -2.0),
        ("uint64", "0x0000000000000007", 7.0),
        ("bool", "0x01", 1.0),
    ],
)
def test_bits_of_every_dtype_become_their_number(dtype: str, bits: str, value: float) -> None:
    assert decoded([(bits, dtype)] * 2).tolist() == [value, value]
    assert decoded([(bits, dtype), ("0x3f800000", "float32")]).tolist() == [value, 1.0]


def test_a_page_that_cannot_be_drawn_does_not_cost_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_experiment(tmp_path, ranks=1, steps=2)
    made.edit("b", 0, 2, flip_metric("loss"))

    def broken(*_: object) -> Series:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(page, "gather_series", broken)
    assert judge(made.folder).verdict == "diverged"
    written = Verdict.read(made.folder.verdict_file)
    (note,) = written.of_kind("report")
    assert (note.severity, note.what) == ("warning", "the page: ZeroDivisionError: a bug")
