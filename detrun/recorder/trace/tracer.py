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

import functools
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from detrun.recorder.trace.draft import Deferred, Draft, Keeper, Local
from detrun.recorder.trace.output import TraceOutput, fetch_digests
from detrun.recorder.trace.reading import IN_FLIGHT, Reading, storage_of, tensors_in
from detrun.recorder.trace.routing import rows_of
from detrun.recorder.trace.sites import Sites
from detrun.recorder.trace.window import TraceSettings
from detrun.records.trace_row import NO_CONTENT

if TYPE_CHECKING:
    from detrun.recorder.session import Session
    from detrun.recorder.trace.scopes import Place, Scopes

FLUSH_ROWS = 8192
_MOST_REMARKS = 100

__all__ = ["FLUSH_ROWS", "Deferred", "Draft", "Keeper", "Tracer"]


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
        self.local = Local()
        self.lock = threading.RLock()
        self.sites = Sites() if settings.call_sites else None
        self.reading = Reading()
        self.producers = self.reading.producers
        self.fingerprints = self.reading.fingerprints
        self._picks = settings.scopes is not None
        self.skipped_views = 0
        self._output: TraceOutput | None = None
        self._rows: list[Draft] = []
        self._deferred: list[Deferred] = []
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
            if self.sites is not None:
                self.sites.step_begins()
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
        if isinstance(error, ModuleNotFoundError) and error.name == "pyarrow":
            text = "pyarrow, which writes traces, is not installed where the program runs"
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
        if not self.active or self.local.muted:
            return None
        try:
            if phase is None or scope is None or microbatch is None:
                here = self.scopes.here()
                phase = here[0] if phase is None else phase
                scope = here[1] if scope is None else scope
                microbatch = here[2] if microbatch is None else microbatch
            draft = self.begin_at((phase, scope, microbatch), kind, op, inputs, scalars, overwritten)
            if draft is not None:
                if rng is not None:
                    draft.rng = rng
                if group:
                    draft.group = group
                if peer >= 0:
                    draft.peer = peer
            return draft
        except Exception as error:  # noqa: BLE001
            self.fail(error)
            return None

    def begin_at(
        self,
        place: Place,
        kind: str,
        op: str,
        inputs: Iterable[object],
        scalars: str,
        overwritten: Iterable[object],
    ) -> Draft | None:
        """The same where everything is known already, for those that come by thousands. May raise."""
        phase, scope, microbatch = place
        if self._picks and not self.settings.wants_scope(scope):
            return None
        key = (microbatch, phase, scope, op)
        with self.lock:
            occurrence = self._occurrences.get(key, 0)
            self._occurrences[key] = occurrence + 1
        draft = Draft(kind, op, phase, scope, microbatch, self.step or 0, occurrence, scalars)
        if self._deferred:
            self.settle(overwritten)
        take = self.reading.take_input
        for value in inputs:
            take(draft, value)
        draft.texts.append("->")
        return draft

    def end(self, draft: Draft, outputs: Iterable[object], mark: str = "", router: int = -1) -> None:
        """The event ended. outputs: as `inputs`, what it wrote or returned. mark: a flag for all of them. router:
        which of them says where something goes, so that an integer one gets a digest a row. Never raises."""
        if not self.active:
            return
        try:
            with self.lock:
                seq = self._append(draft)
                for position, value in enumerate(outputs):
                    self.reading.take_output(draft, value, seq, mark)
                    if (router == position or (self.settings.rows and position == 0)) and isinstance(value, Tensor):
                        draft.rows = rows_of(value, asked=self.settings.rows)
                self._completed(draft)
                if len(self._rows) >= FLUSH_ROWS:
                    self._flush_complete()
        except Exception as error:  # noqa: BLE001
            self.fail(error)

    def read(self, draft: Draft, output: Tensor) -> None:
        """Read an output of an event now, before it ends: the tensor may be gone or changed by then. Never raises."""
        if not self.active:
            return
        try:
            for text, digest, _, _, _, _, mark in self.fingerprints.parts(output):
                draft.texts.append(text)
                if mark:
                    draft.marks = (*draft.marks, f"o{len(draft.outputs)}:{mark}")
                draft.outputs.append(digest)
        except Exception as error:  # noqa: BLE001
            self.fail(error)

    def defer(
        self, draft: Draft, outputs: Iterable[object], is_done: Callable[[], bool], *, ordered: bool = False
    ) -> Deferred | None:
        """The event began something that goes on: its outputs are read when the next recorded event reads them, or at
        a flush, if `is_done` then says so; otherwise they are flagged as in flight. ordered: whoever reads them is put
        behind what goes on, as on a device's stream, and so are we. Waits for nothing. Never raises."""
        if not self.active:
            return None
        try:
            with self.lock:
                self._append(draft)
                entry = Deferred(draft, list(outputs), is_done, ordered)
                self._deferred.append(entry)
                for tensor in tensors_in(entry.outputs):
                    storage = storage_of(tensor)
                    if storage is not None:
                        self.producers.pending(storage, functools.partial(self._resolve, entry))
                return entry
        except Exception as error:  # noqa: BLE001
            self.fail(error)
            return None

    def arrived(self, entries: Iterable[Deferred]) -> None:
        """The program waited for what these events began. Never raises."""
        try:
            with self.lock:
                for entry in entries:
                    entry.done = True
                    self._resolve(entry)
        except Exception as error:  # noqa: BLE001
            self.fail(error)

    def sweep(self) -> None:
        """Read the outputs of all deferred events that say they are done. Never raises."""
        try:
            with self.lock:
                arrived = [entry for entry in self._deferred if entry.done or entry.is_done()]
                self.arrived(arrived)
        except Exception as error:  # noqa: BLE001
            self.fail(error)

    def settle(self, tensors: Iterable[object], *, done: bool = False) -> None:
        """The program waited for these tensors (done), or is about to use them. Never raises."""
        try:
            with self.lock:
                for tensor in tensors_in(tensors):
                    storage = storage_of(tensor)
                    known = self.producers.find(storage) if storage is not None else None
                    if known is not None and known.pending is not None:
                        if done:
                            _tell_done(known.pending)
                        self.producers.settle(storage)
        except Exception as error:  # noqa: BLE001
            self.fail(error)

    def wrote(self, tensors: Iterable[object]) -> None:
        """Something that is not recorded wrote these tensors. Never raises."""
        if not self.active:
            return
        try:
            with self.lock:
                for tensor in tensors_in(tensors):
                    self.reading.wrote(tensor)
        except Exception as error:  # noqa: BLE001
            self.fail(error)

    def opaque(self, name: str, count: int = 1) -> None:
        """Something ran whose inside cannot be seen: it is counted under its name."""
        self._opaque[name] = self._opaque.get(name, 0) + count

    def not_captured(self, text: str) -> None:
        """Say once what this trace does not hold."""
        if text not in self._not_captured and len(self._not_captured) < _MOST_REMARKS:
            self._not_captured.append(text)

    # Rows

    def _append(self, draft: Draft) -> int:
        seq = draft.seq = self._seq
        self._seq = seq + 1
        if self.sites is not None:
            draft.site = self.sites.site(draft.phase == "backward")
        self._rows.append(draft)
        return seq

    def _completed(self, draft: Draft) -> None:
        draft.signature = " ".join(draft.texts)
        if draft.marks:
            draft.flags = ",".join(draft.marks)
            self._flagged += len(draft.marks)
        # A row waits for its flush in few objects: the collector of garbage looks at each list, but not at these.
        draft.inputs = tuple(draft.inputs)
        draft.outputs = tuple(draft.outputs)
        draft.writers = tuple(draft.writers)
        draft.texts = ()
        draft.complete = True

    def _resolve(self, entry: Deferred, *, last: bool = False) -> None:
        """Read the outputs of an event that was deferred. last: whether nobody will ask again."""
        draft = entry.draft
        if draft.complete:
            return
        if entry in self._deferred:
            self._deferred.remove(entry)
        done = entry.done or (entry.ordered and not last) or entry.is_done()
        for value in entry.outputs:
            self.reading.take_output(draft, value, draft.seq, "" if done else IN_FLIGHT)
        if not done:
            draft.outputs = [NO_CONTENT for _ in draft.outputs]
        self._completed(draft)
        if self.keeper is not None and done:
            self.keeper.end(draft, entry.outputs)

    def _end_step(self) -> None:
        with self.lock:
            step = self.step
            if step is None:
                return
            for listener in self.step_listeners:
                listener(step)
            for entry in list(self._deferred):
                self._resolve(entry, last=True)
            self._flush(self._rows)
            if self._output is not None and not self._done:
                self._output.end_step(step)
            self._occurrences.clear()
            self.producers.purge()

    def _flush_complete(self) -> None:
        """Write the rows before the first one that is still deferred, if these are many."""
        count = next((index for index, row in enumerate(self._rows) if not row.complete), len(self._rows))
        if count >= FLUSH_ROWS:
            self._flush(self._rows[:count])

    def _flush(self, rows: list[Draft]) -> None:
        if not rows or self._output is None:
            return
        fetch_digests(rows, self.fingerprints.fetch)
        written = self._output.write(rows)
        self._rows = self._rows[len(rows) :]
        if not written:
            self._output.end_step(rows[0].step, partial=True)
            self._rows = []
            self._finish("byte budget")

    # Beginning and end

    def _may_open(self) -> bool:
        """Whether this process is the one that trains as a rank that is to be traced."""
        session = self.session
        if not session.is_rank():
            return False
        rank = session.rank()
        if not self.settings.wants_rank(rank):
            self._done = True
            self._stop()
            return False
        self._output = TraceOutput(session.attempt, rank, self.settings)
        return True

    def _finish(self, reason: str | None) -> None:
        output, self._output = self._output, None
        self._stop()
        if output is None:
            return
        output.end(
            reason,
            {
                "events": output.events,
                "opaque": dict(sorted(self._opaque.items())),
                "not_captured": list(self._not_captured),
                "flagged": self._flagged,
                "skipped_views": self.skipped_views,
            },
        )

    def _stop(self) -> None:
        was, self.active, self._done, self.step = self.active, False, True, None
        self._rows = []
        self._deferred = []
        self.producers.clear()
        if was:
            for listener in self.listeners:
                try:
                    listener(False)
                except Exception as error:  # noqa: BLE001
                    self.session.warn(f"the trace did not end well: {type(error).__name__}: {error}")


def _tell_done(settle: Any) -> None:
    settle.args[0].done = True
