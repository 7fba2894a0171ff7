"""Captures the whole training state at boundaries: at a save, and at the first forward after it.

A boundary is reached by an uninterrupted run and by a resumed one at the same place of the program, so that what was
restored can be held against what was there. At a begin, a batch has been drawn and nothing computed from it. What
programs still change from there on is captured when it is used: gradients, which they clear, when the first backward
pass begins, and hyper-parameters, which they set, when the first optimizer steps.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from detrun.fingerprint.tensors import no_dispatch_modes
from detrun.recorder import components, live, streams, tracking
from detrun.recorder.components import Live, Names, Piece
from detrun.recorder.draft import Digest
from detrun.recorder.optimizers import Optimizers
from detrun.recorder.roots import find_roots, names_of_free
from detrun.recorder.rows import Rows
from detrun.recorder.session import Session
from detrun.records.state_row import Component
from detrun.records.state_writer import StateWriter

Position = tuple[int, int]

LIGHT: frozenset[Component] = frozenset({"module-state", "ema", "rng", "local", "tracked"})
"""What is looked at again one step after a begin: pieces that a step may make anew."""

NO_PYARROW = "state capture needs pyarrow in the training's environment"


@dataclass
class _Open:
    """A boundary whose file is not complete. parameters: whose gradients are still to come, by name. stale: which of
    them had one when the first backward pass began, and may yet lose it before anything uses it. left: those gradients,
    with their version, as long as no backward pass has added to them."""

    writer: StateWriter
    rows: Rows
    step: int
    microbatch: int
    scope: Literal["full", "light"]
    closed: int
    seconds: float = 0.0
    parameters: list[tuple[str, weakref.ref[Tensor]]] = field(default_factory=list)
    stale: dict[str, weakref.ref[Tensor]] = field(default_factory=dict)
    left: dict[str, tuple[weakref.ref[Tensor], int]] = field(default_factory=dict)
    missing: list[Component] = field(default_factory=list)
    fingerprint: tuple[int, int, tuple[int, ...]] = (0, 0, ())


class Capture:
    """The state files of this process. Every method but `finish` is called through `Session.run`.

    schedulers, scalers: those that exist.
    """

    def __init__(
        self,
        session: Session,
        optimizers: Optimizers,
        seen_roots: Callable[[], list[nn.Module]],
        step_is_open: Callable[[], bool],
    ) -> None:
        self.session = session
        self.schedulers: Live[LRScheduler] = Live()
        self.scalers: Live[Any] = Live()
        self.namers: list[Callable[[], Mapping[int, str | Sequence[Piece]]]] = []
        """What adapters know of the names of tensors that only optimizers have."""
        self._optimizers = optimizers
        self._seen_roots = seen_roots
        self._step_is_open = step_is_open
        self._steps = session.settings.state_at or frozenset()
        self._off = session.settings.state_at is None
        self._resumed = session.settings.attempt > 0
        self._first_step = session.closed + 1 if self._resumed else 0
        self._ended: Position | None = None
        self._begun: Position | None = None
        self._light_from: int | None = None
        self._open: _Open | None = None
        self._thread: int | None = None

    # The moments

    def save_begins(self, frame: FrameType) -> None:
        """The program begins to save: the state as the checkpoint should have it, once a position."""
        position = self.session.position()
        if self._off or self._ended == position or not self.is_training_thread():
            return
        self._ended = position
        step, microbatch = position
        boundary = self._start("end", step, microbatch, "full")
        if boundary is not None:
            with self._moment(boundary):
                names = self._add_all(boundary, frame, None)
                components.add_gradients(boundary.rows, names.parameters, self.session.warn)
                components.add_hyperparameters(boundary.rows, self._live_optimizers(), self.session.warn)
            self._complete(boundary)

    def forward_begins(self, frame: FrameType, batch: Digest | None) -> bool:
        """The root module was called, or, in a program without one, a backward pass begins. Returns whether what was
        called before turns out to have been a trial before all parameters were loaded."""
        self._thread = threading.get_ident()
        if self._off:
            return False
        position = self.session.position()
        if self._open is not None and self._open.closed != self.session.closed:
            self.finish()
        held = self._open
        if held is not None and held.parameters and held.fingerprint != self._fingerprint(held):
            # What was called before was no training yet, but perhaps a trial before a checkpoint was loaded.
            held.writer.discard()
            self._open = None
            now = self._fingerprint(held)
            self._begin(frame, position, batch)
            return position[0] + 1 == self._first_step and now[1] - held.fingerprint[1] >= now[0]
        if self._is_full_due(position):
            self._begin(frame, position, batch)
        elif self._light_from is not None and position[0] >= self._light_from and not self._step_is_open():
            self._light_from = None
            boundary = self._start("begin", position[0] + 1, position[1], "light")
            if boundary is not None:
                with self._moment(boundary):
                    self._add_live(boundary.rows, frame, self._names(frame), light=True)
                self._complete(boundary)
        return False

    def backward_begins(self, frame: FrameType, batch: Digest | None, forward_seen: bool) -> None:
        """An outermost backward pass begins: gradients that were to be cleared have been."""
        if not forward_seen:
            self.forward_begins(frame, batch)
        held = self._open
        if held is not None and held.parameters:
            with self._moment(held):
                parameters, held.parameters = held.parameters, []
                held.missing.remove("gradients")
                alive = {name: tensor for name, reference in parameters if (tensor := reference()) is not None}
                left = components.add_gradients(held.rows, alive, self.session.warn)
                held.stale = {name: weakref.ref(alive[name]) for name in left}
                held.left = {
                    name: (weakref.ref(gradient), gradient._version)
                    for name in left
                    if (gradient := alive[name].grad) is not None
                }
        elif held is not None and held.stale:
            with self._moment(held):
                for name, reference in list(held.stale.items()):
                    if held.rows.cleared("gradients", name, getattr(reference(), "grad", None)):
                        del held.stale[name]

    @property
    def minds_gradients(self) -> bool:
        """Whether it matters what the backward pass under way adds to."""
        return self._open is not None and bool(self._open.left)

    def backward_ends(self) -> None:
        """The first outermost backward pass ended: a gradient that it added to was used, whatever becomes of it."""
        held = self._open
        if held is None:
            return
        for name, (gradient, version) in list(held.left.items()):
            parameter = held.stale.get(name)
            now = getattr(parameter() if parameter else None, "grad", None)
            if not isinstance(now, Tensor) or now is not gradient() or now._version != version:
                del held.left[name]

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """An optimizer begins to step, or ends if forward and backward ran inside it. The boundary is complete once
        nobody can clear a gradient any more that was left over."""
        self._thread = threading.get_ident()
        held = self._open
        if held is None:
            return
        if "hyperparameters" in held.missing:
            with self._moment(held):
                held.missing.remove("hyperparameters")
                components.add_hyperparameters(held.rows, self._live_optimizers(), self.session.warn)
        for name, reference in held.stale.items():
            gradient = getattr(reference(), "grad", None)
            if gradient is not None and name in held.left and held.left[name][0]() is not gradient:
                held.rows.cleared("gradients", name, None)  # another took its place, as in copies at full precision
        used = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        held.stale = {name: reference for name, reference in held.stale.items() if id(reference()) not in used}
        if not held.stale:
            self.finish()

    def finish(self) -> None:
        """Write what is there of a boundary: it is over, or the process is about to end."""
        held, self._open = self._open, None
        if held is not None:
            self._complete(held)

    def is_training_thread(self) -> bool:
        """Whether this thread is the one that trains; another's saves tell nothing about where training is."""
        mine = threading.get_ident()
        return mine == (self._thread if self._thread is not None else threading.main_thread().ident)

    # What is due

    def _is_full_due(self, position: Position) -> bool:
        if position == self._begun:
            return False
        if self._resumed or position == self._ended:
            return True
        return position[1] == 0 and position[0] in self._steps and not self._step_is_open()

    def _begin(self, frame: FrameType, position: Position, batch: Digest | None) -> None:
        self._begun, self._resumed = position, False
        self._light_from = position[0] + 1
        boundary = self._start("begin", position[0] + 1, position[1], "full")
        if boundary is None:
            return
        with self._moment(boundary):
            names = self._add_all(boundary, frame, batch)
            boundary.parameters = [(name, weakref.ref(tensor)) for name, tensor in names.parameters.items()]
            boundary.missing = ["gradients"]
            if self._optimizers.serials():
                boundary.missing.append("hyperparameters")
            boundary.fingerprint = self._fingerprint(boundary)
        self._open = boundary

    def _fingerprint(self, held: _Open) -> tuple[int, int, tuple[int, ...]]:
        """Changes when the program writes to parameters in place, replaces them, or makes an optimizer."""
        alive = [tensor for _, reference in held.parameters if (tensor := reference()) is not None]
        try:
            versions = sum(tensor._version for tensor in alive)
        except RuntimeError:  # tensors made in inference mode count nothing
            versions = 0
        return len(alive), versions, tuple(sorted(self._optimizers.serials()))

    # Rows

    def _add_all(self, boundary: _Open, frame: FrameType, batch: Digest | None) -> Names:
        """Everything but gradients and hyper-parameters."""
        rows, warn = boundary.rows, self.session.warn
        optimizers = self._live_optimizers()
        names = self._names(frame)
        components.add_parameters(rows, names, warn)
        components.add_buffers(rows, names, warn)
        components.add_optimizers(rows, names, optimizers, warn)
        components.add_schedulers(rows, self.schedulers.all(), warn)
        components.add_scalers(rows, self.scalers.all(), warn)
        for row, raw in streams.global_rows(self.session.streams):
            rows.row(row, raw)
        if batch is not None:
            rows.digest("batch", "batch", batch)
        self._add_live(rows, frame, names, light=False)
        return names

    def _add_live(self, rows: Rows, frame: FrameType, names: Names, *, light: bool) -> None:
        known = components.captured_ids(names, self._live_optimizers())
        warn = self.session.warn
        for found in [*live.find(frame, names.roots, known, warn=warn), *tracking.tracked(warn)]:
            if light and found.component not in LIGHT:
                continue
            if found.component == "rng":
                made = streams.generator_row(found.name, found.value, found.standing)
                if made is not None:
                    rows.row(*made)
            else:
                rows.value(found.component, found.name, found.value, found.standing)

    def _names(self, frame: FrameType) -> Names:
        optimizers, seen = self._live_optimizers(), self._seen_roots()
        free: dict[int, str | Sequence[Piece]] = {}
        try:
            roots = find_roots(frame, seen, optimizers)
            free.update(names_of_free(frame, roots, optimizers))
        except Exception as error:  # noqa: BLE001 - the program's objects may raise anything
            self.session.warn(f"modules are not looked for: {type(error).__name__}: {error}")
            roots = [("", seen[0])] if len(seen) == 1 else [(f"module{n}", root) for n, root in enumerate(seen)]
        for namer in self.namers:
            try:
                free.update(namer())
            except Exception as error:  # noqa: BLE001 - as above
                self.session.warn(f"names of an optimizer's tensors: {type(error).__name__}: {error}")
        return Names(roots, optimizers, free)

    def _live_optimizers(self) -> Sequence[Optimizer]:
        return list(self._optimizers.live().values())

    # Files

    @contextmanager
    def _moment(self, boundary: _Open) -> Iterator[None]:
        """One moment of a boundary: its time is the boundary's, no tracer of the program's sees it, and no file stays
        open behind it."""
        started = time.thread_time()
        try:
            with torch.no_grad(), no_dispatch_modes(), torch._C.DisableTorchFunction():
                yield
                boundary.rows.rest()
            boundary.writer.rest()
        except BaseException:
            boundary.writer.discard()
            raise
        finally:
            boundary.seconds += time.thread_time() - started
            self.session.charge("capture", started)

    def _start(self, kind: str, step: int, microbatch: int, scope: Literal["full", "light"]) -> _Open | None:
        name = f"{kind}-{step:08d}" + (f".{microbatch}" if microbatch else "")
        session, started = self.session, time.thread_time()
        try:
            writer = StateWriter(session.attempt, name, session.rank())
        except ImportError:
            self._off = True
            session.warn(NO_PYARROW)
            return None
        finally:
            session.charge("capture", started)  # the first one imports pyarrow
        return _Open(
            writer, Rows(writer.keep, session.settings.state_bytes), step, microbatch, scope, closed=session.closed
        )

    def _complete(self, boundary: _Open) -> None:
        def write() -> None:
            started = time.thread_time()
            boundary.writer.write(
                boundary.rows.finished(),
                step=boundary.step,
                microbatch=boundary.microbatch,
                scope=boundary.scope,
                cpu_seconds=boundary.seconds,
                missing=boundary.missing,
            )
            self.session.charge("capture", started)

        self.session.write_later(boundary.rows.waits_for(), write)
