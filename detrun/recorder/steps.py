"""When a step ends and what its number is. Pure: optimizers are integers here, and nothing is read or written.

A step closes with the last optimizer of its cycle. With one optimizer that is plain. With several, nothing says in
advance which of them take part: so the first cycle is held open after each optimizer, and turns out to have been
complete when one that already stepped steps again. From then on a step closes as soon as all known ones have stepped.

While one exists that has never stepped, a complete step is held too: the newcomer may be the last of it (a generator
that follows its critic) or the first of the next one. The backward passes tell: where the next optimizer steps from the
same backward pass as the newcomer did, they belong together.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

RETIRED_AFTER = 16
"""Cycles in a row that an optimizer may sit out (a schedule of its own) before a step no longer waits for it."""


@dataclass
class Cycle:
    """Groups the calls of outermost optimizers into steps.

    `settles`, `begins` and `ends` bracket each call; `closed` is told when the caller has closed the step. `tail`:
    newcomers that stepped behind a complete step and may belong to it or to the next one. `fresh`: whether a backward
    pass ran since the last optimizer's step.
    """

    known: list[int] = field(default_factory=list)
    stepped: list[int] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    settled: bool = False
    _missed: dict[int, int] = field(default_factory=dict)
    _ever: set[int] = field(default_factory=set)
    _waited: int = 0

    def settles(self, optimizer: int, fresh: bool) -> bool | None:
        """What the beginning of this optimizer's step says of the tail: True if it belongs to the complete step, False
        if that one must be closed without it, None if there is no tail or nothing is known yet."""
        if not self.tail or (not fresh and optimizer not in self.known):
            return None
        if fresh:
            self.stepped += self.tail
            self.tail = []
        return fresh

    def begins(self, optimizer: int) -> bool:
        """True if the step held open must be closed first: this optimizer already took part in it."""
        if optimizer not in self.stepped:
            return False
        self.settled = True
        return True

    def ends(self, optimizer: int, live: Collection[int], fresh: bool = True) -> bool:
        """True if the step is complete. `live` are the optimizers that exist now, whether they ever stepped or not."""
        newcomer = optimizer not in self.known
        behind = newcomer and self.settled and fresh and bool(self.stepped) and self._complete(live)
        self._ever.add(optimizer)
        if newcomer:
            self.known.append(optimizer)
            self._waited = 0
        self._missed[optimizer] = 0
        if behind or self.tail:
            self.tail.append(optimizer)
            return False
        if optimizer not in self.stepped:
            self.stepped.append(optimizer)
        if not self.settled:
            return len(live) <= 1
        if newcomer and len(self.stepped) == 1:
            # It joins between two steps. Waiting for the others would pair it with their next step.
            return True
        if not self._complete(live):
            return False
        if self._waited < RETIRED_AFTER and any(other not in self._ever for other in live):
            self._waited += 1
            return False
        return True

    def _complete(self, live: Collection[int]) -> bool:
        return all(other in self.stepped for other in self.known if other in live)

    def closed(self) -> list[int]:
        """Start the next cycle, with the tail if there is one; returns the optimizers of the one that ended, in order
        of construction."""
        done, self.stepped, self.tail = sorted(self.stepped), self.tail, []
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
