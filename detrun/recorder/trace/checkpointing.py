"""Activation checkpointing: says that what runs again is a recomputation, and of which forward pass.

A checkpointed function runs once in the forward pass and again in the backward pass. The second run stands under the
micro-batch and the module of the first one, in the phase `recompute`, so that each of its events has the one of the
forward pass beside it. At the levels without operators both runs are events themselves: the function's arguments, and
what the backward pass will use of it: its results, or where torch stops the second run early, the tensors that autograd
saves.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from detrun.recorder.trace.leaves import keep_begin, keep_end, leaves_of, tensors_of

if TYPE_CHECKING:
    from detrun.recorder.trace.scopes import Place
    from detrun.recorder.trace.tracer import Draft, Tracer

_OPTIONS = 5
"""Arguments of torch's generator between the function and the function's own arguments."""


@dataclass
class Checkpointing:
    """`install` once; while no window is open the wrappers lead straight to torch's own functions. A function that ran
    before the window opened is recomputed without a mark. Never raises into the program. own_events: whether both runs
    are events."""

    tracer: Tracer
    own_events: bool
    _local: threading.local = field(default_factory=threading.local)

    def install(self) -> None:
        self._wrap_reentrant()
        names = ("_checkpoint_without_reentrant_generator", "_checkpoint_hook", "_recomputation_hook")
        if all(hasattr(torch.utils.checkpoint, name) for name in names):
            self._wrap_generator(names[0])
            self._wrap_saved(torch.utils.checkpoint._checkpoint_hook, "begun")
            self._wrap_saved(torch.utils.checkpoint._recomputation_hook, "running")
        else:
            self.tracer.not_captured("recomputation of checkpoints that are not reentrant: this torch has another way")

    def _wrap_reentrant(self) -> None:
        function: Any = torch.utils.checkpoint.CheckpointFunction
        original = function.forward
        tracer = self.tracer

        @functools.wraps(original)
        def forward(ctx: Any, run_function: Callable[..., Any], preserve: Any, *args: Any) -> Any:
            if not tracer.active or is_dynamo_compiling():
                return original(ctx, run_function, preserve, *args)
            region = _Region(self, run_function, saves=False)

            def run(*given: Any) -> Any:
                if region.ran:
                    return region(*given)
                region.ran = True
                region.draft = region.begin(given, {})
                result = run_function(*given)
                region.end(result)
                return result

            return original(ctx, run, preserve, *args)

        function.forward = staticmethod(forward)

    def _wrap_generator(self, name: str) -> None:
        """The other kind: a generator stands still while its caller runs the function, and calls it again later."""
        original: Any = getattr(torch.utils.checkpoint, name)
        tracer, local = self.tracer, self._local

        @functools.wraps(original)
        def generator(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not tracer.active or is_dynamo_compiling():
                return original(fn, *args, **kwargs)
            region = _Region(self, fn, saves=True)
            if torch.is_grad_enabled():
                region.draft = region.begin(args[_OPTIONS:], kwargs)
                local.begun = region  # for the hook that the generator makes when it starts, on this thread
            return original(region, *args, **kwargs)

        for module in list(sys.modules.values()):
            namespace = getattr(module, "__dict__", None)
            if isinstance(namespace, dict) and namespace.get(name) is original:
                setattr(module, name, generator)

    def _wrap_saved(self, hook: Any, state: str) -> None:
        """Look at what autograd saves inside of a region. torch's own hook gets it, and gives what it gave."""
        original_init, original_exit = hook.__init__, hook.__exit__
        local = self._local

        @functools.wraps(original_init)
        def init(this: Any, *args: Any, **kwargs: Any) -> None:
            original_init(this, *args, **kwargs)
            region = getattr(local, "begun", None) if state == "begun" else None
            if region is not None:
                local.begun = None
                this._detrun_region = region
            pack = this.pack_hook

            def pack_hook(tensor: Tensor) -> Any:
                current = region if state == "begun" else getattr(local, "running", None)
                if current is not None:
                    current.saved(tensor)
                return pack(tensor)

            this.pack_hook = pack_hook

        @functools.wraps(original_exit)
        def leave(this: Any, *args: Any) -> Any:
            region = this.__dict__.pop("_detrun_region", None)
            if region is not None:
                region.end(None)
            return original_exit(this, *args)

        hook.__init__, hook.__exit__ = init, leave


@dataclass(eq=False)
class _Region:
    """A checkpointed function, in the place of which it is called again in the backward pass. saves: its outputs are
    what autograd saves inside of it, not what it returns."""

    owner: Checkpointing
    function: Callable[..., Any]
    saves: bool
    place: Place = field(init=False)
    draft: Draft | None = None
    ran: bool = False

    def __post_init__(self) -> None:
        self.place = self.owner.tracer.scopes.here()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The recomputation."""
        tracer, local = self.owner.tracer, self.owner._local
        if not tracer.active:
            return self.function(*args, **kwargs)
        outer = getattr(local, "running", None)
        tracer.scopes.push("recompute", self.place[1], self.place[2])
        result: Any = None
        try:
            self.draft = self.begin(args, kwargs)
            local.running = self
            result = self.function(*args, **kwargs)
            return result
        finally:
            local.running = outer
            tracer.scopes.leave()
            self.end(result)

    def begin(self, args: Any, kwargs: Any) -> Draft | None:
        """The function is about to run, for the first time or again."""
        if not self.owner.own_events:
            return None
        tracer = self.owner.tracer
        try:
            tensors, scalars = leaves_of(args, kwargs)
            draft = tracer.begin("recompute", "checkpoint", tensors, scalars=scalars)
            if draft is not None:
                keep_begin(tracer, draft, tensors)
            return draft
        except Exception as error:  # noqa: BLE001 - the program's run is worth more than its record
            tracer.fail(error)
            return None

    def saved(self, tensor: Tensor) -> None:
        """Autograd saves this."""
        if self.draft is not None and self.saves:
            self.owner.tracer.read(self.draft, tensor)

    def end(self, result: Any) -> None:
        """The run ended, or was stopped since all that will be used is there."""
        draft, self.draft = self.draft, None
        if draft is not None:
            outputs = [] if self.saves else tensors_of(result)
            self.owner.tracer.end(draft, outputs)
            keep_end(self.owner.tracer, draft, outputs)
