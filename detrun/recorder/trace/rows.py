"""Events that are complete and not yet written, in columns: a step has thousands, and an object for each would be one
more for the collector of garbage to look at."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from detrun.recorder.trace.draft import Draft
    from detrun.recorder.trace.heads import Head


OCCURRENCE, SIGNATURE, SCALARS, SIZE, INPUTS = range(5)
_WIDTH = 5


class Rows:
    """heads: an entry an event, in their order. told: five an event, one behind the other: occurrence, signature,
    scalars, number of parts, number of inputs; `column` has one of them. first: seq of the first one. parts, writers:
    of all events one behind the other. rare: by place in the columns, the events with something that most have none of.
    late: those whose outputs came, or will come, after the event itself; their signature and their parts are put in
    place by `settle`."""

    def __init__(self, step: int = 0, first: int = 0) -> None:
        self.step = step
        self.first = first
        self.heads: list[Head] = []
        self.told: list[Any] = []
        self.parts: list[Any] = []
        self.writers: list[int] = []
        self.rare: dict[int, Draft] = {}
        self.late: dict[int, Draft] = {}

    def __len__(self) -> int:
        return len(self.heads)

    def add(self, draft: Draft) -> None:
        """Append an event that is complete."""
        parts = draft.parts
        if (
            draft.marks
            or draft.rng is not None
            or draft.rows is not None
            or draft.group
            or draft.site
            or draft.peer >= 0
            or draft.step != self.step
        ):
            self.rare[len(self.heads)] = draft
        self.heads.append(draft.head)
        self.told += (draft.occurrence, " ".join(draft.texts), draft.scalars, len(parts), draft.n_inputs)
        self.parts += parts
        self.writers += draft.writers

    def add_late(self, draft: Draft) -> None:
        """Append an event whose outputs are not there yet."""
        at = len(self.heads)
        self.late[at] = self.rare[at] = draft
        self.heads.append(draft.head)
        self.told += (draft.occurrence, "", draft.scalars, 0, 0)

    def column(self, which: int) -> list[Any]:
        """OCCURRENCE, SIGNATURE, SCALARS, SIZE or INPUTS of all events."""
        return self.told[which::_WIDTH]

    def split(self, count: int) -> tuple[Rows, Rows]:
        """(the first `count` events, the others)."""
        if count >= len(self):
            return self, Rows(self.step, self.first + len(self))
        parts, writers = sum(self.column(SIZE)[:count]), sum(self.column(INPUTS)[:count])
        head, tail = Rows(self.step, self.first), Rows(self.step, self.first + count)
        head.heads, tail.heads = self.heads[:count], self.heads[count:]
        head.told, tail.told = self.told[: count * _WIDTH], self.told[count * _WIDTH :]
        head.parts, tail.parts = self.parts[:parts], self.parts[parts:]
        head.writers, tail.writers = self.writers[:writers], self.writers[writers:]
        for name in ("rare", "late"):
            for at, draft in getattr(self, name).items():
                if at < count:
                    getattr(head, name)[at] = draft
                else:
                    getattr(tail, name)[at - count] = draft
        return head, tail

    def ready(self) -> int:
        """How many events there are before the first one that is not complete."""
        return min((at for at, draft in self.late.items() if not draft.complete), default=len(self))

    def settle(self) -> None:
        """Put the late events' parts in place; all of them are complete."""
        if not self.late:
            return
        parts: list[Any] = []
        writers: list[int] = []
        starts, first_writers = [0, *accumulate(self.column(SIZE))], [0, *accumulate(self.column(INPUTS))]
        done = 0, 0
        for at, draft in self.late.items():  # in the order of the columns
            until = starts[at], first_writers[at]
            parts += self.parts[done[0] : until[0]] + draft.parts
            writers += self.writers[done[1] : until[1]] + draft.writers
            done = until
            signature = " ".join(draft.texts)
            told = (draft.occurrence, signature, draft.scalars, len(draft.parts), draft.n_inputs)
            self.told[at * _WIDTH : (at + 1) * _WIDTH] = told
        self.parts = parts + self.parts[done[0] :]
        self.writers = writers + self.writers[done[1] :]
        self.late = {}

    def flags(self) -> tuple[dict[int, str], list[int]]:
        """(the flags of the events that have any, the places in `parts` that they are about)."""
        marked = {at: draft for at, draft in self.rare.items() if draft.marks}
        if not marked:
            return {}, []
        starts = [0, *accumulate(self.column(SIZE))]
        places = [
            starts[at] + int(mark[1 : mark.index(":")]) + (draft.n_inputs if mark[0] == "o" else 0)
            for at, draft in marked.items()
            for mark in draft.marks
        ]
        return {at: ",".join(draft.marks) for at, draft in marked.items()}, places

    def having(self, name: str, none: object) -> Iterator[tuple[int, Any]]:
        """(place, value) of the events whose attribute of this name is not `none`."""
        for at, draft in self.rare.items():
            value = getattr(draft, name)
            if value != none:
                yield at, value
