"""Programs of random shape for traces: what they do follows from a list of instructions, in one or several threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

from detrun.compare.trace_summary import TraceComparison
from detrun.experiments.compare_traces import compare_traces
from detrun.records.trace_row import TraceEvent
from tests.trace_factory import Arm, Value, attempt_in

OPS = ("aten.mm.default", "aten.add.Tensor", "aten.relu.default", "aten.index_add.default")


@dataclass(frozen=True)
class Instruction:
    """One operation of a thread: it reads values that the thread has, by number, and makes new ones or writes one."""

    op: str
    scope: str
    reads: tuple[int, ...]
    makes: int
    in_place: bool


@st.composite
def threads(draw: st.DrawFn, most: int = 3) -> list[list[Instruction]]:
    """Instructions of one or more threads, whose scopes are their own."""
    found = []
    for thread in range(draw(st.integers(1, most))):
        instructions = [
            Instruction(
                draw(st.sampled_from(OPS)),
                f"thread{thread}.layers.{draw(st.integers(0, 2))}",
                tuple(draw(st.lists(st.integers(0, 30), min_size=1, max_size=3))),
                draw(st.integers(1, 2)),
                draw(st.booleans()),
            )
            for _ in range(draw(st.integers(1, 12)))
        ]
        found.append(instructions)
    return found


def run(arm: Arm, program: Sequence[Sequence[Instruction]], order: Sequence[int], steps: int = 2) -> Arm:
    """Runs the threads, interleaved: each entry of `order` lets the thread of that number (of those that are not done)
    go on by one instruction; what is left then runs thread by thread."""
    values = [[Value(f"thread {number} weight {at}") for at in range(3)] for number in range(len(program))]
    for step in range(1, steps + 1):
        arm.step = step
        waiting = [list(instructions) for instructions in program]
        schedule = [*order, *(0 for thread in program for _ in thread)]
        for turn in schedule:
            alive = [number for number, left in enumerate(waiting) if left]
            if not alive:
                break
            number = alive[turn % len(alive)]
            instruction = waiting[number].pop(0)
            mine = values[number]
            inputs = [mine[at % len(mine)] for at in instruction.reads]
            if instruction.in_place:
                arm.op(instruction.op, inputs, scope=instruction.scope, into=[inputs[0]])
            else:
                mine += arm.op(instruction.op, inputs, instruction.makes, scope=instruction.scope)
        for mine in values:
            del mine[: len(mine) - 6]
    return arm


def compared(folder: Path, a: Arm, b: Arm, **options: bool) -> TraceComparison:
    """The comparison of two arms of one rank."""
    a.write(attempt_in(folder, "a"), batch=7)
    b.write(attempt_in(folder, "b"), batch=7)
    return compare_traces(attempt_in(folder, "a"), attempt_in(folder, "b"), **options)


def at_event(key: object) -> Callable[[TraceEvent], str]:
    """A fault in the event of that key."""
    return lambda event: "!" if event.key == key else ""
