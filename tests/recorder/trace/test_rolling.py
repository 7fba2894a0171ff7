"""The digest of a step is that of its events, in whatever order and batches they come, and of nothing else."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from detrun.recorder.trace.rolling import Rolling
from detrun.records.trace_row import TraceEvent
from tests.trace_factory import TEXTS, make_batch

EVENT = TraceEvent(
    seq=4, step=1, microbatch=1, phase="forward", scope="layers.0", op="aten.mm.default", kind="op", occurrence=2,
    signature="a b -> c", scalars="1", inputs=(b"a" * 16, b"b" * 16), outputs=(b"c" * 16,), producers=(1, 2),
    rng=b"r" * 16, group="0-3",
)  # fmt: skip
OTHER = replace(EVENT, scope="layers.1", inputs=(b"d" * 16,), outputs=(), producers=(0,), rng=None)


def digest(events: Sequence[TraceEvent], batch: int = 1000) -> tuple[str, dict[str, str]]:
    rolling = Rolling()
    tables: dict[str, dict[Any, int]] = {name: {} for name in (*TEXTS, "digests")}
    for at in range(0, len(events), batch):
        rows = events[at : at + batch]
        flagged, first = [], 0
        for row in rows:
            for side, number in re.findall(r"([io])([0-9]+)", row.flags):
                flagged.append(first + int(number) + (len(row.inputs) if side == "o" else 0))
            first += len(row.inputs) + len(row.outputs)
        rolling.add(make_batch(rows, tables), flagged)
    return rolling.finish()


CHANGES: dict[str, Callable[[TraceEvent], TraceEvent]] = {
    "microbatch": lambda e: replace(e, microbatch=0),
    "occurrence": lambda e: replace(e, occurrence=0),
    "phase": lambda e: replace(e, phase="backward"),
    "operation": lambda e: replace(e, op="aten.bmm.default"),
    "kind": lambda e: replace(e, kind="opaque"),
    "signature": lambda e: replace(e, signature="a b -> d"),
    "scalars": lambda e: replace(e, scalars="2"),
    "group": lambda e: replace(e, group=""),
    "random state": lambda e: replace(e, rng=b"s" * 16),
    "no random state": lambda e: replace(e, rng=None),
    "flags": lambda e: replace(e, flags="i0:uninitialized"),
    "an input": lambda e: replace(e, inputs=(b"x" * 16, *e.inputs[1:])),
    "last bit of an output": lambda e: replace(e, outputs=(b"c" * 15 + b"b",)),
    "inputs swapped": lambda e: replace(e, inputs=(*reversed(e.inputs),)),
    "an input fewer": lambda e: replace(e, inputs=e.inputs[:1]),
    "an output of zeros more": lambda e: replace(e, outputs=(*e.outputs, bytes(16))),
    "an input is an output": lambda e: replace(e, inputs=e.inputs[:1], outputs=(e.inputs[1], *e.outputs)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_is_compared_changes_the_digest_of_its_scope_alone(change: str) -> None:
    whole, scopes = digest([EVENT, OTHER])
    other_whole, other_scopes = digest([CHANGES[change](EVENT), OTHER])
    assert whole != other_whole
    assert scopes["layers.0"] != other_scopes["layers.0"]
    assert scopes["layers.1"] == other_scopes["layers.1"]


def test_where_an_event_lies_changes_nothing() -> None:
    moved = replace(EVENT, seq=9, producers=(7, 0), site="train.py:3 in step")
    assert digest([EVENT, OTHER]) == digest([moved, OTHER])


def test_flagged_parts_do_not_count_and_the_others_do() -> None:
    flagged = replace(EVENT, flags="i1:pointers,o0:in-flight")
    same = replace(flagged, inputs=(flagged.inputs[0], b"y" * 16), outputs=(b"z" * 16,))
    assert digest([OTHER, flagged]) == digest([OTHER, same])
    assert digest([OTHER, flagged]) != digest([OTHER, replace(flagged, inputs=(b"y" * 16, flagged.inputs[1]))])


def test_order_and_batches_change_nothing_and_multiplicity_does() -> None:
    events = [replace(EVENT, scope=f"layers.{n % 4}", occurrence=n, inputs=(b"%16d" % n,)) for n in range(50)]
    shuffled = random.Random(1).sample(events, len(events))
    assert digest(events) == digest(shuffled, batch=7) == digest(shuffled)
    assert digest(events) != digest([*events, events[3]])


def test_an_event_of_many_parts_tells_them_apart() -> None:
    many = replace(EVENT, inputs=tuple(b"%16d" % n for n in range(150)))
    swapped = (*many.inputs[:3], many.inputs[3 + 64], *many.inputs[4 : 3 + 64], many.inputs[3], *many.inputs[4 + 64 :])
    assert len(swapped) == 150
    assert digest([many]) != digest([replace(many, inputs=swapped)])
