"""When a step ends and what its number is. Pure: optimizers are integers here, and nothing is read or written.

A step closes with the last optimizer of its cycle. With one optimizer that is plain. With several, nothing says in
advance which of them take part: so the first cycle is held open after each optimizer, and turns out to have been
complete when one that already stepped steps again. From then on a step closes as soon as all known ones have stepped.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

RETIRED_AFTER = 16
"""Cycles in a row that an optimizer may sit out (a schedule of its own) before a step no longer waits for it."""


@dataclass
class Cycle:
    """Groups the calls of outermost optimizers into steps.

    `begins` and `ends` bracket each call; `closed` is told when the caller has closed the step.
    """

    known: list[int] = field(default_factory=list)
    stepped: list[int] = field(default_factory=list)
    settled: bool = False
    _missed: dict[int, int] = field(default_factory=dict)

    def begins(self, optimizer: int) -> bool:
        """True if the step held open must be closed first: this optimizer already took part in it."""
        if optimizer not in self.stepped:
            return False
        self.settled = True
        return True

    def ends(self, optimizer: int, live: Collection[int]) -> bool:
        """True if the step is complete. `live` are the optimizers that exist now, whether they ever stepped or not."""
        newcomer = optimizer not in self.known
        if newcomer:
            self.known.append(optimizer)
        self._missed[optimizer] = 0
        if optimizer not in self.stepped:
            self.stepped.append(optimizer)
        if not self.settled:
            return len(live) <= 1
        if newcomer and len(self.stepped) == 1:
            # It joins between two steps. Waiting for the others would pair it with their next step.
            return True
        return all(other in self.stepped for other in self.known if other in live)

    def closed(self) -> list[int]:
        """Start the next cycle; returns the optimizers of the one that ended, in order of construction."""
        done, self.stepped = sorted(self.stepped), []
        for other in self.known:
            if other not in done:
                self._missed[other] += 1
        self.known = [o for o in self.known if self._missed[o] <= RETIRED_AFTER]
        return done


@dataclass
class Numbering:
    """Translates the program's own step numbers into detrun's, which count from 1.

    `done` is the number of steps that earlier attempts took, if it is known (None: an attempt that resumes from where
    nobody said). The first number the program names settles how it counts.
    """

    attempt: int = 0
    done: int | None = 0
    shift: int | None = None

    def first(self) -> int:
        """The number of the first step of this attempt, as far as is known."""
        return (self.done or 0) + 1

    def translate(self, named: int, current: int, begun: bool) -> int:
        """The number of the step the program calls `named` while step `current` is open or was the last to close.

        `begun` is False as long as nothing of any step has happened: a program that names step 0 then may just
        report its state before training, so this does not yet settle how it counts.
        """
        if self.shift is not None:
            return named + self.shift
        if not begun:
            return max(named, current)
        if self.done is None:
            self.shift = 0  # the program's word is all there is
        else:
            self.shift = current - named
        return named + self.shift
