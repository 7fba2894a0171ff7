"""Runs held against each other by what they wrote: the traps of printed means raise no alarm, a difference does."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detrun.compare.sources import Agreements, Held, SourceAsked, compare_streams, hold_against, singles, survey_stream
from detrun.compare.streams import PairTally
from detrun.records.sources import Part, SourceSpec, Stream, load_pattern, read_attempt
from detrun.records.sources.number import Number, exact, parse_number, single
from detrun.records.sources.reading import Reading
from tests.records.sources.megatron_log import TrainingLog, balance_of, log_of, loss_of

METRICS = ("lm_loss", "load_balancing_loss", "grad_norm")


def asked(every: int = 1, steps: int = 12, metrics: tuple[str, ...] = METRICS) -> SourceAsked:
    spec = SourceSpec("log", None, "megatron", every=every)
    return SourceAsked(spec, load_pattern("megatron"), steps, metrics, metrics)


def stream(tmp_path: Path, lines: list[str], begins: int = 1, metrics: tuple[str, ...] = METRICS) -> Stream:
    path = tmp_path / "x.log"
    path.write_text("".join(f"{line}\n" for line in lines))
    wants = asked(metrics=metrics)
    return read_attempt(wants.spec, wants.pattern, [(Part(path), "x.log")], metrics, begins)


def differing(a: Stream, b: Stream, metrics: tuple[str, ...] = METRICS) -> tuple[dict[str, list[int]], Agreements]:
    tally, agreements = PairTally("a", "b"), Agreements()
    compare_streams(tally, 0, a, b, asked(metrics=metrics), agreements)
    return {found.stream.name: sorted(found.steps) for found in tally.streams.values()}, agreements


def test_a_resumed_runs_two_step_mean_is_no_difference(tmp_path: Path) -> None:
    whole, resumed = stream(tmp_path, log_of(range(1, 13))), stream(tmp_path, log_of(range(6, 13)), begins=6)
    assert resumed.series["lm loss"][7].number != whole.series["lm loss"][7].number  # the trap is there
    found, agreements = differing(whole, resumed)
    assert found == {}
    assert agreements["lm_loss"].steps == 7 and not agreements["lm_loss"].apart


@pytest.mark.parametrize("step", [6, 7, 8, 12])
def test_a_real_difference_beside_the_two_step_mean_is_found(tmp_path: Path, step: int) -> None:
    whole = stream(tmp_path, log_of(range(1, 13)))
    resumed = stream(tmp_path, log_of(range(6, 13), change={step: 2e-5}), begins=6)
    found, _ = differing(whole, resumed)
    assert found == {"lm_loss": [step]} or (step == 6 and found == {"lm_loss": [6, 7]})


def test_a_run_resumed_after_its_first_step_is_held_against_the_reference_s_own_mean(tmp_path: Path) -> None:
    whole, resumed = stream(tmp_path, log_of(range(1, 13))), stream(tmp_path, log_of(range(2, 13)), begins=2)
    assert differing(whole, resumed)[0] == {}
    resumed = stream(tmp_path, log_of(range(2, 13), change={2: 3e-5}), begins=2)
    assert 2 in differing(whole, resumed)[0]["lm_loss"]


def test_sums_over_skipped_iterations_are_no_difference_and_hide_none(tmp_path: Path) -> None:
    whole = stream(tmp_path, log_of(range(1, 13), skips=[4, 7]))
    resumed = stream(tmp_path, log_of(range(6, 13), skips=[7]), begins=6)
    found, agreements = differing(whole, resumed)
    assert found == {}
    assert agreements["load_balancing_loss"].apart == [7]
    changed = stream(tmp_path, log_of(range(6, 13), skips=[7], change={9: 2e-5}), begins=6)
    assert differing(whole, changed)[0] == {"lm_loss": [9]}


def test_lines_every_few_steps_are_compared_where_they_are_means_of_the_same(tmp_path: Path) -> None:
    whole = stream(tmp_path, log_of(range(1, 13), interval=3))
    resumed = stream(tmp_path, log_of(range(5, 13), interval=3), begins=5)
    found, agreements = differing(whole, resumed)
    assert found == {}
    assert agreements["lm_loss"].apart == [6] and agreements["lm_loss"].steps == 2
    changed = stream(tmp_path, log_of(range(5, 13), interval=3, change={8: 5e-5}), begins=5)
    assert differing(whole, changed)[0] == {"lm_loss": [9]}


def test_a_mean_that_one_run_leaves_out_and_the_other_prints_is_a_difference(tmp_path: Path) -> None:
    def run(loss: float) -> Stream:
        log = TrainingLog()
        lines = [log.step(step, {"lm loss": loss if step == 4 else 2.0}) or "" for step in range(1, 7)]
        return stream(tmp_path, lines, metrics=("lm_loss",))

    clean, nan = run(2.0), run(float("nan"))
    assert differing(clean, nan, ("lm_loss",))[0] == {"lm_loss": [4]}
    assert differing(nan, run(float("nan")), ("lm_loss",))[0] == {}


def test_a_cumulative_rate_that_restarts_is_shown_and_never_compared(tmp_path: Path) -> None:
    name = "mtp_1_cumulative_acceptance_rate"
    series = {step: Reading(name, step, single(step / 10), "f", step, step) for step in range(1, 5)}
    other = {step: Reading(name, step, single(step / 9), "f", step, step) for step in range(1, 5)}
    assert differing(Stream({name: series}), Stream({name: other}), (name,)) == ({}, {})


def test_one_digit_is_a_difference_and_its_place_is_told(tmp_path: Path) -> None:
    a, b = stream(tmp_path, log_of(range(1, 5))), stream(tmp_path, log_of(range(1, 5), change={3: 1e-5}))
    tally = PairTally("a", "b")
    compare_streams(tally, 0, a, b, asked(), {})
    (found,) = tally.streams.values()
    assert (found.first_step, found.steps[3].ulp) == (3, None)
    assert found.a["printed"] == f"{loss_of(3):.6E}" and found.a["place"] == "x.log:3"


def test_missing_metrics_and_steps_are_gaps(tmp_path: Path) -> None:
    lines = log_of(range(1, 7))
    survey = survey_stream("a", 0, stream(tmp_path, lines[:2] + lines[3:]), asked(steps=6))
    assert [(gap.kind, gap.name, gap.step) for gap in survey.gaps] == [("metric-step", metric, 3) for metric in METRICS]
    assert survey_stream("a", 0, Stream(), asked(steps=6)).unreadable
    few = survey_stream("a", 0, stream(tmp_path, lines), asked(steps=6, metrics=("lm_loss", "mtp_loss")))
    assert [(gap.kind, gap.name) for gap in few.gaps] == [("metric", "mtp_loss")]


def test_a_source_of_every_third_step_ends_at_the_last_such_step(tmp_path: Path) -> None:
    survey = survey_stream("a", 0, stream(tmp_path, log_of(range(1, 12), interval=5)), asked(every=5, steps=12))
    assert survey.last == 12 and not survey.gaps


def held(lines: list[str], tmp_path: Path, ranks: int = 1, off: dict[int, float] | None = None) -> Held:
    """The log held against what a recorder has of it: float32, on the last of some ranks."""
    values = {
        "lm_loss": {s: {ranks - 1: [exact(loss_of(s) + (off or {}).get(s, 0), "float32")]} for s in range(1, 13)},
        "load_balancing_loss": {s: {ranks - 1: [exact(balance_of(s), "float32")]} for s in range(1, 13)},
    }
    return hold_against(values, stream(tmp_path, lines), asked())


@pytest.mark.parametrize("skips", [(), (4,), (2, 7)])
def test_a_log_agrees_with_the_bits_that_it_prints(tmp_path: Path, skips: tuple[int, ...]) -> None:
    found = held(log_of(range(1, 13), skips=skips), tmp_path, ranks=2)
    assert found.contradictions == []
    assert found.agreements["lm_loss"].steps >= 9


def test_a_log_that_contradicts_the_bits_is_found(tmp_path: Path) -> None:
    found = held(log_of(range(1, 13)), tmp_path, off={5: 2e-5})
    assert [(each.metric, each.step) for each in found.contradictions] == [("lm_loss", 5)]


def test_event_files_agree_bit_by_bit_or_not_at_all() -> None:
    wants = SourceAsked(SourceSpec("tensorboard", "x"), load_pattern(None), 2, ("loss",), ("loss",))
    series = {1: Reading("loss", 1, single(0.1), "f", 1, 1), 2: Reading("loss", 2, single(0.2), "f", 2, 2)}
    one_off = Number(single(0.2).bits + 1, "float32", "exact")
    values = {"loss": {1: {0: [exact(0.1)]}, 2: {0: [one_off]}}}
    found = hold_against(values, Stream({"loss": series}), wants)
    assert [each.step for each in found.contradictions] == [2]


def test_what_the_program_reports_is_held_against_what_the_recorder_calls_the_same(tmp_path: Path) -> None:
    lines = stream(tmp_path, log_of(range(1, 5)), metrics=("loss",))
    scaled = {step: {0: [exact(loss_of(step) / 4, "float32")]} for step in range(1, 5)}
    reported = {step: {0: [exact(loss_of(step), "float32")]} for step in range(1, 5)}
    both = {"loss": scaled, "lm_loss": reported}
    found = hold_against(both, lines, asked(metrics=("loss",)), recorder=True)
    assert not found.contradictions and found.agreements["loss"].steps == 4
    assert hold_against({"loss": scaled}, lines, asked(metrics=("loss",)), recorder=True).agreements == {}


def test_what_is_printed_may_be_the_mean_over_ranks() -> None:
    wants = SourceAsked(SourceSpec("tensorboard", "x"), load_pattern(None), 1, ("loss",), ("loss",))
    series = {1: Reading("loss", 1, single(0.25), "f", 1, 1)}
    of = {rank: [exact(value, "float32")] for rank, value in enumerate((0.1, 0.4))}
    assert hold_against({"loss": {1: of}}, Stream({"loss": series}), wants).contradictions == []
    of[1] = [exact(0.5, "float32")]
    assert len(hold_against({"loss": {1: of}}, Stream({"loss": series}), wants).contradictions) == 1


@settings(deadline=None)
@given(
    st.integers(1, 9),
    st.lists(st.floats(0.0078125, 100, width=32), min_size=10, max_size=10),
    st.integers(1, 4),
)
def test_what_a_mean_leaves_for_its_last_step_holds_the_true_number(
    begins: int, losses: list[float], interval: int
) -> None:
    log, series, window = TrainingLog(10, interval), {}, begins
    for step in range(begins, 11):
        line = log.step(step, {"lm loss": losses[step - 1]})
        if line is not None:
            number = parse_number(line.partition("lm loss: ")[2].partition(" |")[0])
            series[step] = Reading("lm loss", step, number, "f", step, window)
            window = window if step == begins else step + 1
    for step, (low, high) in singles(series).items():
        assert float(low) <= losses[step - 1] <= float(high)
