"""Steps of a program whose own code writes to the parameters, as it has no optimizer of torch's."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from detrun.recorder.draft import Draft
from detrun.recorder.norm import gradient_norm
from detrun.recorder.state import gradients_digest, tensors_digest
from detrun.recorder.updates import Updates, program_records, trained

if TYPE_CHECKING:
    from detrun.recorder.observer import Observer


class StepsByHand:
    """Where nothing but the parameters themselves tells where a step ends. See `updates`."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._updates = Updates()
        self._records: bool | None = None

    def _applies(self) -> bool:
        observer = self._observer
        if observer.session.has_optimizers or observer.session.paced or not observer.models:
            return False
        if self._records is None:
            self._records = program_records()
        return not self._records

    def backward_begins(self) -> None:
        """An outermost backward pass begins."""
        if not self._applies():
            return
        observer = self._observer
        if not observer.session.draft.batches:
            self.updated()
        observer.note_environment()
        self._updates.mark(observer.models.live())

    def backward_ends(self) -> None:
        """An outermost backward pass ended: these may be the step's gradients."""
        if not self._applies():
            return
        session = self._observer.session
        parameters = trained(self._observer.models.live())
        session.draft.own_norms = gradient_norm([parameter.grad for parameter in parameters])
        if self._observer.state_may_be_due():
            started = time.thread_time()
            session.draft.gradients = [(0, gradients_digest(parameters))]
            session.charge("state", started)

    def updated(self) -> None:
        """The program goes on: a step ends where the parameters were updated meanwhile."""
        session = self._observer.session
        parameters = self._updates.happened()
        if parameters is None or session.has_optimizers or not session.draft.backwards:
            return
        session.held, session.draft = session.draft, Draft()
        if parameters and session.state_due(session.closed + 1):
            started = time.thread_time()
            self._observer.note_state(session.held, tensors_digest(parameters), tensors_digest([]))
            session.charge("state", started)
        self._observer.close()
