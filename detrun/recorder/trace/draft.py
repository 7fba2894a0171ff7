"""What an event is while it happens, and until it is written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from detrun.records.trace_row import EventKey


class Draft:
    """An event that is happening, and then a row that is not written yet. `inputs` and `outputs` are digests; a
    tensor on a device stands for its own digest until the next flush. writers: an event a part of the inputs, by its
    seq, or -1. texts: the words of the signature. marks: the flags."""

    rng: bytes | None = None
    site = ""
    group = ""
    peer = -1
    rows: list[int] | None = None
    flags = ""
    signature = ""
    seq = -1
    complete = False
    marks: tuple[str, ...] = ()

    def __init__(
        self, kind: str, op: str, phase: str, scope: str, microbatch: int, step: int, occurrence: int, scalars: str
    ) -> None:
        self.kind = kind
        self.op = op
        self.phase = phase
        self.scope = scope
        self.microbatch = microbatch
        self.step = step
        self.occurrence = occurrence
        self.scalars = scalars
        self.inputs: Any = []
        self.outputs: Any = []
        self.writers: Any = []
        self.texts: Any = []

    @property
    def producers(self) -> list[int]:
        """How many events ago each part of the inputs was last written, 0 where that is not known."""
        seq = self.seq
        return [seq - writer if writer >= 0 else 0 for writer in self.writers]

    @property
    def key(self) -> EventKey:
        return EventKey(self.step, self.microbatch, self.phase, self.scope, self.op, self.occurrence)


class Local(threading.local):
    """What is each thread's own. muted: how deep in the recorder's own work it is. inside: the operator that a tensor
    subclass is about to take apart."""

    muted = 0
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
