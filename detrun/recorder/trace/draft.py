"""What an event is while it happens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from detrun.records.trace_row import EventKey

if TYPE_CHECKING:
    from detrun.recorder.trace.heads import Head


class Draft:
    """An event that is happening. parts: the digests of its inputs and then of its outputs; a tensor on a device stands
    for its own digest until the next flush. n_inputs: how many are inputs, known once the event began. writers: an
    event a part of the inputs, by its seq, or -1. texts: the words of the signature. marks: the flags."""

    rng: bytes | None = None
    site = ""
    group = ""
    peer = -1
    rows: list[int] | None = None
    marks: tuple[str, ...] = ()

    def __init__(self, head: Head, step: int, occurrence: int, scalars: str) -> None:
        self.head = head
        self.step = step
        self.occurrence = occurrence
        self.scalars = scalars
        self.n_inputs = 0
        self.seq = -1
        self.complete = False
        self.parts: list[Any] = []
        self.writers: list[int] = []
        self.texts: list[str] = []

    @property
    def op(self) -> str:
        return self.head.op

    @property
    def phase(self) -> str:
        return self.head.phase

    @property
    def scope(self) -> str:
        return self.head.scope

    @property
    def microbatch(self) -> int:
        return self.head.microbatch

    @property
    def inputs(self) -> list[Any]:
        return self.parts[: self.n_inputs]

    @property
    def outputs(self) -> list[Any]:
        return self.parts[self.n_inputs :]

    @property
    def key(self) -> EventKey:
        head = self.head
        return EventKey(self.step, head.microbatch, head.phase, head.scope, head.op, self.occurrence)


class Local(threading.local):
    """What is each thread's own. muted: how deep in the recorder's own work it is. aside: how deep in what is a piece
    of one event. inside: the operator that a tensor subclass is about to take apart."""

    muted = 0
    aside = 0
    inside: Any = None


class Keeper(Protocol):
    """What keeps the bytes of some events. Called inside the tracer's own guard: what it raises ends the trace."""

    def wants(self, key: EventKey) -> bool: ...

    def begin(self, draft: Draft, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None: ...

    def end(self, draft: Draft, outputs: Sequence[object]) -> None: ...

    def forget(self, draft: Draft) -> None: ...


class Deferred:
    """An event whose outputs are not there yet."""

    __slots__ = ("done", "draft", "is_done", "ordered", "outputs")

    def __init__(self, draft: Draft, outputs: list[object], is_done: Callable[[], bool], ordered: bool) -> None:
        self.draft = draft
        self.outputs = outputs
        self.is_done = is_done
        self.ordered = ordered
        self.done = False
