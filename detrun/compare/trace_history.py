"""What became of earlier events, for those that read what they wrote; of the last steps only, so that memory stays flat
however long a trace is."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy

from detrun.records.trace_table import Integers

UNKNOWN, MATCHED, DIFFERS = 0, 1, 2
NOBODY = -1

MAX_REMEMBERED = 2_000_000
"""Events, or the last step where that alone has more."""

States = numpy.typing.NDArray[numpy.int8]


@dataclass(frozen=True)
class Block:
    """One arm's events of one step: numbers in order, what became of each, and the other arm's number of it."""

    step: int
    seq: Integers
    state: States
    partner: Integers

    def locate(self, seq: Integers) -> tuple[Integers, numpy.typing.NDArray[numpy.bool_]]:
        """(row, whether there is one) of events by their numbers."""
        last = len(self.seq) - 1
        if self.seq[last] - self.seq[0] == last:  # without a gap
            at = seq - self.seq[0]
            found = (at >= 0) & (at <= last)
            return numpy.where(found, at, 0), found
        at = numpy.minimum(numpy.searchsorted(self.seq, seq), last)
        return at, self.seq[at] == seq


class History:
    """The events of one arm. Numbers that are asked for and were never added belong to steps that were skipped as equal
    (MATCHED), unless they were forgotten after something differed (DIFFERS)."""

    def __init__(self) -> None:
        self._blocks: deque[Block] = deque()
        self._remembered = 0
        self._forgotten_difference_before = -1

    def add(self, block: Block) -> None:
        self._blocks.append(block)
        self._remembered += len(block.seq)
        while self._remembered > MAX_REMEMBERED and len(self._blocks) > 1:
            old = self._blocks.popleft()
            self._remembered -= len(old.seq)
            if self._forgotten_difference_before >= 0 or (old.state == DIFFERS).any():
                self._forgotten_difference_before = int(old.seq[-1]) + 1

    def look_up(self, seq: Integers) -> tuple[States, Integers, Integers]:
        """(state, partner, step) of events; the partner is NOBODY where it is not known, the step -1."""
        state = numpy.full(len(seq), MATCHED, numpy.int8)
        partner = numpy.full(len(seq), NOBODY, numpy.int64)
        step = numpy.full(len(seq), -1, numpy.int64)
        state[seq < self._forgotten_difference_before] = DIFFERS
        for block in reversed(self._blocks):
            if not len(block.seq):
                continue
            at, found = block.locate(seq)
            state[found] = block.state[at[found]]
            partner[found] = block.partner[at[found]]
            step[found] = block.step
        return state, partner, step
