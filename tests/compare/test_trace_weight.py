"""A difference that only a log reads does not stand before one that is trained on."""

from __future__ import annotations

from pathlib import Path

from tests.compare.trace_programs import compared
from tests.trace_factory import Arm, Value


def arm(*, clock: str, fault: str = "", data: str = "words", trained: bool = True) -> Arm:
    """A step that logs a clock, then embeds, goes forward and backward. fault: in the matrix product."""
    run = Arm(plant=lambda event: fault if event.op == "aten.mm.default" else "")
    run.op("aten.div.Tensor", [Value(clock)], phase="between")
    hidden = run.op("aten.embedding.default", [Value("table"), Value(data)], scope="embed")
    out = run.op("aten.mm.default", hidden, scope="head")
    if trained:
        run.op("aten.mm_backward.default", out, scope="head", phase="backward")
    return run


def test_a_clock_that_is_logged_yields_to_a_racing_operation(tmp_path: Path) -> None:
    lead = compared(tmp_path, arm(clock="12:00"), arm(clock="12:01", fault="race")).lead
    assert lead is not None
    assert (lead.role, lead.event.op) == ("origin", "aten.mm.default")


def test_a_clock_that_is_logged_yields_to_data_that_is_trained_on(tmp_path: Path) -> None:
    lead = compared(tmp_path, arm(clock="12:00"), arm(clock="12:01", data="other words")).lead
    assert lead is not None
    assert (lead.role, lead.kind, lead.event.op) == ("outside-the-trace", "data", "aten.embedding.default")


def test_a_clock_leads_where_nothing_else_differs(tmp_path: Path) -> None:
    lead = compared(tmp_path, arm(clock="12:00"), arm(clock="12:01")).lead
    assert lead is not None
    assert lead.event.op == "aten.div.Tensor"


def test_data_that_is_trained_on_stays_before_what_follows_from_it(tmp_path: Path) -> None:
    lead = compared(tmp_path, arm(clock="12:00"), arm(clock="12:00", data="other words", fault="race")).lead
    assert lead is not None
    assert lead.event.op == "aten.embedding.default"


def test_the_first_reader_of_what_was_written_unseen_leads_though_its_own_result_ends(tmp_path: Path) -> None:
    def program(*, hidden: str) -> Arm:
        run = Arm()
        (made,) = run.op("aten.add.Tensor", [Value("x")], scope="block")
        made.content += hidden
        run.op("aten.mean.dim", [made], scope="norm", content=["the same after rounding"])
        out = run.op("aten.mul.Tensor", [made], scope="norm")
        run.op("aten.mul_backward.default", out, scope="norm", phase="backward")
        return run

    lead = compared(tmp_path, program(hidden=""), program(hidden="!")).lead
    assert lead is not None
    assert (lead.role, lead.event.op) == ("uncaptured-producer", "aten.mean.dim")
