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
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from detrun.recorder.trace.coverage import Coverage
from detrun.recorder.trace.draft import Deferred, Draft, Keeper, Local
from detrun.recorder.trace.heads import Heads
from detrun.recorder.trace.output import TraceOutput, fetch_digests
from detrun.recorder.trace.reading import IN_FLIGHT, Reading, storage_of, tensors_in
from detrun.recorder.trace.routing import rows_among
from detrun.recorder.trace.rows import Rows
from detrun.recorder.trace.sites import Sites
from detrun.recorder.trace.window import TraceSettings
from detrun.records.trace_row import NO_CONTENT

if TYPE_CHECKING:
    from detrun.recorder.session import Session
    from detrun.recorder.trace.scopes import Place, Scopes

FLUSH_ROWS = 8192

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
        self._asks_rows = settings.rows
        self.coverage = Coverage()
        self._output: TraceOutput | None = None
        self._rows = Rows()
        self._deferred: list[Deferred] = []
        self._seq = 0
        self._heads = Heads(settings.wants_scope)
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
            self._rows = Rows(step, self._seq)
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
                self._rows = Rows()
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
        step = self.step or 0
        begun = self._heads.begin(place, op, kind, step)
        if begun is None:
            return None
        draft = Draft(begun[0], step, begun[1], scalars)
        if self._deferred:
            self.settle(overwritten)
        self.reading.take_inputs(draft, inputs)
        draft.n_inputs = len(draft.parts)
        draft.texts.append("->")
        return draft

    def end(self, draft: Draft, outputs: Sequence[object], mark: str = "", router: int = -1) -> None:
        """The event ended. outputs: as `inputs`, what it wrote or returned. mark: a flag for all of them. router:
        which of them says where something goes, so that an integer one gets a digest a row. Never raises."""
        if not self.active:
            return
        try:
            with self.lock:
                seq = draft.seq = self._seq
                self.reading.take_outputs(draft, outputs, seq, mark)
                if router >= 0 or self._asks_rows:
                    draft.rows = rows_among(outputs, router, asked=self._asks_rows)
                if self.sites is not None:
                    draft.site = self.sites.site(draft.phase == "backward")
                self._rows.add(draft)
                self._seq = seq + 1
                draft.complete = True
                if len(self._rows.heads) >= FLUSH_ROWS:
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
                    draft.marks = (*draft.marks, f"o{len(draft.parts) - draft.n_inputs}:{mark}")
                draft.parts.append(digest)
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
                draft.seq = self._seq
                if self.sites is not None:
                    draft.site = self.sites.site(draft.phase == "backward")
                self._rows.add_late(draft)
                self._seq += 1
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
        self.coverage.opaque(name, count)

    def not_captured(self, text: str) -> None:
        """Say once what this trace does not hold."""
        self.coverage.not_captured(text)

    # Rows

    def _resolve(self, entry: Deferred, *, last: bool = False) -> None:
        """Read the outputs of an event that was deferred. last: whether nobody will ask again."""
        draft = entry.draft
        if draft.complete:
            return
        if entry in self._deferred:
            self._deferred.remove(entry)
        done = entry.done or (entry.ordered and not last) or entry.is_done()
        self.reading.take_outputs(draft, entry.outputs, draft.seq, "" if done else IN_FLIGHT)
        if not done:
            draft.parts[draft.n_inputs :] = [NO_CONTENT for _ in draft.outputs]
        draft.complete = True
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
            self._flush(len(self._rows))
            if self._output is not None and not self._done:
                self._output.end_step(step)
            self._heads.step_ends()
            self.producers.purge()

    def _flush_complete(self) -> None:
        """Write the rows before the first one that is still deferred, if these are many."""
        count = self._rows.ready()
        if count >= FLUSH_ROWS:
            self._flush(count)

    def _flush(self, count: int) -> None:
        """Write the first so many rows."""
        if not count or self._output is None:
            return
        step = self.step or 0
        rows, self._rows = self._rows.split(count)
        rows.settle()
        self.coverage.flagged += sum(len(draft.marks) for draft in rows.rare.values())
        fetch_digests(rows.parts, self.fingerprints.fetch)
        if not self._output.write(rows):
            self._output.end_step(step, partial=True)
            self._rows = Rows()
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
        self._output = TraceOutput(session.attempt, rank, self.settings, lambda: session.coordinates)
        return True

    def _finish(self, reason: str | None) -> None:
        output, self._output = self._output, None
        self._stop()
        if output is None:
            return
        output.end(reason, self.coverage.told(output.events))

    def _stop(self) -> None:
        was, self.active, self._done, self.step = self.active, False, True, None
        self._rows = Rows()
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
