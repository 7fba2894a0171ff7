"""Records each call of a module: what went in and came out, and in the backward pass the gradient that arrived at its
outputs and those that it passed on.

The gradients are read by hooks on tensors and on nodes that are there anyway. torch's backward hooks of modules are not
used: they put nodes of their own into the graph, and the order in which gradients are added up may then change.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from detrun.recorder.trace.leaves import keep_begin, keep_end, leaves_of, tensors_of

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from detrun.recorder.trace.tracer import Draft, Tracer

_sequence: Callable[[], int] = vars(torch.autograd)["_get_sequence_nr"]
_MOST_NODES = 20_000
_NO_ORDER = 1 << 62
"""Nodes that add gradients up in a leaf have the highest number there is."""


@dataclass
class Modules:
    """`open` and `close` with the window, after the hooks that follow the module scope. Never raises into the
    program."""

    tracer: Tracer
    _handles: list[RemovableHandle] = field(default_factory=list)
    _calls: threading.local = field(default_factory=threading.local)

    def open(self) -> None:
        self._handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, always_call=False),
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        tracer = self.tracer
        if is_dynamo_compiling() or not tracer.active:
            return
        try:
            tensors, scalars = leaves_of(args, _keywords())
            draft = tracer.begin("module", "module", tensors, scalars=scalars)
            if draft is not None:
                keep_begin(tracer, draft, tensors)
            entry = (module, draft, _sequence(), [t.grad_fn for t in tensors if t.requires_grad])
            self._stack().append(entry)
        except Exception as error:  # noqa: BLE001 - the program's run is worth more than its record
            tracer.fail(error)

    def _after(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        tracer = self.tracer
        if is_dynamo_compiling() or not tracer.active:
            return
        try:
            stack = self._stack()
            while stack:  # calls that ended by an exception lie above
                begun, draft, first, entries = stack.pop()
                if begun is module:
                    break
            else:
                return  # the window opened inside this call
            if draft is None:
                return
            outputs = tensors_of(output)
            tracer.end(draft, outputs)
            keep_end(tracer, draft, outputs)
            if torch.is_grad_enabled():
                self._watch(draft, outputs, first, entries)
        except Exception as error:  # noqa: BLE001 - as above
            tracer.fail(error)

    def _stack(self) -> list[Any]:
        stack: list[Any] | None = getattr(self._calls, "stack", None)
        if stack is None:
            stack = self._calls.stack = []
        return stack

    # The backward pass

    def _watch(self, forward: Draft, outputs: list[Tensor], first: int, entries: list[Any]) -> None:
        arriving = [tensor for tensor in outputs if tensor.requires_grad and tensor.grad_fn is not None]
        if not arriving:
            return
        given = {id(node) for node in entries}
        passed = {at for at, tensor in enumerate(arriving) if id(tensor.grad_fn) in given}
        leaving = _boundary([tensor.grad_fn for tensor in arriving], first, given)
        passage = _Passage(self.tracer, forward.scope, forward.microbatch, len(arriving), len(leaving), passed)
        tensor: Any
        for at, tensor in enumerate(arriving):
            tensor.register_hook(passage.arrives(at))
        for at, (node, edges) in enumerate(leaving):
            node.register_hook(passage.leaves(at, edges))


@dataclass
class _Passage:
    """The backward pass through one call of a module: an event from the first gradient that arrives to the last that
    leaves. Gradients are held where several must be there first."""

    tracer: Tracer
    scope: str
    microbatch: int
    expected: int
    leaving: int
    passed: set[int]
    """Outputs that are inputs given back: their gradients leave as they arrive."""
    draft: Draft | None = None
    _arrived: dict[int, Tensor] = field(default_factory=dict)
    _left: dict[int, list[Tensor]] = field(default_factory=dict)

    def arrives(self, at: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            if not self.tracer.active:
                return
            try:
                self._arrived[at] = gradient
                if len(self._arrived) == self.expected:
                    self._left.update((-1 - at, [self._arrived[at]]) for at in self.passed)
                    self._begin()
                    if not self.leaving:
                        self._end()
            except Exception as error:  # noqa: BLE001 - as above
                self.tracer.fail(error)

        return hook

    def leaves(self, at: int, edges: list[int]) -> Callable[[Any, Any], None]:
        def hook(gradients: tuple[Tensor | None, ...], _arriving: Any) -> None:
            if not self.tracer.active:
                return
            try:
                if self._arrived:  # an output that got no gradient
                    self._begin()
                self._left[at] = [
                    g for g in (gradients[edge] for edge in edges if edge < len(gradients)) if g is not None
                ]
                if sum(at >= 0 for at in self._left) == self.leaving:
                    self._end()
            except Exception as error:  # noqa: BLE001 - as above
                self.tracer.fail(error)

        return hook

    def _begin(self) -> None:
        gradients = [self._arrived[at] for at in sorted(self._arrived)]
        self._arrived.clear()
        self.draft = self.tracer.begin(
            "module", "module", gradients, phase="backward", scope=self.scope, microbatch=self.microbatch
        )
        if self.draft is not None:
            keep_begin(self.tracer, self.draft, gradients)

    def _end(self) -> None:
        draft, self.draft = self.draft, None
        gradients = [gradient for at in sorted(self._left) for gradient in self._left[at]]
        self._left.clear()
        if draft is not None:
            self.tracer.end(draft, gradients)
            keep_end(self.tracer, draft, gradients)


def _boundary(outputs: list[Any], first: int, given: set[int]) -> list[tuple[Any, list[int]]]:
    """The nodes of a call whose gradients leave it, and at which places: those with an edge to a node that is older
    than the call (its number is below `first`) or made what went in (`given`, by identity)."""
    seen: set[int] = set()
    alive: list[Any] = []  # an id is worth nothing once its object is gone
    found: list[tuple[Any, list[int]]] = []

    def is_outside(node: Any) -> bool:
        return id(node) in given or node._sequence_nr() < first

    waiting = [node for node in outputs if not is_outside(node)]
    while waiting and len(alive) < _MOST_NODES:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        alive.append(node)
        edges: list[int] = []
        for at, (following, _) in enumerate(node.next_functions):
            if following is None or following._sequence_nr() >= _NO_ORDER:
                continue
            alive.append(following)
            if is_outside(following):
                edges.append(at)
            else:
                waiting.append(following)
        if edges:
            found.append((node, edges))
    return found


def _keywords() -> dict[str, Any]:
    """The keyword arguments of the module call that a global forward pre-hook is called for, which torch does not hand
    to it: they stand in the frame that calls the hook."""
    keywords = sys._getframe(2).f_locals.get("kwargs")
    return keywords if isinstance(keywords, dict) else {}
