"""Events wait in columns, and come out whole: those with rare things, and those whose outputs came late."""

from __future__ import annotations

from detrun.recorder.trace.draft import Draft
from detrun.recorder.trace.heads import Heads
from detrun.recorder.trace.rows import INPUTS, SIGNATURE, SIZE, Rows


def draft(number: int, inputs: int, outputs: int, step: int = 1) -> Draft:
    begun = Heads(lambda _: True).begin(("forward", f"layer{number}", 0), "op", "op", step)
    assert begun is not None
    made = Draft(begun[0], step, begun[1], f"s{number}")
    made.parts = [f"{number}i{at}".encode() for at in range(inputs)]
    made.writers = list(range(inputs))
    made.n_inputs = inputs
    made.texts = [f"t{number}", "->"]
    return ended(made, number, outputs)


def ended(made: Draft, number: int, outputs: int) -> Draft:
    made.parts += [f"{number}o{at}".encode() for at in range(outputs)]
    made.texts += ["x"] * outputs
    made.complete = True
    return made


def flat(rows: Rows) -> list[tuple[str, str, list[bytes], int]]:
    found, at = [], 0
    columns = (rows.heads, rows.column(SIGNATURE), rows.column(SIZE), rows.column(INPUTS))
    for head, signature, size, inputs in zip(*columns, strict=True):
        found.append((head.scope, signature, rows.parts[at : at + size], inputs))
        at += size
    assert at == len(rows.parts)
    assert len(rows.writers) == sum(each[3] for each in found)
    return found


def test_late_outputs_come_to_lie_where_the_event_lies() -> None:
    prompt, late = Rows(1), Rows(1)
    for number, (inputs, outputs) in enumerate([(1, 1), (2, 1), (0, 2), (3, 0), (1, 3)]):
        prompt.add(draft(number, inputs, outputs))
        waiting = draft(number, inputs, 0)
        if number % 3 == 1:
            waiting.complete = False
            late.add_late(waiting)
            assert late.ready() == 1
        else:
            late.add(draft(number, inputs, outputs))
    for at, waiting in late.late.items():
        ended(waiting, at, [1, 1, 2, 0, 3][at])
    assert late.ready() == 5
    late.settle()
    assert flat(late) == flat(prompt)
    assert late.writers == prompt.writers


def test_rows_are_cut_without_a_part_lost() -> None:
    rows = Rows(1, first=10)
    for number in range(6):
        made = draft(number, number % 3, 1)
        if number in (1, 4):
            made.marks = ("i0:uninitialized", "o0:pointers")
        rows.add(made)
    whole, writers = flat(rows), rows.writers
    head, tail = rows.split(2)
    assert flat(head) + flat(tail) == whole
    assert head.writers + tail.writers == writers
    assert (head.first, tail.first) == (10, 12)
    assert head.flags() == ({1: "i0:uninitialized,o0:pointers"}, [1, 2])
    assert tail.flags() == ({2: "i0:uninitialized,o0:pointers"}, [4, 5])
    everything, nothing = tail.split(10)
    assert (len(everything), len(nothing), nothing.first) == (4, 0, 16)


def test_an_event_that_outlasts_its_step_says_which_step_it_is_of() -> None:
    rows = Rows(2)
    rows.add(draft(0, 1, 1, step=1))
    rows.add(draft(1, 1, 1, step=2))
    assert list(rows.having("step", 2)) == [(0, 1)]


def test_occurrences_are_counted_by_key_and_step_whatever_the_kind() -> None:
    heads = Heads(lambda scope: scope != "unwanted")
    place = ("forward", "layer", 0)
    counted = []
    for step, kind in [(1, "op"), (1, "opaque"), (1, "op"), (2, "op"), (2, "opaque")]:
        begun = heads.begin(place, "op", kind, step)
        assert begun is not None
        assert begun[0].kind == kind
        counted.append(begun[1])
        heads.step_ends()
    assert counted == [0, 1, 2, 0, 1]
    assert heads.begin(("forward", "unwanted", 0), "op", "op", 1) is None
