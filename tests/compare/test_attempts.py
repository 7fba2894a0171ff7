"""The records of a resumed attempt beside an uninterrupted run's: where it came back, what is only in part there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from detrun.compare.attempts import Position, came_back_from, comparable, shifted, without
from detrun.compare.streams import PairTally, compare_rank
from detrun.records.environment_reader import RankEnvironment
from detrun.records.metrics_line import Contents, Metric, StepRecord
from detrun.records.metrics_reader import Problem, RankMetrics


def metric(number: int) -> Metric:
    return {"bits": f"0x{number:08x}", "dtype": "float32", "value": number, "source": "backward"}  # type: ignore[typeddict-unknown-key,typeddict-item]


def step(number: int, *, microbatches: int = 1, names: tuple[str, ...] = ("loss",), **fields: Any) -> StepRecord:
    contents = Contents(
        {name: metric(100 * number + place) for place, name in enumerate(names)},
        fields.get("batch", f"xxh3:{number:032x}"),
        {"parameters": fields.get("parameters", f"xxh3:{1000 + number:032x}")},
        f"xxh3:{2000 + number:032x}",
    )
    return StepRecord(number, microbatches, contents=contents)


def run(first: int, last: int, **fields: Any) -> RankMetrics:
    return RankMetrics({number: step(number, **fields) for number in range(first, last + 1)})


def began_with(parameters: int) -> RankEnvironment:
    return RankEnvironment({}, 0, 1, None, {"parameters": f"xxh3:{parameters:032x}"})


REFERENCE = run(1, 20)
AT_START = began_with(1000)


def differing(a: RankMetrics, b: RankMetrics) -> set[str]:
    tally = PairTally("a", "b")
    compare_rank(tally, 0, a, b)
    assert not tally.gaps
    return {stream.label for stream in tally.streams}


def test_a_checkpoint_that_was_written_late_is_of_the_step_in_its_name() -> None:
    told, after_5 = Position(6), run(6, 20)
    assert came_back_from(told, REFERENCE, AT_START, after_5, began_with(1005), 5) == Position(5)
    # The weights went on while it was written; data and number did not.
    assert came_back_from(told, REFERENCE, AT_START, after_5, began_with(1006), 5) == Position(5)


def test_a_name_that_counts_otherwise_tells_nothing() -> None:
    assert came_back_from(Position(10), REFERENCE, AT_START, run(11, 20), began_with(1010), 9) == Position(10)


def test_a_run_is_believed_where_it_fits() -> None:
    assert came_back_from(Position(10), REFERENCE, AT_START, run(11, 20), began_with(1010)) == Position(10)


def test_a_run_that_began_again_is_told_by_its_parameters_and_its_batch() -> None:
    again = shifted(run(1, 10), 10)
    assert came_back_from(Position(10), REFERENCE, AT_START, again, began_with(1000)) == Position(0)


def test_a_run_from_an_earlier_checkpoint_is_told() -> None:
    earlier = shifted(run(6, 15), 5)
    assert came_back_from(Position(10), REFERENCE, AT_START, earlier, began_with(1005)) == Position(5)


def test_lost_weights_with_the_right_batch_are_no_new_beginning() -> None:
    assert came_back_from(Position(10), REFERENCE, AT_START, run(11, 20), began_with(1000)) is None


def test_parameters_that_the_reference_never_had_tell_nothing() -> None:
    assert came_back_from(Position(10), REFERENCE, AT_START, run(11, 20), began_with(77)) is None


def test_where_state_is_not_digested_every_step_what_was_told_is_believed() -> None:
    sparse = RankMetrics(dict(REFERENCE.steps))
    bare = Contents({"loss": metric(1)})
    sparse.steps[10] = StepRecord(10, contents=bare)
    assert came_back_from(Position(10), sparse, AT_START, run(11, 20), began_with(5)) == Position(10)


def test_the_last_step_of_a_killed_run_may_lack_what_comes_late() -> None:
    reference = run(1, 20, names=("loss", "lm_loss"))
    killed = run(1, 13, names=("loss", "lm_loss"))
    killed.steps[14] = step(14, names=("loss",))
    both = comparable(reference, killed, cut_short=True)
    assert both.partial == {14}
    assert differing(both.a, both.b) == set()


def test_what_the_last_step_of_a_killed_run_holds_is_compared() -> None:
    killed = run(1, 14)
    killed.steps[14].contents.metrics["loss"] = metric(5)
    both = comparable(REFERENCE, killed, cut_short=True)
    assert differing(both.a, both.b) == {"loss"}


def test_a_whole_run_is_reduced_nowhere() -> None:
    late = run(1, 20)
    del late.steps[20].contents.metrics["loss"]
    both = comparable(REFERENCE, late, cut_short=False)
    assert both.b.steps[20] is late.steps[20]


def test_the_rest_of_an_accumulation_is_held_against_its_micro_batches() -> None:
    names = ("loss", "loss[0]", "loss[1]", "loss[2]", "grad_norm")
    reference = run(1, 6, microbatches=3, names=names)
    resumed = run(3, 6, microbatches=3, names=names)
    part = Contents({"loss[2]": metric(203), "grad_norm": metric(204)}, None, {"parameters": f"xxh3:{1002:032x}"}, None)
    resumed.steps = {2: StepRecord(2, 1, contents=part), **resumed.steps}
    both = comparable(reference, resumed, cut_short=False, begins_in=2)
    assert both.partial == {2}
    assert differing(both.a, both.b) == set()
    part.metrics["loss[2]"] = metric(9)
    both = comparable(reference, resumed, cut_short=False, begins_in=2)
    assert differing(both.a, both.b) == {"loss[2]"}


def test_renumbered_records_keep_all_that_they_hold() -> None:
    moved = shifted(run(1, 3), 10)
    assert list(moved.steps) == [11, 12, 13]
    assert moved.steps[11].contents is not None
    assert differing(run(1, 3), shifted(moved, -10)) == set()


def test_a_torn_last_line_is_what_a_kill_leaves() -> None:
    records = replace(run(1, 3), problems=[Problem("torn", "line 4 is cut off", 4)])
    assert without(records, frozenset({3}), cut_short=True).problems == []
    assert len(without(records, frozenset(), cut_short=False).problems) == 1
