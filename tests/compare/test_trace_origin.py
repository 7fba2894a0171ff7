"""Which event of two traces leads: planted faults in programs of any shape, and each rule by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from detrun.compare.trace_summary import Lead, TraceComparison
from tests.compare.trace_programs import Instruction, at_event, compared, run, threads
from tests.trace_factory import Arm, Value

EXAMPLES = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@EXAMPLES
@given(threads(), st.lists(st.integers(0, 5), max_size=40), st.lists(st.integers(0, 5), max_size=40))
def test_clean_arms_align_completely_in_whatever_order_their_threads_ran(
    folder: Path, program: list[list[Instruction]], order: list[int], other: list[int]
) -> None:
    a, b = run(Arm(), program, order), run(Arm(), program, other)
    for options in ({}, {"skip_equal": False}):
        result = compared(folder, a, b, **options)
        assert (result.verdict, result.lead, result.incomplete) == ("identical", None, [])
        assert result.events == len(a.events)


@EXAMPLES
@given(threads(), st.lists(st.integers(0, 5), max_size=40), st.lists(st.integers(0, 5), max_size=40), st.data())
def test_one_planted_fault_is_the_lead(
    folder: Path, program: list[list[Instruction]], order: list[int], other: list[int], data: st.DataObject
) -> None:
    a = run(Arm(), program, order)
    planted = data.draw(st.sampled_from(a.events))
    b = run(Arm(plant=at_event(planted.key)), program, other)
    result = compared(folder, a, b)
    assert result.verdict == "diverged"
    assert result.lead is not None
    assert (result.lead.role, result.lead.event.key) == ("origin", planted.key)
    assert result.pattern == "origin"
    assert result.lead.outputs
    assert not result.lead.inputs


@EXAMPLES
@given(threads(most=2), st.data())
def test_a_write_that_is_not_recorded_is_named_by_the_events_before_and_after_it(
    folder: Path, program: list[list[Instruction]], data: st.DataObject
) -> None:
    a = run(Arm(), program, [], steps=1)
    readers = [event for event in a.events if any(event.producers)]
    if not readers:
        return
    reader = data.draw(st.sampled_from(readers))
    part = next(number for number, back in enumerate(reader.producers) if back)
    writer = a.events[reader.seq - reader.producers[part]]
    # Everything that reads what that event wrote, from the reader on, finds something else there.
    b = run(Arm(), program, [], steps=1)
    changed = []
    for event in b.events:
        if event.seq < reader.seq:
            changed.append(event)
            continue
        inputs = tuple(
            bytes(16 - 1) + b"x" if back and event.seq - back == writer.seq else content
            for content, back in zip(event.inputs, event.producers, strict=True)
        )
        changed.append(event.__class__(**{**vars(event), "inputs": inputs}))
    b.events = changed
    result = compared(folder, a, b)
    lead = result.lead
    assert lead is not None
    assert (lead.role, lead.event.key) == ("uncaptured-producer", reader.key)
    assert lead.after is not None
    assert lead.after.key == writer.key
    assert result.pattern == "outside"


def outcome(folder: Path, a: Arm, b: Arm) -> tuple[TraceComparison, Lead]:
    result = compared(folder, a, b)
    assert result.verdict == "diverged"
    assert result.lead is not None
    return result, result.lead


def test_data_that_no_recorded_event_wrote_comes_from_outside(tmp_path: Path) -> None:
    def arm(content: str) -> Arm:
        arm = Arm()
        hidden = arm.op("aten.embedding.default", [Value("table"), Value(content)], scope="embed")
        arm.op("aten.mm.default", hidden, scope="head")
        return arm

    result, lead = outcome(tmp_path, arm("words"), arm("other words"))
    assert (lead.role, lead.kind, lead.event.op, lead.inputs) == (
        "outside-the-trace",
        "data",
        "aten.embedding.default",
        (1,),
    )
    assert result.pattern == "outside"
    assert not result.others


def test_a_batch_that_differs_is_data_and_no_origin(tmp_path: Path) -> None:
    def arm(content: str) -> Arm:
        arm = Arm()
        arm.op("batch", [Value(content)], 0, kind="batch")
        arm.op("aten.mm.default", [Value(content)])
        return arm

    _, lead = outcome(tmp_path, arm("one"), arm("two"))
    assert (lead.role, lead.kind, lead.event.op) == ("outside-the-trace", "data", "batch")


def test_a_shifted_random_stream_is_no_racing_kernel(tmp_path: Path) -> None:
    def arm(state: int) -> Arm:
        arm = Arm()
        x = Value("x")
        for number in range(3):
            (x,) = arm.op("aten.native_dropout.default", [x], scope=f"layers.{number}", rng=f"state {state + number}")
        return arm

    result, lead = outcome(tmp_path, arm(0), arm(1))
    assert (lead.role, lead.kind, lead.event.scope) == ("outside-the-trace", "rng", "layers.0")
    assert not result.others


def test_a_number_from_outside_is_named(tmp_path: Path) -> None:
    def arm(number: float) -> Arm:
        arm = Arm()
        arm.op("aten.mul.Scalar", [Value("x")], scalars=number.hex())
        return arm

    _, lead = outcome(tmp_path, arm(0.5), arm(0.25))
    assert (lead.role, lead.kind) == ("outside-the-trace", "scalar")
    assert "0x1.0000000000000p-1" in lead.why


def experts(order: tuple[int, ...], scoped: bool) -> Arm:
    """Experts whose results are added up in an order; their own work is in scopes of their own or all in one."""
    arm = Arm()
    (total,) = arm.op("aten.zeros.default", scope="moe")
    for expert in order:
        scope = f"moe.experts.{expert}" if scoped else "moe"
        chosen = arm.op("aten.index.Tensor", [Value("x"), Value(f"who goes to {expert}")], scope=scope)
        given = arm.op("aten.mm.default", [*chosen, Value(f"weight {expert}")], scope=scope)
        arm.op("aten.index_add_.default", [total, *given], scope="moe", into=[total])
    arm.op("aten.add.Tensor", [total, Value("residual")])
    return arm


@pytest.mark.parametrize("scoped", [True, False])
def test_another_order_of_calls_is_control_flow_and_blames_no_operation(tmp_path: Path, scoped: bool) -> None:
    result, lead = outcome(tmp_path, experts((0, 1, 2, 3), scoped), experts((2, 0, 1, 3), scoped))
    assert (lead.role, lead.kind) == ("outside-the-trace", "control-flow")
    assert lead.event.op == "aten.index_add_.default"
    assert lead.event.occurrence == 0
    assert result.pattern == "outside"
    assert not [other for other in result.others if other.role == "origin"]
    assert bool(result.notes) is not scoped  # what came in another order within one scope is said


def test_calls_in_another_order_that_add_nothing_up_are_the_same_calls(tmp_path: Path) -> None:
    def arm(order: tuple[int, ...]) -> Arm:
        arm = Arm()
        for expert in order:
            arm.op("aten.mm.default", [Value("x"), Value(f"weight {expert}")], scope="moe")
        return arm

    result = compared(tmp_path, arm((0, 1, 2)), arm((2, 1, 0)))
    assert result.verdict == "identical"
    assert "another order" in result.notes[0]


def test_a_race_among_calls_in_another_order_is_found(tmp_path: Path) -> None:
    def arm(order: tuple[int, ...], fault: str) -> Arm:
        arm = Arm()
        for expert in order:
            planted = fault if expert == 1 else ""
            arm.op(
                "aten.mm.default", [Value("x"), Value(f"weight {expert}")], scope="moe", content=[f"y{expert}{planted}"]
            )
        return arm

    result, lead = outcome(tmp_path, arm((0, 1, 2), ""), arm((2, 0, 1), "!"))
    assert (lead.role, lead.a is not None and lead.a.occurrence, lead.b is not None and lead.b.occurrence) == (
        "origin",
        1,
        2,
    )
    assert not result.others


def test_an_event_that_one_arm_lacks_is_a_difference_and_leads_if_it_comes_first(tmp_path: Path) -> None:
    def arm(extra: bool) -> Arm:
        arm = Arm()
        (x,) = arm.op("aten.mm.default", [Value("x")], scope="layers.0")
        if extra:
            arm.op("aten.clamp.default", [x], scope="layers.0")
        arm.op("aten.mm.default", [x], scope="layers.1")
        return arm

    for a, b, where in ((True, False, "A"), (False, True, "B")):
        result, lead = outcome(tmp_path, arm(a), arm(b))
        assert (lead.role, lead.kind, lead.event.op) == ("outside-the-trace", "control-flow", "aten.clamp.default")
        assert f"in {where} alone" in lead.why
        reading = result.readings[0]
        assert (reading.missing, reading.extra) == (int(a), int(b))


def test_a_call_more_shifts_the_count_and_does_not_mix_the_calls_up(tmp_path: Path) -> None:
    def arm(contents: list[str]) -> Arm:
        arm = Arm()
        for content in contents:
            arm.op("aten.relu.default", [Value(content)], scope="layers.0")
        return arm

    result, lead = outcome(tmp_path, arm(["p", "q", "r"]), arm(["p", "z", "q", "r"]))
    assert (lead.kind, lead.a, lead.b is not None and lead.b.occurrence) == ("control-flow", None, 1)
    assert (result.readings[0].equal, result.readings[0].differing, result.readings[0].extra) == (3, 0, 1)


def test_after_a_difference_a_missing_event_does_not_lead(tmp_path: Path) -> None:
    def arm(fault: str, extra: bool) -> Arm:
        arm = Arm()
        (x,) = arm.op("aten.mm.default", [Value("x")], content=[f"y{fault}"])
        if extra:
            arm.op("aten.clamp.default", [x])
        return arm

    result, lead = outcome(tmp_path, arm("", True), arm("!", False))
    assert (lead.role, lead.event.op) == ("origin", "aten.mm.default")
    assert result.readings[0].missing == 1
    assert not result.others


def test_a_flagged_part_never_leads(tmp_path: Path) -> None:
    def arm(content: str, flags: str) -> Arm:
        arm = Arm()
        arm.op("aten.empty_strided.default", content=[content], flags=flags)
        arm.op("aten.mm.default", [Value("x")])
        return arm

    result = compared(tmp_path, arm("junk", "o0:uninitialized"), arm("other junk", "o0:uninitialized"))
    assert result.verdict == "identical"
    assert result.readings[0].flagged == 0  # the digests of the step agree, and nothing is read
    result = compared(
        tmp_path, arm("junk", "o0:uninitialized"), arm("other junk", "o0:uninitialized"), skip_equal=False
    )
    assert (result.verdict, result.readings[0].flagged) == ("identical", 1)
    assert compared(tmp_path, arm("junk", ""), arm("other junk", "")).verdict == "diverged"


def test_what_was_made_from_uninitialized_memory_is_a_suspect_if_nothing_else_leads(tmp_path: Path) -> None:
    def arm(junk: str, fault: str = "") -> Arm:
        arm = Arm()
        if fault:
            arm.op("aten.sin.default", [Value("x")], content=[fault])
        (y,) = arm.op("aten.mul.Tensor", [Value(junk)], flags="i0:uninitialized", scope="layers.3")
        arm.op("aten.mm.default", [y])
        return arm

    result, lead = outcome(tmp_path, arm("junk"), arm("other junk"))
    assert (lead.role, lead.kind, lead.event.op) == ("suspect", "uninitialized", "aten.mul.Tensor")
    result, lead = outcome(tmp_path, arm("junk", "one"), arm("other junk", "two"))
    assert (lead.role, lead.event.op) == ("origin", "aten.sin.default")
    assert any("flagged" in note for note in result.notes)


def test_a_view_is_no_origin(tmp_path: Path) -> None:
    def arm(content: str) -> Arm:
        arm = Arm()
        (x,) = arm.op("aten.mm.default", [Value("x")], scope="layers.0")
        arm.op("aten.slice.Tensor", [x], scope="layers.1", content=[content])
        return arm

    _, lead = outcome(tmp_path, arm("part"), arm("another"))
    assert (lead.role, lead.event.op) == ("uncaptured-producer", "aten.slice.Tensor")
    assert lead.after is not None
    assert lead.after.op == "aten.mm.default"


def test_a_parameter_that_differs_from_the_start_is_from_outside(tmp_path: Path) -> None:
    def arm(content: str) -> Arm:
        arm = Arm()
        arm.op("parameters", [Value(content)], 0, kind="parameter", phase="optimizer", scope="head.weight")
        return arm

    _, lead = outcome(tmp_path, arm("one"), arm("two"))
    assert (lead.role, lead.kind) == ("outside-the-trace", "parameter")


def test_a_parameter_that_something_unseen_wrote_is_bracketed(tmp_path: Path) -> None:
    def arm(content: str) -> Arm:
        arm = Arm()
        w = Value("w")
        arm.op("aten.add_.Tensor", [w, Value("g")], phase="optimizer", into=[w])
        w.content += content
        arm.op("parameters", [w], 0, kind="parameter", phase="optimizer", scope="head.weight")
        return arm

    _, lead = outcome(tmp_path, arm(""), arm("!"))
    assert (lead.role, lead.kind, lead.after and lead.after.op) == (
        "uncaptured-producer",
        "parameter",
        "aten.add_.Tensor",
    )


def modules(inner: str, own: str) -> Arm:
    """A module with two others inside, at level 3; what is between them is not recorded."""
    arm = Arm(level=3)
    arm.op("module", [Value(f"h{own}")], scope="block.first", kind="module", content=[f"i{own}"])
    arm.op("module", [Value(f"j{own}")], scope="block.second", kind="module", content=[f"k{own}{inner}"])
    arm.op("module", [Value("x")], scope="block", kind="module", content=[f"y{own}{inner}"])
    arm.op("module", [Value("x")], scope="", kind="module", content=[f"z{own}{inner}"])
    return arm


def test_of_modules_within_each_other_the_innermost_leads(tmp_path: Path) -> None:
    result, lead = outcome(tmp_path, modules("", ""), modules("!", ""))
    assert (lead.role, lead.event.scope, result.others) == ("origin", "block.second", [])


def test_a_modules_own_code_is_found_above_the_modules_that_read_what_it_made(tmp_path: Path) -> None:
    result, lead = outcome(tmp_path, modules("", ""), modules("", "!"))
    assert (lead.role, lead.event.scope, result.others) == ("origin", "block", [])


def test_an_optimizer_step_that_its_operators_explain_is_no_origin_of_its_own(tmp_path: Path) -> None:
    def arm(moment: str) -> Arm:
        arm = Arm()
        w, g = Value("w"), Value("g")
        arm.op("aten.lerp_.Scalar", [Value(moment), g], phase="optimizer", content=[moment + "'"])
        arm.op("Adam", [g, w], phase="optimizer", kind="optimizer", scope="w", content=[f"w'{moment}"])
        return arm

    result, lead = outcome(tmp_path, arm("m"), arm("n"))
    assert (lead.role, lead.kind, lead.event.op) == ("outside-the-trace", "data", "aten.lerp_.Scalar")
    assert not result.others


def test_a_recomputation_that_differs_from_its_forward_is_a_finding_of_its_own(tmp_path: Path) -> None:
    def arm(fault: str) -> Arm:
        arm = Arm()
        for phase, planted in (("forward", ""), ("recompute", fault)):
            arm.op("aten.mul.Tensor", [Value("p")], scope="block", phase=phase)
            if phase == "forward":
                arm.op("aten.mul.Tensor", [Value("not recomputed")], scope="block", phase=phase)
            arm.op("aten.index_add.default", [Value("q")], scope="block", phase=phase, content=[f"r{planted}"])
        return arm

    clean = compared(tmp_path, arm(""), arm(""), recompute=True)
    assert (clean.verdict, clean.recompute) == ("identical", [])
    both = compared(tmp_path, arm("!"), arm("!"), recompute=True)
    assert both.verdict == "identical"  # the arms agree, and each differs from itself
    (found,) = both.recompute
    assert (found.kind, found.event.op, found.b and found.b.phase) == (
        "recompute",
        "aten.index_add.default",
        "recompute",
    )
    one, lead = outcome(tmp_path, arm(""), arm("!"))
    assert (lead.role, lead.event.phase) == ("origin", "recompute")
    assert "arm B" in one.recompute[0].why


def test_what_a_host_carries_over_is_not_counted_as_a_source(tmp_path: Path) -> None:
    """A loss is read by the host and comes back as a number: the first difference explains it."""

    def arm(fault: str) -> Arm:
        arm = Arm()
        arm.op("aten.sum.default", [Value("x")], content=[f"loss{fault}"])
        arm.op("aten.mul.Scalar", [Value("y")], scalars=f"scale{fault}")
        arm.op("aten.add.Tensor", [Value(f"from numpy{fault}")])
        return arm

    result, lead = outcome(tmp_path, arm(""), arm("!"))
    assert (lead.role, lead.event.op) == ("origin", "aten.sum.default")
    assert not result.others
    assert "way of the host" in result.notes[0]


def test_parts_of_one_tensor_read_in_another_order_are_control_flow(tmp_path: Path) -> None:
    def arm(order: tuple[int, ...]) -> Arm:
        arm = Arm()
        (total,) = arm.op("aten.zeros.default")
        parts = arm.op("aten.mm.default", [Value("x")], 3, content=["part 0", "part 1", "part 2"])
        for number in order:
            arm.op("aten.add_.Tensor", [total, parts[number]], into=[total])
        return arm

    _, lead = outcome(tmp_path, arm((0, 1, 2)), arm((2, 1, 0)))
    assert (lead.role, lead.kind, lead.event.op) == ("outside-the-trace", "control-flow", "aten.add_.Tensor")
    assert (lead.event.occurrence, lead.after) == (0, None)


def _function(inside: str, known: bool) -> Arm:
    """A function of the program's own, and an operation inside of it: on a tensor that it made unseen, or on one that
    an event wrote."""
    arm = Arm()
    (kept,) = arm.op("aten.ones.default", scope="layer", content=["kept"])
    given = Value(inside)
    if known:
        given = kept
        given.content = inside
    (made,) = arm.op("aten.mul.Tensor", [given], scope="layer")
    arm.op("function.Bias", [Value("x")], scope="layer", content=[f"made of {inside}"])
    arm.op("aten.add.Tensor", [made])
    return arm


def test_what_a_function_of_the_programs_own_computes_unseen_is_its_own(tmp_path: Path) -> None:
    result, lead = outcome(tmp_path, _function("one", False), _function("two", False))
    assert (lead.role, lead.event.op) == ("origin", "function.Bias")
    assert not result.others


def test_a_function_that_reads_what_was_changed_unseen_is_innocent(tmp_path: Path) -> None:
    result, lead = outcome(tmp_path, _function("one", True), _function("two", True))
    assert (lead.role, lead.event.op) == ("uncaptured-producer", "aten.mul.Tensor")
    assert not [other for other in result.others if other.role == "origin"]


def test_a_parameter_that_differs_where_the_window_begins_is_named(tmp_path: Path) -> None:
    def arm(content: str) -> Arm:
        arm = Arm()
        (weight,) = arm.op("state", kind="parameter", phase="between", scope="layer.weight", content=[content])
        arm.op("aten.mm.default", [Value("x"), weight], scope="layer")
        return arm

    _, lead = outcome(tmp_path, arm("one"), arm("two"))
    assert (lead.role, lead.kind, lead.event.scope) == ("outside-the-trace", "parameter", "layer.weight")
