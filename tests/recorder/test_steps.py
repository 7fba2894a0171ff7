"""When a step closes: pure cycle logic, without torch."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detrun.recorder.steps import RETIRED_AFTER, Cycle, Numbering


def closes(calls: list[int], live: set[int] | None = None, stale: Collection[int] = ()) -> list[list[int]]:
    """The steps into which a sequence of optimizer calls is grouped; the last one may still be open. stale: positions
    of calls that no backward pass of their own came before."""
    cycle, steps, open_step, tail = Cycle(), [], [], []
    for position, optimizer in enumerate(calls):
        fresh = position not in stale
        together = cycle.settles(optimizer, fresh)
        if together:
            open_step, tail = open_step + tail, []
        elif together is False:
            cycle.closed()
            steps.append(open_step)
            open_step, tail = tail, []
        if cycle.begins(optimizer):
            cycle.closed()
            steps.append(open_step)
            open_step = []
        complete = cycle.ends(optimizer, live or set(calls), fresh)
        (tail if cycle.tail else open_step).append(optimizer)
        if complete:
            cycle.closed()
            steps.append(open_step)
            open_step = []
    return [*steps, open_step + tail] if open_step or tail else steps


def test_one_optimizer_closes_at_once() -> None:
    assert closes([1, 1, 1]) == [[1], [1], [1]]


def test_two_optimizers_make_one_step() -> None:
    assert closes([1, 2] * 3) == [[1, 2]] * 3


def test_an_optimizer_that_never_steps_is_waited_for_once() -> None:
    assert closes([1, 1, 1], live={1, 2}) == [[1], [1], [1]]


def test_a_generator_is_part_of_its_critics_last_step() -> None:
    assert closes([1, 1, 1, 2] * 4) == [[1], [1], [1, 2]] * 4


def test_a_newcomer_with_a_backward_pass_of_its_own_joins_the_step_before_it() -> None:
    assert closes([1, 1, 1, 2, 1, 2, 1, 2], live={1, 2}) == [[1], [1], [1, 2], [1, 2], [1, 2]]


def test_a_newcomer_that_shares_a_backward_pass_with_the_next_one_is_part_of_the_next_step() -> None:
    assert closes([1, 1, 2, 1, 2, 1], stale={3, 5}) == [[1], [1], [2, 1], [2, 1]]
    assert closes([1, 1, 2, 3, 1, 2, 3, 1], stale={3, 4, 6, 7}) == [[1], [1], [2, 3, 1], [2, 3, 1]]


def test_a_newcomer_that_shares_a_backward_pass_with_the_last_one_is_part_of_the_last_step() -> None:
    assert closes([1, 2, 1, 2, 1, 2, 3, 1, 2, 3], stale={1, 3, 5, 6, 8, 9}) == [[1, 2], [1, 2], [1, 2, 3], [1, 2, 3]]


def test_a_step_is_not_held_forever_for_an_optimizer_that_never_steps() -> None:
    cycle = Cycle()
    closed = []
    for _ in range(RETIRED_AFTER + 4):
        if cycle.begins(1):
            cycle.closed()
        closed.append(cycle.ends(1, {1, 2}))
        if closed[-1]:
            cycle.closed()
    assert closed[-2:] == [True, True]


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


@given(st.lists(st.integers(1, 4), max_size=60), st.sets(st.integers(0, 59)))
def test_every_call_is_in_exactly_one_step_and_no_step_has_one_twice(calls: list[int], stale: set[int]) -> None:
    steps = closes(calls, stale=stale)
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
