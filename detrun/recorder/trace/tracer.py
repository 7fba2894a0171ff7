"""Gathers the events of this rank and writes them: what every source of events (operators, collectives, modules,
optimizers) calls.

Nothing in here may raise into the program: what goes wrong ends the trace, marks it incomplete, and the training goes
on. A source calls `begin` before the event, lets it happen, and calls `end` with what came out:

    draft = tracer.begin("collective", "c10d.allreduce_", tensors, group="0-3")
    result = original(...)
    if draft is not None:
        tracer.end(draft, tensors)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from detrun.fingerprint.tensors import no_dispatch_modes
from detrun.recorder.trace.fingerprints import Fingerprints, Seen
from detrun.recorder.trace.output import TraceOutput
from detrun.recorder.trace.producers import Producers
from detrun.recorder.trace.window import TraceSettings
from detrun.records.trace_row import NO_CONTENT, EventKey

if TYPE_CHECKING:
    from detrun.recorder.session import Session
    from detrun.recorder.trace.scopes import Scopes

FLUSH_ROWS = 8192


class Draft:
    """An event that is happening, and then a row that is not written yet. `inputs` and `outputs` are digests; a
    tensor on a device stands for its own digest until the next flush."""

    __slots__ = (
        "complete",
        "flags",
        "group",
        "inputs",
        "kind",
        "marks",
        "microbatch",
        "occurrence",
        "op",
        "outputs",
        "peer",
        "phase",
        "producers",
        "rng",
        "rows",
        "scalars",
        "scope",
        "seq",
        "signature",
        "site",
        "step",
        "texts",
        "writers",
    )

    def __init__(self, kind: str, op: str, phase: str, scope: str, microbatch: int, step: int) -> None:
        self.kind = kind
        self.op = op
        self.phase = phase
        self.scope = scope
        self.microbatch = microbatch
        self.step = step
        self.occurrence = 0
        self.seq = -1
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.writers: list[int] = []
        self.producers: list[int] = []
        self.texts: list[str] = []
        self.marks: list[str] = []
        self.signature = ""
        self.scalars = ""
        self.flags = ""
        self.rng: bytes | None = None
        self.site = ""
        self.group = ""
        self.peer = -1
        self.rows: list[int] | None = None
        self.complete = False

    @property
    def key(self) -> EventKey:
        return EventKey(self.step, self.microbatch, self.phase, self.scope, self.op, self.occurrence)


class Keeper(Protocol):
    """What keeps the bytes of some events. Called inside the tracer's own guard: what it raises ends the trace."""

    def wants(self, key: EventKey) -> bool: ...

    def begin(self, draft: Draft, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None: ...

    def end(self, draft: Draft, outputs: Sequence[object]) -> None: ...


class Tracer:
    """The trace of this process, from the window's first step to its last.

    step: the step that is open; None outside the window. local.muted: above 0 while the recorder itself works on this
    thread. listeners: called with True when the window opens and with False when it closes.
    """

    def __init__(self, session: Session, settings: TraceSettings, scopes: Scopes) -> None:
        self.session = session
        self.settings = settings
        self.scopes = scopes
        self.step: int | None = None
        self.active = False
        self.keeper: Keeper | None = None
        self.listeners: list[Callable[[bool], None]] = []
        self.step_listeners: list[Callable[[int], None]] = []
        """Called with the number of a step that is about to be flushed, while its events can still be added."""
        self.local = threading.local()
        self.lock = threading.RLock()
        self.producers = Producers()
        self.fingerprints = Fingerprints()
        self.skipped_views = 0
        self._output: TraceOutput | None = None
        self._rows: list[Draft] = []
        self._deferred: list[tuple[Draft, Sequence[object], Callable[[], bool]]] = []
        self._seq = 0
        self._occurrences: dict[tuple[int, str, str, str], int] = {}
        self._opaque: dict[str, int] = {}
        self._not_captured: list[str] = []
        self._flagged = 0
        self._done = False

    # The window

    def open_for(self, step: int) -> None:
        """The program is in `step` from now on: opens the window, goes on in it, or closes it, as the settings say.
        Never raises."""
        if step == self.step or self._done:
            return
        try:
            if self.step is not None:
                self._end_step()
            if self._done:
                return
            if step > self.settings.last:
                if self.step is not None:
                    self.close()
                return
            if not self.settings.wants_step(step):
                return
            if self.step is None and not self._may_open():
                return
            self.step = step
            self.scopes.step_begins()
            if not self.active:
                self.active = True
                for listener in self.listeners:
                    listener(True)
        except Exception as error:  # noqa: BLE001 - the program's run is worth more than its trace
            self.fail(error)

    def close(self, reason: str | None = None) -> None:
        """The window is over: write what is there and the end line. reason: why it ended early. Never raises."""
        if self._done:
            return
        try:
            with self.lock:
                if self.step is not None and self._rows:
                    self._end_step()
                self._finish(reason)
        except Exception as error:  # noqa: BLE001
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Something of the tracer's went wrong: the trace ends here, for good."""
        if self._done:
            return
        text = f"{type(error).__name__}: {error}"[:500]
        self.session.warn(f"the trace ends early: {text}")
        try:
            with self.lock:
                self._rows.clear()
                self._finish(f"tracer failed: {text}")
        except Exception as second:  # noqa: BLE001
            self._stop()
            self.session.warn(f"the trace has no end line: {type(second).__name__}: {second}")

    # Events

    def begin(
        self,
        kind: str,
        op: str,
        inputs: Iterable[object],
        *,
        phase: str | None = None,
        scope: str | None = None,
        microbatch: int | None = None,
        scalars: str = "",
        rng: bytes | None = None,
        group: str = "",
        peer: int = -1,
        overwritten: Iterable[object] = (),
    ) -> Draft | None:
        """An event begins. None: it is not recorded, being outside of the window or of the scopes asked for.

        inputs: tensors, None for one that is absent, lists and tuples of these; anything else has no part. phase,
        scope, microbatch: where it belongs, as `Scopes.here` says unless given. overwritten: tensors that are written
        without being read. Never raises.
        """
        if not self.active or getattr(self.local, "muted", 0):
            return None
        try:
            if phase is None or scope is None or microbatch is None:
                here = self.scopes.here()
                phase = here[0] if phase is None else phase
                scope = here[1] if scope is None else scope
                microbatch = here[2] if microbatch is None else microbatch
            settings = self.settings
            if settings.scopes is not None and not settings.wants_scope(scope):
                return None
            draft = Draft(kind, op, phase, scope, microbatch, self.step or 0)
            draft.scalars = scalars
            draft.rng = rng
            draft.group = group
            draft.peer = peer
            key = (microbatch, phase, scope, op)
            with self.lock:
                occurrence = self._occurrences.get(key, 0)
                self._occurrences[key] = occurrence + 1
            draft.occurrence = occurrence
            for value in overwritten:
                self._settle(value)
            for value in inputs:
                self._take_input(draft, value)
            draft.texts.append("->")
            return draft
        except Exception as error:  # noqa: BLE001
            self.fail(error)
            return None

    def end(self, draft: Draft, outputs: Iterable[object], mark: str = "") -> None:
        """The event ended. outputs: as `inputs`, what it wrote or returned. mark: a flag for all of them. Never
        raises."""
        if not self.active:
            return
        try:
            with self.lock:
                seq = self._append(draft)
                for value in outputs:
                    self._take_output(draft, value, seq, mark)
                self._completed(draft)
                if len(self._rows) >= FLUSH_ROWS:
                    self._flush()
        except Exception as error:  # noqa: BLE001
            self.fail(error)

    def defer(self, draft: Draft, outputs: Sequence[object], is_done: Callable[[], bool]) -> None:
        """The event began something that goes on: its outputs are read when the next recorded event reads them, or at
        a flush, if `is_done` then says so; otherwise they are flagged as in flight. Waits for nothing. Never raises."""
        if not self.active:
            return
        try:
            with self.lock:
                seq = self._append(draft)
                entry = (draft, list(outputs), is_done)
                self._deferred.append(entry)
                for tensor in _tensors(outputs):
                    self.producers.pending(tensor, seq, lambda: self._resolve(entry))
        except Exception as error:  # noqa: BLE001
            self.fail(error)

    def wrote(self, tensors: Iterable[object]) -> None:
        """Something that is not recorded wrote these tensors. Never raises."""
        try:
            for tensor in _tensors(tensors):
                self.producers.wrote(tensor, -1)
        except Exception as error:  # noqa: BLE001
            self.fail(error)

    def opaque(self, name: str, count: int = 1) -> None:
        """Something ran whose inside cannot be seen: it is counted under its name."""
        self._opaque[name] = self._opaque.get(name, 0) + count

    def not_captured(self, text: str) -> None:
        """Say once what this trace does not hold."""
        if text not in self._not_captured and len(self._not_captured) < 100:
            self._not_captured.append(text)
