"""Turns what torch does (forward, backward, clipping, optimizer steps) into what a step's record holds.

Draws no random number, adds no collective, waits for no device, and keeps no tensor, module or optimizer alive beyond
the call in which it saw it.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from detrun.fingerprint.tensors import no_dispatch_modes
from detrun.recorder.batch import batch_digest
from detrun.recorder.by_hand import StepsByHand
from detrun.recorder.capture import Capture
from detrun.recorder.draft import Digest, Draft
from detrun.recorder.models import Models
from detrun.recorder.norm import gradient_norm
from detrun.recorder.optimizers import Optimizers, all_of, is_rehearsal, owns_any, parameters_of, with_inner
from detrun.recorder.pending import Scalar, read, scalar_from
from detrun.recorder.session import Session
from detrun.recorder.state import buffers_digest, gradients_digest, optimizer_digest, tensors_digest
from detrun.recorder.steps import Cycle
from detrun.recorder.updates import trained


class Observer:
    """The events of one process, in the order of the program. Every method is called through `Session.run`."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.optimizers = Optimizers()
        self.cycle = Cycle()
        self.optimizer_calls = 0
        self.models = Models(self._root_gone)
        self._by_hand = StepsByHand(self)
        self._clipped: set[int] = set()
        self._before_clip: dict[int, Digest] = {}
        self._unscaled: tuple[weakref.ref[Tensor], Scalar] | None = None
        self._environment_due = True
        self._fresh = False
        self._rehearses = False
        self._has_graphs = bool(torch.version.cuda or torch.version.hip)
        self._sabotage_due = True
        self.when_constructed: list[Callable[[], None]] = []
        self.when_backward_ended: list[Callable[[], None]] = []
        self.batch_of: list[Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]] = []
        """Each leaves those of a root module's arguments that are data."""
        self.when_forward_ended: list[Callable[[nn.Module, Any], None]] = []
        """Called with each root module in training mode and what it returned."""
        self.when_step_ended: list[Callable[[], None]] = []
        self.when_stepped: list[Callable[[], None]] = []
        """Called when an outermost optimizer has stepped, while its step is still the one that is going on."""
        self.backward_by_hand: Callable[[object], AbstractContextManager[None]] = _unhooked
        """For a backward pass that does not go through torch's own function; set when torch is hooked."""
        self.during_save: Callable[[str | None, str], AbstractContextManager[None]] = _no_save
        """For a save that goes through none of the functions that are hooked; set when torch is hooked."""
        self.restoring = 0
        """How deep inside a framework's restore or rehearsal the program is: nothing in there is training."""
        self.capture = Capture(session, self.optimizers, self.models.live, self.step_is_open)
        session.before_drain = self._finish

    # Forward and backward

    def forward_begins(self, root: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A module was called from outside any other module, in training: a micro-batch begins."""
        if self.capturing():
            return
        session = self.session
        if session.initial_rng is None:
            session.initial_rng = session.streams.digests()
        self.updated()
        if session.draft.batches and self.models.has_part(root):
            return
        self.models.add(root)
        if not session.draft.batches:
            session.streams.step_begins()
        session.show("forward")
        if self._sabotage_due and session.sabotage is not None:
            self._sabotage_due = False
            session.sabotage.first_forward(sys._getframe(1))
        for given in self.batch_of:
            args = given(root, args)
        batch = batch_digest(args, kwargs)
        session.draft.batches.append(batch)
        if self.capture.forward_begins(sys._getframe(1), batch):
            session.draft.batches = [batch]

    def resting_forward_begins(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The same in evaluation mode: what it was given is the batch of a step that has no other."""
        if not self.capturing():
            self.session.draft.resting_batches.append(batch_digest(args, kwargs))

    def scaled(self, outputs: Tensor, result: Tensor) -> None:
        """A gradient scaler multiplied a loss: the loss is what was there before."""
        if outputs.numel() == 1:
            value = scalar_from(outputs)
            if value is not None:
                self._unscaled = (weakref.ref(result), value)

    def backward_begins(self, tensors: Tensor | Sequence[Tensor] | None) -> None:
        """An outermost backward pass begins: what it starts from, if it is one number, is a loss."""
        if self.capturing():
            return
        session = self.session
        if session.initial_rng is None:
            session.initial_rng = session.streams.digests()
        session.show("backward")
        self._by_hand.backward_begins()
        draft = session.draft
        resting = draft.resting_batches[-1] if draft.resting_batches else None
        self.capture.backward_begins(sys._getframe(1), resting, forward_seen=bool(draft.batches))
        session.backwards += 1
        session.draft.backwards += 1
        self._fresh = True
        # Gradients that were looked at before a clipping are not the ones that will be used.
        self._before_clip.clear()
        self._clipped.clear()
        for tensor in _each(tensors):
            if tensor.numel() == 1:
                unscaled, self._unscaled = self._unscaled, None
                if unscaled is not None and unscaled[0]() is tensor:
                    session.draft.losses.append(unscaled[1])
                else:
                    value = scalar_from(tensor)
                    if value is not None:
                        session.draft.losses.append(value)
                return

    def grad_begins(self, outputs: Tensor | Sequence[Tensor]) -> None:
        """`torch.autograd.grad` begins: what it starts from is a loss of a step that has no other, as it may also be a
        penalty on gradients."""
        if self.capturing():
            return
        session = self.session
        if session.initial_rng is None:
            session.initial_rng = session.streams.digests()
        self._fresh = True
        for tensor in _each(outputs):
            try:
                value = scalar_from(tensor) if tensor.numel() == 1 else None
            except RuntimeError:  # a stand-in without memory, as in torch.func
                return
            if value is not None:
                session.draft.grad_losses.append(value)
                return

    def backward_ends(self) -> None:
        """An outermost backward pass ended."""
        if not self.capturing():
            self._by_hand.backward_ends()

    def updated(self) -> None:
        """The program goes on: one without an optimizer may have taken its step."""
        self._by_hand.updated()

    def _root_gone(self, _reference: object, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """A model dies, which at the end of a program's function still has its parameters. At the interpreter's own end
        the modules that this needs may be gone (a default argument is not)."""
        if not finalizing():
            self.session.run(self.updated)

    def _finish(self) -> None:
        self.updated()
        self.capture.finish()

    # Clipping

    def clip_begins(self, parameters: Sequence[Tensor]) -> None:
        """Gradients are about to be clipped: the last moment at which they are what backward and reduction made."""
        if self.capturing() or not parameters:
            return
        serials = self.optimizers.serials()
        due = self.state_may_be_due()
        if len(serials) == 1 and not due:
            self._clipped.update(serials)
            return
        for serial, optimizer in self.optimizers.live().items():
            if len(serials) == 1 or owns_any(optimizer, parameters):
                self._clipped.add(serial)
                if due and serial not in self._before_clip:
                    self._before_clip[serial] = self._gradients(optimizer)

    def clip_ends(self, norm: object) -> None:
        """The clipping returned the norm it found."""
        if self.capturing():
            return
        value = scalar_from(norm)
        if value is not None:
            self.session.draft.clip_norms.append(value)

    def save_begins(self) -> None:
        """An outermost save to a file begins."""
        if not self.capturing():
            self.capture.save_begins(sys._getframe(1))

    # Where the program is

    def position(self) -> tuple[int, int]:
        """`Session.position`, but inside a step while another optimizer is still to step in it."""
        session = self.session
        if session.held is not None and self.step_is_open():
            return session.closed, session.held.microbatches_done() + session.draft.microbatches_done()
        return session.position()

    def step_is_open(self) -> bool:
        """Whether another optimizer is still to step before the held step is complete: one with parameters of its own,
        as the inner one of a wrapper has none."""
        if self.session.held is None or self.session.paced:
            return self.session.held is not None
        live, cycle = self.optimizers.live(), self.cycle
        stepped = {*cycle.stepped, *cycle.tail}
        others = [s for s in live if s not in stepped and (s in cycle.known or not cycle.settled)]
        if not others:
            return False
        done = {id(parameter) for parameter in parameters_of([live[s] for s in stepped if s in live])}
        return any(id(parameter) not in done for parameter in parameters_of([live[s] for s in others]))

    # Optimizers

    def constructed(self, optimizer: Optimizer) -> None:
        serial = self.optimizers.serial(optimizer)
        if self.session.backwards:
            self.optimizers.made_late(serial, trained(self.models.live()))
        self.session.has_optimizers = True
        self.session.show_start()
        for action in self.when_constructed:
            action()

    def optimizer_begins(self, optimizer: Optimizer, closure: object) -> None:
        """An outermost optimizer's step begins; with a closure, forward and backward run inside it."""
        self.optimizer_calls += 1
        if self.capturing():
            self.session.warn("an optimizer step was captured into a graph; its replays are not seen")
            return
        session = self.session
        session.has_optimizers = True
        self._rehearses = not callable(closure) and self._is_rehearsal(optimizer)
        if self._rehearses:
            return
        serial = self.optimizers.serial(optimizer)
        self._fresh = self._fresh or callable(closure)
        if not session.paced:
            self._settle(serial)
        self.note_environment()
        session.show("optimizer")
        overflow = getattr(optimizer, "found_inf", None)
        if isinstance(overflow, Tensor):
            session.draft.overflows.append(Scalar("float32", None, read(overflow.detach().float())))
        if not callable(closure):
            self.capture.optimizer_steps(optimizer)
            self._take_gradients(serial, optimizer)

    def _settle(self, serial: int) -> None:
        """This optimizer's step tells whether the held step was complete."""
        session = self.session
        together = self.cycle.settles(serial, self._fresh)
        if together:
            session.join_tail()
        elif together is False:
            self.close()
            session.held, session.tail = session.tail, None
        if self.cycle.begins(serial):
            self.close()

    def optimizer_ends(self, optimizer: Optimizer, closure: object) -> None:
        """An outermost optimizer's step ended: perhaps a training step has."""
        if self.capturing():
            return
        if self._rehearses:
            self._rehearses = False
            return
        serial = self.optimizers.serial(optimizer)
        if callable(closure):
            self.capture.optimizer_steps(optimizer)
            self._take_gradients(serial, optimizer)
        for action in self.when_stepped:
            action()
        self._ends(serial, optimizer)

    def skipped(self, optimizer: Optimizer) -> None:
        """A gradient scaler found an overflow and did not call the optimizer."""
        self.optimizer_begins(optimizer, None)
        self.session.draft.skipped = True
        self._ends(self.optimizers.serial(optimizer), optimizer)

    def _is_rehearsal(self, optimizer: Optimizer) -> bool:
        session = self.session
        draft = session.draft
        if draft.begun() or draft.backwards or draft.grad_losses or draft.resting_batches:
            return False
        first = self._environment_due and session.held is None
        with torch.no_grad(), no_dispatch_modes():
            return is_rehearsal(optimizer, sys._getframe(1), first=first)

    def _ends(self, serial: int, optimizer: Optimizer) -> None:
        session = self.session
        complete = self.cycle.ends(serial, self.optimizers.serials(), self._fresh)
        self._fresh = False
        # Until the cycle is complete the step is held: if the same optimizer comes again, it ended here.
        held = session.tail if self.cycle.tail else session.held
        if held is None:
            held = session.draft
        else:
            held.absorb(session.draft)
        if self.cycle.tail:
            session.tail = held
        else:
            session.held = held
        session.draft = Draft()
        if session.state_due(session.closed + 1) and not session.paced:
            started = time.thread_time()
            self.take_state(held, optimizer)
            session.charge("state", started)
        if complete and not self.cycle.settled and self._more_to_step(optimizer):
            complete = False
        if complete and not session.paced:
            self.close()
            session.show("between")

    def _more_to_step(self, optimizer: Optimizer) -> bool:
        """Whether the only optimizer there is leaves parameters of the model alone that have a gradient: others may be
        made in this very step, as in programs that make one for each parameter that they meet."""
        own = {id(parameter) for parameter in parameters_of([optimizer])}
        return any(p.grad is not None and id(p) not in own for p in trained(self.models.live()) if p.requires_grad)

    def close(self) -> None:
        """The held step is complete."""
        self.cycle.closed()
        with self.session.lock:
            self.session.close_held()

    # What is read

    def _take_gradients(self, serial: int, optimizer: Optimizer) -> None:
        session = self.session
        before_clip = self._before_clip.pop(serial, None)
        if self.state_may_be_due():
            session.draft.add_gradients(before_clip or self._gradients(optimizer), self.optimizers.place(serial))
        if serial in self._clipped:
            self._clipped.discard(serial)
        elif "grad_norm" not in session.told_by_adapter:
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
            session.draft.own_norms += gradient_norm(gradients)

    def _gradients(self, optimizer: Optimizer) -> Digest:
        started = time.thread_time()
        digest = gradients_digest(parameters_of([optimizer]))
        self.session.charge("state", started)
        return digest

    def state_may_be_due(self) -> bool:
        """Whether a state digest may be wanted of the step that is going on."""
        # While a step is held, what happens may still be a part of it.
        session = self.session
        return session.state_due(session.closed + 1) or (
            session.held is not None and session.state_due(session.closed + 2)
        )

    def take_state(self, held: Draft, optimizer: Optimizer | None = None) -> None:
        """The state at the end of the held step; optimizer: the last that stepped, None if none did."""
        live = self.optimizers.live()
        last = list(live.values()) if optimizer is None else [optimizer]
        known = [live[serial] for serial in self.optimizers.in_order(self.cycle.known) if serial in live]
        stepped = [live[s] for s in self.optimizers.in_order(self.cycle.stepped + self.cycle.tail) if s in live]
        self.note_state(
            held,
            tensors_digest(_each_once(known or last)),
            optimizer_digest(with_inner(stepped or known or last, live.values())),
        )

    def note_state(self, held: Draft, parameters: Digest, optimizer: Digest) -> None:
        """What the held step left behind."""
        held.end_state = {"parameters": parameters, "optimizer": optimizer}
        buffers = buffers_digest(self.models.live())
        if buffers is not None:
            held.end_state["buffers"] = buffers
        held.rng = self.session.streams.rolled_up()

    def note_environment(self) -> None:
        """Write what this process sees, before its first step changes the parameters."""
        if not self._environment_due:
            return
        self._environment_due = False
        started = time.thread_time()
        parameters = parameters_of(self.optimizers.live().values()) or trained(self.models.live())
        digest = tensors_digest(parameters)
        self.session.charge("state", started)
        self.session.write_environment({"parameters": digest}, self.models.live())

    def capturing(self) -> bool:
        """Is a device graph being captured? What the recorder did then would become a part of the graph."""
        if not self._has_graphs:
            return False
        cuda: Any = torch.cuda
        return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())


def _unhooked(_tensors: object) -> AbstractContextManager[None]:
    return nullcontext()


def _no_save(_path: str | None, _writer: str) -> AbstractContextManager[None]:
    return nullcontext()


def _each_once(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    return list({id(tensor): tensor for optimizer in optimizers for tensor in all_of(optimizer)}.values())


def _each(tensors: Tensor | Sequence[Tensor] | None) -> tuple[Tensor, ...]:
    return (tensors,) if isinstance(tensors, Tensor) else tuple(tensors or ())
