"""What traces of several ranks say together: which rank's difference came from which, and what the ranks have in
common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from detrun.compare.trace_shared import members
from detrun.compare.trace_summary import TraceComparison
from detrun.experiments.compare_traces import compare_traces
from detrun.records.trace_row import TraceEvent
from tests.trace_factory import Arm, Value, attempt_in

Plants = Mapping[int, Callable[[TraceEvent], str]]


def data_parallel(folder: Path, arm: str, ranks: int, plants: Plants, layers: int = 2, steps: int = 1) -> None:
    """Ranks with their own batches that add up their gradients layer by layer."""
    arms = [Arm(rank=rank, plant=plants.get(rank, lambda event: "")) for rank in range(ranks)]
    weights = [[Value(f"weight {layer}") for layer in range(layers)] for _ in range(ranks)]
    for step in range(1, steps + 1):
        gradients: list[list[Value]] = []
        for rank, each in enumerate(arms):
            each.step = step
            x = Value(f"batch {step} of rank {rank}")
            gradients.append([])
            for layer in range(layers):
                (x,) = each.op("aten.mm.default", [x, weights[rank][layer]], scope=f"layers.{layer}")
                gradients[rank].append(each.op("aten.t_mm.default", [x], scope=f"layers.{layer}", phase="backward")[0])
        for layer in range(layers):
            summed = "+".join(of_rank[layer].content for of_rank in gradients)
            for rank, each in enumerate(arms):
                gradient = gradients[rank][layer]
                group = f"0-{ranks - 1}"
                each.op(
                    "c10d.allreduce_", [gradient], kind="collective", phase="backward", group=group,
                    into=[gradient], content=[summed],
                )  # fmt: skip
                weight = weights[rank][layer]
                each.op("aten.add_.Tensor", [weight, gradient], phase="optimizer", into=[weight])
    for each in arms:
        each.write(attempt_in(folder, arm))


def joined(folder: Path, plants: Plants, ranks: int = 3, traced: list[int] | None = None) -> TraceComparison:
    data_parallel(folder, "a", ranks, {})
    data_parallel(folder, "b", ranks, plants)
    return compare_traces(attempt_in(folder, "a"), attempt_in(folder, "b"), traced)


def fault(**at: object) -> Callable[[TraceEvent], str]:
    return lambda event: "!" if all(getattr(event, name) == value for name, value in at.items()) else ""


def test_a_collective_whose_other_member_had_another_input_is_a_receiver(tmp_path: Path) -> None:
    result = joined(tmp_path, {1: fault(op="aten.mm.default", scope="layers.1")})
    assert result.lead is not None
    assert (result.lead.role, result.lead.rank, result.lead.event.op) == ("origin", 1, "aten.mm.default")
    assert result.pattern == "origin"
    assert not result.others
    assert [row.rank for row in result.spread][-2:] == [0, 2]  # then the ranks that received it


def test_a_collective_is_an_origin_if_every_members_input_matches(tmp_path: Path) -> None:
    summing = fault(op="c10d.allreduce_", occurrence=1)
    result = joined(tmp_path, dict.fromkeys(range(3), summing))
    assert result.lead is not None
    assert (result.lead.role, result.lead.kind, result.lead.event.op) == ("origin", "collective", "c10d.allreduce_")
    assert "every member" in result.lead.why
    (group,) = result.groups
    assert (group.count, group.ranks) == (3, (0, 1, 2))
    assert "on all ranks" in group.reading
    assert {other.rank for other in result.others} == {1, 2}


def test_a_member_that_was_not_traced_is_asked_for(tmp_path: Path) -> None:
    plants = {2: fault(op="aten.mm.default", scope="layers.0")}
    result = joined(tmp_path, plants, traced=[0, 1])
    assert result.verdict == "diverged"
    assert result.pattern == "receiver"
    assert result.lead is not None
    assert result.lead.role == "receiver"
    assert result.hint == "outside the capture: trace rank 2 as well"


def test_an_earlier_lead_elsewhere_wins_over_a_member_that_was_not_traced(tmp_path: Path) -> None:
    plants = {rank: fault(op="aten.mm.default", scope="layers.0") for rank in (1, 2)}
    result = joined(tmp_path, plants, traced=[0, 1])
    assert result.lead is not None
    assert (result.lead.role, result.lead.rank) == ("origin", 1)


@pytest.mark.parametrize("faulty", ["compute", "transport"])
def test_a_receive_is_explained_by_what_its_sender_sent(tmp_path: Path, faulty: str) -> None:
    def stages(arm: str, broken: bool) -> None:
        first, second = Arm(rank=0), Arm(rank=1)
        for microbatch in range(2):
            first.microbatch, second.microbatch = microbatch, max(0, microbatch - 1)
            late = broken and microbatch == 1
            x = first.op("aten.mm.default", [Value("x")], content=[f"h{'!' if late and faulty == 'compute' else ''}"])
            first.op("c10d.send", x, 0, kind="send", peer=1)
            got = f"{x[0].content}{'?' if late and faulty == 'transport' else ''}"
            y = second.op("c10d.recv_", [], kind="recv", peer=0, content=[got])
            second.op("aten.relu.default", y)
        for each in (first, second):
            each.write(attempt_in(tmp_path, arm))

    stages("a", False)
    stages("b", True)
    result = compare_traces(attempt_in(tmp_path, "a"), attempt_in(tmp_path, "b"))
    assert result.lead is not None
    expected = ("origin", 0, "aten.mm.default") if faulty == "compute" else ("origin", 1, "c10d.recv_")
    assert (result.lead.role, result.lead.rank, result.lead.event.op) == expected
    assert not result.others
    alone = compare_traces(attempt_in(tmp_path, "a"), attempt_in(tmp_path, "b"), [1])
    assert (alone.pattern, alone.hint) == ("receiver", "outside the capture: trace rank 0 as well")


def test_an_origin_on_few_ranks_points_to_them_and_the_table_says_where_it_was_clean(tmp_path: Path) -> None:
    result = joined(tmp_path, {1: fault(op="aten.mm.default", scope="layers.0")})
    (group,) = result.groups
    assert group.reading == "on 1 of 3 ranks: look at their inputs, place and hardware"
    (row,) = result.table
    assert (row.phase, row.clean, row.differing, row.received) == ("forward", 4, 1, 1)
    assert (row.clean_ranks, row.differing_ranks) == ((0, 2), (1,))


def test_shapes_that_are_clean_stand_beside_those_that_are_not(tmp_path: Path) -> None:
    for name, planted in (("a", ""), ("b", "!")):
        arm = Arm()
        for shape, bad in (("float32[8,8]", ""), ("bfloat16[8,8]@1,0", planted), ("float32[8,8]", "")):
            arm.op("aten.mm.default", [Value("x", shape=shape)], content=[f"{shape}{bad}"])
        arm.write(attempt_in(tmp_path, name))
    result = compare_traces(attempt_in(tmp_path, "a"), attempt_in(tmp_path, "b"))
    rows = [(row.signature.split()[0], row.differing, row.clean) for row in result.table]
    assert rows == [("bfloat16[8,8]@1,0", 1, 0), ("float32[8,8]", 0, 2)]


def test_the_earliest_step_leads_and_several_operations_are_grouped(tmp_path: Path) -> None:
    data_parallel(tmp_path, "a", 2, {}, steps=2)
    plant = lambda event: "!" if (event.step, event.scope, event.op) in wanted else ""  # noqa: E731
    wanted = {(1, "layers.0", "aten.mm.default"), (1, "layers.0", "aten.t_mm.default")}
    data_parallel(tmp_path, "b", 2, {0: plant, 1: plant}, steps=2)
    result = compare_traces(attempt_in(tmp_path, "a"), attempt_in(tmp_path, "b"))
    assert result.lead is not None
    assert (result.lead.event.step, result.lead.event.op) == (1, "aten.mm.default")
    assert [(group.op, group.ranks) for group in result.groups] == [("aten.mm.default", (0, 1))]


def test_a_rank_that_only_one_arm_traced_forbids_identical(tmp_path: Path) -> None:
    data_parallel(tmp_path, "a", 2, {})
    data_parallel(tmp_path, "b", 2, {})
    a, b = attempt_in(tmp_path, "a"), attempt_in(tmp_path, "b")
    assert compare_traces(a, b).verdict == "identical"
    for path in (b.trace(1), b.trace_index(1)):
        path.unlink()
    result = compare_traces(a, b)
    assert result.verdict == "not-verified"
    assert result.incomplete == ["rank 1 cannot be compared: rank 1 has no trace in B"]
    assert compare_traces(a, b, [0, 5]).verdict == "not-verified"
    assert compare_traces(a, b, [0]).verdict == "identical"


def test_many_ranks_in_several_processes_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plants = {3: fault(op="aten.mm.default", scope="layers.0")}
    alone = joined(tmp_path, plants, ranks=6)
    monkeypatch.setattr("detrun.experiments.slices.PARALLEL_FROM_BYTES", 0)
    assert (
        compare_traces(attempt_in(tmp_path, "a"), attempt_in(tmp_path, "b"), processes=2).as_dict() == alone.as_dict()
    )


def test_the_ranks_of_a_group_are_read_from_its_text() -> None:
    assert members("0-3") == (0, 1, 2, 3)
    assert members("0,2,6-7") == (0, 2, 6, 7)
    for text in ("", "a", "3-1", "0-", "-1", "0-99999999999", "1" * 30):
        assert members(text) is None
