"""What goes into a step and what comes out of it, without a dispatch mode: batches, and the optimizers' parameters.

Down to the operators a trace shows writes between its events only where something reads what was written. These events
read every parameter once a step, so that such a write is seen in the step in which it happened.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from detrun.fingerprint.tensors import PLAIN
from detrun.recorder.trace.leaves import keep_begin, keep_end, leaves_of, tensors_of

if TYPE_CHECKING:
    from detrun.recorder.trace.tracer import Draft, Tracer

OPERATORS = 4
"""The level from which on the optimizer's own operators are seen, and only its results are read here."""


@dataclass
class Steps:
    """The events of batches and optimizers.

    `install` once, before the hooks that close the step. Its own return at once while no window is open. Never raises
    into the program.
    """

    tracer: Tracer
    _open: list[tuple[Draft, Tensor, Optimizer]] = field(default_factory=list)

    def install(self) -> None:
        register_optimizer_step_pre_hook(self._before)
        handle = register_optimizer_step_post_hook(self._after)
        # Before the hook that closes the step: an arm may be ended there, and this belongs to the step.
        hooks: Any = _global_optimizer_post_hooks
        hooks.move_to_end(handle.id, last=False)

    def open(self, optimizers: Iterable[Optimizer], roots: Iterable[nn.Module]) -> None:
        """The window opens: what is there, so that of a tensor that was changed unseen it is known when it was still
        as it should be. One event a parameter, with its optimizer's state, and one a buffer."""
        tracer = self.tracer
        if tracer.settings.level < OPERATORS:
            return
        try:
            names: dict[int, str] = {}
            seen: set[int] = set()
            held: list[tuple[Tensor, list[Tensor]]] = []
            for root in roots:
                for module in root.modules():
                    scope = tracer.scopes.name(module)
                    for own, tensor in (*module._parameters.items(), *module._buffers.items()):
                        if tensor is not None:
                            names.setdefault(id(tensor), f"{scope}.{own}" if scope else own)
                            held.append((tensor, [tensor]))
            states = [
                (parameter, [parameter, *tensors_of(optimizer.state.get(parameter))])
                for optimizer in optimizers
                for parameter in _parameters(optimizer)
            ]
            for tensor, tensors in (*states, *held):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    # Not `begin`, which ignores what happens while the recorder works, as it does here.
                    place = ("between", names.get(id(tensor), ""), 0)
                    draft = tracer.begin_at(place, "parameter", "state", [], "", [])
                    if draft is not None:
                        tracer.end(draft, tensors)
        except Exception as error:  # noqa: BLE001 - as below
            tracer.fail(error)

    def close(self) -> None:
        """The window closes."""
        self._open.clear()

    def batch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A root module is about to be called with these arguments. What a gradient goes back through was computed, and
        is no data."""
        tracer = self.tracer
        if not tracer.active:
            return
        try:
            given, scalars = leaves_of(args, kwargs)
            tensors = [tensor for tensor in given if tensor.grad_fn is None]
            draft = tracer.begin("batch", "batch", tensors, phase="forward", scope="", scalars=scalars)
            if draft is not None:
                keep_begin(tracer, draft, tensors)
                tracer.end(draft, [])
                keep_end(tracer, draft, [])
        except Exception as error:  # noqa: BLE001 - the program's run is worth more than its record
            tracer.fail(error)

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
        tracer = self.tracer
        if not tracer.active:
            return
        tracer.sweep()
        if tracer.settings.level >= OPERATORS or callable(_closure(args, kwargs)):
            return
        try:
            begun = {id(parameter) for _, parameter, _ in self._open}
            self._begin(
                optimizer,
                [
                    (parameter, [gradient, parameter])
                    for parameter in _parameters(optimizer)
                    if (gradient := parameter.grad) is not None and id(parameter) not in begun
                ],
            )
        except Exception as error:  # noqa: BLE001 - as above
            tracer.fail(error)

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
        tracer = self.tracer
        if not tracer.active:
            self._open.clear()
            return
        try:
            if tracer.settings.level >= OPERATORS:
                for parameter in _parameters(optimizer):
                    self._reads(parameter)
                return
            if callable(_closure(args, kwargs)):  # forward and backward ran inside: these gradients are the used ones
                gradients = [(parameter, parameter.grad) for parameter in _parameters(optimizer)]
                self._begin(optimizer, [(parameter, [grad]) for parameter, grad in gradients if grad is not None])
            mine = [entry for entry in self._open if entry[2] is optimizer]
            self._open = [entry for entry in self._open if entry[2] is not optimizer]
            for draft, parameter, _ in mine:
                outputs = [parameter, *_moments(optimizer.state.get(parameter))]
                tracer.end(draft, outputs)
                keep_end(tracer, draft, outputs)
        except Exception as error:  # noqa: BLE001 - as above
            tracer.fail(error)

    def _begin(self, optimizer: Optimizer, events: list[tuple[Tensor, list[Tensor]]]) -> None:
        """An event for each of these parameters, with its inputs."""
        tracer, op = self.tracer, type(optimizer).__name__
        if tracer.local.muted:
            return
        microbatch = tracer.scopes.here()[2]
        for parameter, inputs in events:
            place = ("optimizer", self._name(parameter), microbatch)
            draft = tracer.begin_at(place, "optimizer", op, inputs, "", ())
            if draft is not None:
                keep_begin(tracer, draft, inputs)
                self._open.append((draft, parameter, optimizer))

    def _reads(self, parameter: Tensor) -> None:
        draft = self.tracer.begin(
            "parameter", "parameters", [parameter], phase="optimizer", scope=self._name(parameter)
        )
        if draft is not None:
            keep_begin(self.tracer, draft, [parameter])
            self.tracer.end(draft, [])
            keep_end(self.tracer, draft, [])

    def _name(self, parameter: Tensor) -> str:
        return self.tracer.scopes.parameter_name(parameter)


def _parameters(optimizer: Optimizer) -> Iterable[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _moments(state: Any) -> Iterable[Tensor]:
    """The tensors of a parameter's state: nearly always a dictionary of nothing else."""
    if type(state) is dict and PLAIN.issuperset(map(type, state.values())):
        return state.values()
    return tensors_of(state)


def _closure(args: tuple[Any, ...], kwargs: dict[Any, Any]) -> object:
    return args[1] if len(args) > 1 else kwargs.get("closure")
