"""Faults below every hook, in a program that knows nothing of the recorder: each is found at its operation and step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.peer_bench.faults import FAULTS
from benchmarks.peer_bench.running import traced, trained
from detrun.compare.trace_join import join
from detrun.compare.trace_rank import compare_rank
from detrun.compare.trace_summary import TraceComparison
from detrun.records.trace_reader import open_trace

STEPS = 6
"""The faults that strike once do it in the sixth."""


def compared(folder: Path, *options: str, b: tuple[str, ...] = ()) -> tuple[TraceComparison, dict[str, Any]]:
    """Two arms traced at level 4, the second with more options, and where their own records of steps differ."""
    arms = [traced(folder / arm, 4, STEPS, *options, *more) for arm, more in (("a", ()), ("b", b))]
    first = {
        name: next((x["step"] for x, y in zip(*arms, strict=True) if x[name] != y[name]), None)
        for name in ("loss", "grad_norm", "state")
    }
    readings = compare_rank(open_trace(folder / "a", 0), open_trace(folder / "b", 0))
    assert not readings.incomplete
    return join([readings]), first


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_at_its_operation(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    found, first = compared(tmp_path, "--fault", name, b=("--armed",))
    assert first["state"] == fault.step
    assert found.pattern == "origin"
    assert found.lead is not None
    event = found.lead.event
    assert (found.lead.role, event.op, event.phase, event.scope) == ("origin", fault.operator, fault.phase, fault.scope)
    assert event.step == fault.step + 1
    assert not found.lead.inputs
    assert found.lead.outputs


@pytest.mark.slow
def test_a_bit_that_no_loss_shows_is_found_in_a_narrow_window(tmp_path: Path) -> None:
    # one step traced, one block: what the last pass of a search does
    asked = {"steps": [STEPS, STEPS], "scopes": ["layers.1", "layers.1.*"]}
    fault = FAULTS["bitflip_masked"]
    arms = {
        arm: traced(tmp_path / arm, 4, STEPS, "--fault", "bitflip_masked", *more, **asked)
        for arm, more in (("a", ()), ("b", ("--armed",)))
    }
    assert [step["loss"] for step in arms["a"]] == [step["loss"] for step in arms["b"]]
    reading = compare_rank(open_trace(tmp_path / "a", 0), open_trace(tmp_path / "b", 0))
    lead = join([reading]).lead
    assert lead is not None
    assert (lead.role, lead.event.op, lead.event.scope) == ("origin", fault.operator, fault.scope)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--fp8",), ("--dropout", "0.1"), ("--fault", "nondet_bwd")], ids=str)
def test_nothing_is_found_in_a_clean_pair(options: tuple[str, ...], tmp_path: Path) -> None:
    found, first = compared(tmp_path, *options)
    assert set(first.values()) == {None}
    assert found.pattern == "nothing"
    assert found.lead is None
    assert not found.others


@pytest.mark.slow
def test_tracing_changes_no_bit_of_the_run(tmp_path: Path) -> None:
    untraced = trained(tmp_path / "untraced", "--steps", str(STEPS), "--dropout", "0.1")
    for level in (2, 3, 4):
        run = traced(tmp_path / str(level), level, STEPS, "--dropout", "0.1")
        for name in ("loss", "grad_norm", "state"):
            assert [step[name] for step in run] == [step[name] for step in untraced]
