"""Traced arms against untraced ones: whether looking changed the run, and what a verdict makes of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from detrun.experiments.localize_findings import observer_findings, repeats_finding
from detrun.experiments.observer_check import ObserverCheck, Parting, check_observer
from detrun.records.layout import AttemptFolder
from tests.records_factory import MadeExperiment, flip_metric, flip_state, make_experiment

LAST = 4


def recordings(folder: Path) -> tuple[MadeExperiment, MadeExperiment]:
    """An untraced pair of 6 steps, and a traced one that was ended after step 4."""
    untraced = make_experiment(folder / "untraced", id="pair")
    traced = make_experiment(folder / "traced", id="pass", recorded_steps=LAST)
    return untraced, traced


def checked(untraced: MadeExperiment, traced: MadeExperiment, last: int = LAST) -> ObserverCheck:
    def attempts(made: MadeExperiment) -> list[AttemptFolder]:
        return [made.attempt(arm) for arm in "ab"]

    return check_observer(attempts(untraced), attempts(traced), 2, last)


def test_arms_that_come_out_the_same_when_traced(tmp_path: Path) -> None:
    check = checked(*recordings(tmp_path))
    assert check == ObserverCheck(compared=2 * 2 * LAST)
    assert check.repeats("a")
    assert check.repeats("b")


def test_a_traced_arm_that_differs_is_named_with_its_first_step(tmp_path: Path) -> None:
    untraced, traced = recordings(tmp_path)
    traced.edit("b", 1, 3, flip_state("parameters"))
    traced.edit("b", 0, 4, flip_metric("loss"))
    check = checked(untraced, traced)
    assert check.partings == [Parting("b", 3, "parameters")]
    assert (check.repeats("a"), check.repeats("b")) == (True, False)
    assert check.changed_before(4) == check.partings
    assert check.changed_before(3) == []


def test_steps_after_the_window_are_not_looked_at(tmp_path: Path) -> None:
    untraced, traced = recordings(tmp_path)
    traced.edit("b", 1, 4, flip_state("parameters"))
    assert checked(untraced, traced, last=3).partings == []


def test_what_a_traced_arm_did_not_come_to_report_in_its_last_step_is_no_difference(tmp_path: Path) -> None:
    """A program reports a metric after its step; an arm that is ended with the step never does."""
    untraced, traced = recordings(tmp_path)

    def reported(line: dict[str, Any]) -> None:
        line["metrics"]["loss"]["source"] = "record"
        line["metrics"]["loss"]["bits"] = "0x00000001"

    for arm in "ab":
        for rank in (0, 1):
            untraced.edit(arm, rank, LAST, reported)
    assert checked(untraced, traced).partings == []
    traced.edit("a", 0, LAST, flip_state("parameters"))
    assert checked(untraced, traced).partings == [Parting("a", LAST, "parameters")]


def test_an_arm_without_records_repeats_nothing(tmp_path: Path) -> None:
    untraced, traced = recordings(tmp_path)
    for arm in "ab":
        for rank in (0, 1):
            traced.metrics_path(arm, rank).unlink()
    assert not checked(untraced, traced).repeats("a")


def one_pass(check: ObserverCheck, parts_at: int | None = None) -> Any:
    first = None if parts_at is None else SimpleNamespace(step=parts_at)
    place = SimpleNamespace(path=Path("passes/2-operators"))
    verdict = SimpleNamespace(first_divergence=first)
    return SimpleNamespace(place=place, observer=check, verdict=verdict, broken=False)


def test_a_trace_that_changed_the_run_is_not_verified() -> None:
    changed = ObserverCheck(8, [Parting("b", 2, "parameters")])
    for parts_at in (None, 4):
        (finding,) = observer_findings([one_pass(changed, parts_at)], 4)
        assert (finding.kind, finding.severity) == ("observer", "not-verified")
        assert finding.where == {"arm": "b", "step": 2}
        assert "the trace changed the run" in finding.what


@pytest.mark.parametrize(("parting", "parts_at"), [(4, 4), (2, 2), (3, 1)])
def test_a_traced_arm_that_differs_where_the_arms_do_was_not_changed_by_the_trace(parting: int, parts_at: int) -> None:
    check = ObserverCheck(8, [Parting("b", parting, "parameters")])
    (finding,) = observer_findings([one_pass(check, parts_at)], 4)
    assert (finding.kind, finding.severity) == ("observer", "info")
    assert finding.evidence == {"compared": 8, "repeats": ["a"]}


def test_how_often_a_fault_came_back_is_told_where_that_was_not_always() -> None:
    passes = [one_pass(ObserverCheck(8), parts_at) for parts_at in (None, 4, None)]
    (finding,) = repeats_finding(passes)
    assert finding.evidence == {"came_back": 1, "of": 3}
    assert repeats_finding(passes[1:2]) == []
