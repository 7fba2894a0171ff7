"""Events that one arm alone has: which of them lead, and which are beside the point."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from detrun.compare.trace_summary import Lead
from tests.compare.trace_programs import compared
from tests.trace_factory import Arm, Value


def lead_in(folder: Path, program: Callable[[Arm, bool], None], more_in: str = "b") -> Lead:
    """The lead where the arm `more_in` does something more."""
    arms = {name: Arm() for name in "ab"}
    for name, arm in arms.items():
        program(arm, name == more_in)
    result = compared(folder, arms["a"], arms["b"])
    assert result.verdict == "diverged"
    assert result.lead is not None
    return result.lead


def looks_and_nudges(arm: Arm, more: bool) -> None:
    """Looks for a maximum, and something unseen changes what was looked at."""
    (x,) = arm.op("aten.mm.default", [Value("x")], scope="layers.0")
    if more:
        (largest,) = arm.op("aten.abs.default", [x], scope="layers.0")
        arm.op("aten.argmax.default", [largest], scope="layers.0")
        x.content += "!"
    arm.op("aten.add.Tensor", [x], scope="layers.1")


@pytest.mark.parametrize("more_in", ["a", "b"])
def test_an_event_whose_result_nothing_reads_does_not_lead_where_something_differs(
    tmp_path: Path, more_in: str
) -> None:
    lead = lead_in(tmp_path, looks_and_nudges, more_in)
    assert (lead.role, lead.event.op, lead.event.scope) == ("uncaptured-producer", "aten.add.Tensor", "layers.1")
    assert lead.after is not None
    assert lead.after.op == "aten.mm.default"


@pytest.mark.parametrize("more_in", ["a", "b"])
def test_an_event_whose_result_is_read_leads(tmp_path: Path, more_in: str) -> None:
    def program(arm: Arm, more: bool) -> None:
        (x,) = arm.op("aten.mm.default", [Value("x")], scope="layers.0")
        if more:
            (x,) = arm.op("aten.mul.Tensor", [x], scalars="1.5", scope="layers.0")
        arm.op("aten.add.Tensor", [x], scope="layers.1")

    lead = lead_in(tmp_path, program, more_in)
    assert (lead.role, lead.kind, lead.event.op) == ("outside-the-trace", "control-flow", "aten.mul.Tensor")
    assert (lead.a is None, lead.b is None) == (more_in == "b", more_in == "a")
    assert f"in {more_in.upper()} alone" in lead.why


def test_of_a_chain_of_events_that_is_read_the_first_leads(tmp_path: Path) -> None:
    def program(arm: Arm, more: bool) -> None:
        (x,) = arm.op("aten.mm.default", [Value("x")])
        if more:
            arm.op("aten.isnan.default", [x])
            (scale,) = arm.op("aten.abs.default", [x])
            (scale,) = arm.op("aten.max.default", [scale])
            (x,) = arm.op("aten.div.Tensor", [x, scale])
        arm.op("aten.add.Tensor", [x])

    lead = lead_in(tmp_path, program)
    assert (lead.role, lead.event.op) == ("outside-the-trace", "aten.abs.default")


def test_a_write_in_place_into_what_is_read_leads(tmp_path: Path) -> None:
    def program(arm: Arm, more: bool) -> None:
        weight = Value("w")
        arm.op("aten.add_.Tensor", [weight, Value("g")], phase="optimizer", into=[weight])
        if more:
            arm.op("aten.mul_.Tensor", [weight], scalars="2.0", phase="optimizer", into=[weight])
        arm.op("parameters", [weight], 0, kind="parameter", phase="optimizer", scope="norm.weight")

    lead = lead_in(tmp_path, program)
    assert (lead.role, lead.kind, lead.event.op) == ("outside-the-trace", "control-flow", "aten.mul_.Tensor")


def test_a_draw_more_is_a_matter_of_random_numbers(tmp_path: Path) -> None:
    def program(arm: Arm, more: bool) -> None:
        if more:
            arm.op("aten.rand.default", [], rng="state 0")
        drawn = 1 if more else 0
        (x,) = arm.op("aten.native_dropout.default", [Value("x")], rng=f"state {drawn}")
        arm.op("aten.mm.default", [x])

    lead = lead_in(tmp_path, program)
    assert (lead.role, lead.kind, lead.event.op) == ("outside-the-trace", "rng", "aten.rand.default")
    assert (lead.a, lead.b is not None) == (None, True)
    assert "drew from a random number generator" in lead.why


def test_a_draw_more_from_a_stream_that_nothing_else_draws_from_does_not_lead(tmp_path: Path) -> None:
    def program(arm: Arm, more: bool) -> None:
        if more:
            arm.op("aten.rand.default", [], rng="a stream of its own")
        arm.op("aten.native_dropout.default", [Value("x")], rng="state 0", content=["y!" if more else "y"])

    lead = lead_in(tmp_path, program)
    assert (lead.role, lead.event.op) == ("origin", "aten.native_dropout.default")


@pytest.mark.parametrize("written", [True, False])
def test_a_batch_is_data_however_it_came_to_differ(tmp_path: Path, written: bool) -> None:
    def program(arm: Arm, more: bool) -> None:
        (tokens,) = arm.op("aten.index.Tensor", [Value("corpus")])
        if more and written:
            arm.op("aten.fill_.Scalar", [tokens], scalars="7", into=[tokens])
        elif more:
            arm.op("aten.clone.default", [Value("generator")])
            tokens.content += "!"
        arm.op("batch", [tokens], 0, kind="batch")
        arm.op("aten.embedding.default", [Value("table"), tokens], scope="embedding")

    lead = lead_in(tmp_path, program)
    assert (lead.role, lead.kind, lead.event.op, lead.inputs) == ("outside-the-trace", "data", "batch", (0,))
    assert ("aten.fill_.Scalar happened in B alone" in lead.why) is written


def test_what_one_arm_did_after_the_batch_did_not_write_it(tmp_path: Path) -> None:
    def program(arm: Arm, more: bool) -> None:
        arm.op("batch", [Value("words!" if more else "words")], 0, kind="batch")
        scale = arm.op("aten.full.default", []) if more else [Value("scale")]
        arm.op("aten.mul.Tensor", [Value("loss!" if more else "loss"), *scale])

    lead = lead_in(tmp_path, program)
    assert (lead.role, lead.kind, lead.event.op) == ("outside-the-trace", "data", "batch")
    assert "aten.full" not in lead.why


@pytest.mark.parametrize("more_in", ["a", "b"])
def test_where_nothing_else_differs_the_event_itself_is_the_difference(tmp_path: Path, more_in: str) -> None:
    def program(arm: Arm, more: bool) -> None:
        (x,) = arm.op("aten.mm.default", [Value("x")])
        if more:
            arm.op("aten.neg.default", [x], phase="between")
        arm.op("aten.add.Tensor", [x])

    lead = lead_in(tmp_path, program, more_in)
    assert (lead.role, lead.kind, lead.event.op) == ("outside-the-trace", "control-flow", "aten.neg.default")


def test_what_happens_after_the_first_difference_never_leads(tmp_path: Path) -> None:
    def program(arm: Arm, more: bool) -> None:
        (x,) = arm.op("aten.mm.default", [Value("x")], content=["y!" if more else "y"])
        if more:
            (x,) = arm.op("aten.mul.Tensor", [x])
        arm.op("aten.add.Tensor", [x])

    lead = lead_in(tmp_path, program)
    assert (lead.role, lead.event.op) == ("origin", "aten.mm.default")


def test_an_event_without_effect_does_not_lead_where_a_later_step_differs(tmp_path: Path) -> None:
    """A resumed program makes anew what the other one has: without consequence, and steps before the difference."""

    def program(arm: Arm, more: bool) -> None:
        (x,) = arm.op("aten.mm.default", [Value("x")])
        if more:
            arm.op("aten.full.default", [])
        arm.op("aten.add.Tensor", [x])
        for step in (2, 3):
            arm.step = step
            arm.op("batch", [Value("words!" if more and step == 3 else "words")], 0, kind="batch")

    lead = lead_in(tmp_path, program)
    assert (lead.role, lead.kind, lead.event.op, lead.event.step) == ("outside-the-trace", "data", "batch", 3)


def test_an_event_of_an_earlier_step_leads_where_its_result_is_read(tmp_path: Path) -> None:
    def program(arm: Arm, more: bool) -> None:
        buffer = Value("buffer")
        arm.op("aten.add_.Tensor", [buffer, Value("count")], into=[buffer])
        if more:
            arm.op("aten.zero_.default", [buffer], into=[buffer])
        arm.step = 2
        (x,) = arm.op("aten.div.Tensor", [Value("x"), buffer], scope="norm")
        arm.op("aten.mm.default", [x], scope="head")

    lead = lead_in(tmp_path, program)
    assert (lead.role, lead.kind, lead.event.op, lead.event.step) == (
        "outside-the-trace",
        "control-flow",
        "aten.zero_.default",
        1,
    )


def test_a_draw_at_the_end_of_a_step_is_the_lead_of_the_draws_of_the_next(tmp_path: Path) -> None:
    def program(arm: Arm, more: bool) -> None:
        arm.op("aten.mm.default", [Value("x")])
        if more:
            arm.op("aten.rand.default", [], rng="state 0")
        arm.step = 2
        (x,) = arm.op("aten.native_dropout.default", [Value("x")], rng=f"state {int(more)}")
        arm.op("aten.mm.default", [x])

    lead = lead_in(tmp_path, program)
    assert (lead.role, lead.event.op, lead.event.step) == ("outside-the-trace", "aten.rand.default", 1)


def test_an_origin_in_a_later_step_is_one_whatever_happened_before(tmp_path: Path) -> None:
    def program(arm: Arm, more: bool) -> None:
        if more:
            arm.op("aten.full.default", [])
        (x,) = arm.op("aten.mm.default", [Value("x")])
        arm.step = 2
        arm.op("aten.index_add.default", [x], scope="moe", content=["y!" if more else "y"])

    lead = lead_in(tmp_path, program)
    assert (lead.role, lead.event.op) == ("origin", "aten.index_add.default")
