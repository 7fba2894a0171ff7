"""What events have in common that have the same key but for their occurrence, and how many there were."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from detrun.recorder.trace.scopes import Place

_MOST = 65_536
"""Heads that are kept from one step to the next."""


class Head:
    """What the events of all steps with one key have in common. wanted: whether they are recorded. counter: [step,
    events of that step so far]; heads that differ in nothing but the kind share it."""

    __slots__ = ("counter", "kind", "microbatch", "op", "phase", "scope", "wanted")

    def __init__(self, place: Place, op: str, kind: str, counter: list[int], *, wanted: bool) -> None:
        self.phase, self.scope, self.microbatch = place
        self.op = op
        self.kind = kind
        self.counter = counter
        self.wanted = wanted


class Heads:
    """The heads that were asked for. wants_scope: whether events of a scope are recorded."""

    def __init__(self, wants_scope: Callable[[str], bool]) -> None:
        self._wants_scope = wants_scope
        self._known: dict[tuple[Place, str, str], Head] = {}
        self._counters: dict[tuple[Place, str], list[int]] = {}
        self._lock = threading.Lock()

    def begin(self, place: Place, op: str, kind: str, step: int) -> tuple[Head, int] | None:
        """(the head of an event that begins, its occurrence); None if it is not recorded."""
        head = self._known.get((place, op, kind))
        if head is None:
            head = self._add(place, op, kind)
        if not head.wanted:
            return None
        counter = head.counter
        with self._lock:
            if counter[0] != step:
                counter[:] = (step, 0)
            occurrence = counter[1]
            counter[1] = occurrence + 1
        return head, occurrence

    def step_ends(self) -> None:
        if len(self._known) >= _MOST:
            self._known.clear()
            self._counters.clear()

    def _add(self, place: Place, op: str, kind: str) -> Head:
        with self._lock:
            counter = self._counters.setdefault((place, op), [-1, 0])
            head = Head(place, op, kind, counter, wanted=self._wants_scope(place[1]))
            return self._known.setdefault((place, op, kind), head)
