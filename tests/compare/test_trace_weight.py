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


def test_clocks_that_are_gathered_to_be_logged_yield_as_well(tmp_path: Path) -> None:
    def program(*, clock: str, fault: str) -> Arm:
        run = Arm(plant=lambda event: fault if event.op == "aten.mm.default" else "")
        own = run.op("aten.copy_.default", [Value(clock)], phase="between")
        every = run.op("c10d._allgather_base_.default", own, phase="between", kind="collective")
        run.op("aten.max.default", every, phase="between")
        out = run.op("aten.mm.default", [Value("x")], scope="head")
        run.op("aten.mm_backward.default", out, scope="head", phase="backward")
        return run

    lead = compared(tmp_path, program(clock="12:00", fault=""), program(clock="12:01", fault="race")).lead
    assert lead is not None
    assert (lead.role, lead.event.op) == ("origin", "aten.mm.default")


def test_what_is_sent_to_other_ranks_leads_where_nothing_better_is_known(tmp_path: Path) -> None:
    def program(*, seed: str) -> Arm:
        run = Arm()
        run.op("aten.div.Tensor", [Value(seed)], phase="between")
        own = run.op("aten.copy_.default", [Value(seed)], phase="between")
        run.op("c10d.broadcast_.default", own, phase="between", kind="collective")
        out = run.op("aten.mm.default", [Value("x")], scope="head")
        run.op("aten.mm_backward.default", out, scope="head", phase="backward")
        return run

    lead = compared(tmp_path, program(seed="1"), program(seed="2")).lead
    assert lead is not None
    assert lead.event.op == "aten.copy_.default"
