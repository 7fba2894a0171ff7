"""When a step closes: pure cycle logic, without torch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detrun.recorder.steps import RETIRED_AFTER, Cycle, Numbering


def closes(calls: list[int], live: set[int] | None = None) -> list[list[int]]:
    """The steps into which a sequence of optimizer calls is grouped; the last one may still be open."""
    cycle, steps, open_step = Cycle(), [], []
    for optimizer in calls:
        if cycle.begins(optimizer):
            cycle.closed()
            steps.append(open_step)
            open_step = []
        open_step.append(optimizer)
        if cycle.ends(optimizer, live or set(calls)):
            cycle.closed()
            steps.append(open_step)
            open_step = []
    return [*steps, open_step] if open_step else steps


def test_one_optimizer_closes_at_once() -> None:
    assert closes([1, 1, 1]) == [[1], [1], [1]]


def test_two_optimizers_make_one_step() -> None:
    assert closes([1, 2] * 3) == [[1, 2]] * 3


def test_an_optimizer_that_never_steps_is_waited_for_once() -> None:
    assert closes([1, 1, 1], live={1, 2}) == [[1], [1], [1]]


def test_different_frequencies_settle() -> None:
    steps = closes([1, 1, 1, 2] * 4)
    assert steps[-4:] == [[1], [1], [1, 2]] or steps[-3:] == [[1], [1], [1, 2]]
    assert steps[:4] == [[1], [1], [1], [2]]


def test_a_newcomer_does_not_shift_the_others() -> None:
    assert closes([1, 1, 1, 2, 1, 2, 1, 2], live={1, 2}) == [[1], [1], [1], [2], [1, 2], [1, 2]]


def test_an_optimizer_that_stopped_is_given_up() -> None:
    cycle = Cycle()
    for optimizer in (1, 2, 1, 2):
        if cycle.begins(optimizer):
            cycle.closed()
        if cycle.ends(optimizer, {1, 2}):
            cycle.closed()
    for _ in range(RETIRED_AFTER + 1):
        if cycle.begins(1):
            cycle.closed()
        assert not cycle.ends(1, {1, 2})
    cycle.begins(1)
    cycle.closed()
    assert cycle.ends(1, {1, 2})


def test_a_dead_optimizer_is_not_waited_for() -> None:
    cycle = Cycle(known=[1, 2], settled=True, _missed={1: 0, 2: 0})
    assert cycle.ends(1, {1})


@given(st.lists(st.integers(1, 4), max_size=60))
def test_every_call_is_in_exactly_one_step_and_no_step_has_one_twice(calls: list[int]) -> None:
    steps = closes(calls)
    assert [call for step in steps for call in step] == calls
    assert all(len(set(step)) == len(step) for step in steps)


@pytest.mark.parametrize(
    ("numbering", "named", "current", "expected"),
    [
        (Numbering(), 0, 1, 1),
        (Numbering(), 1, 1, 1),
        (Numbering(), 10, 10, 10),
        (Numbering(), 9, 10, 10),
        (Numbering(1, 20), 20, 21, 21),
        (Numbering(1, 20), 21, 21, 21),
        (Numbering(1, None), 21, 1, 21),
    ],
)
def test_how_the_program_counts_is_found_at_its_first_number(
    numbering: Numbering, named: int, current: int, expected: int
) -> None:
    assert numbering.translate(named, current, begun=True) == expected
    assert numbering.translate(named + 1, current + 5, begun=True) == expected + 1


def test_a_report_before_training_does_not_settle_how_it_counts() -> None:
    numbering = Numbering()
    assert numbering.translate(0, 1, begun=False) == 1
    assert numbering.translate(1, 1, begun=True) == 1
