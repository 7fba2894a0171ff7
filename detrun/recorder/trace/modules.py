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
_Edge = tuple[Any, int, Any]
"""From a node, at which of its places, to which node."""

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
            entries = [tensor.grad_fn for tensor in tensors if tensor.requires_grad]
            self._stack().append(_Call(module, draft, _sequence(), entries))
        except Exception as error:  # noqa: BLE001 - the program's run is worth more than its record
            tracer.fail(error)

    def _after(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        tracer = self.tracer
        if is_dynamo_compiling() or not tracer.active:
            return
        try:
            stack = self._stack()
            while stack:  # calls that ended by an exception lie above
                call = stack.pop()
                if call.module is module:
                    break
            else:
                return  # the window opened inside this call
            draft = call.draft
            if draft is None:
                return
            outputs = tensors_of(output)
            tracer.end(draft, outputs)
            keep_end(tracer, draft, outputs)
            if torch.is_grad_enabled():
                self._watch(draft, outputs, call, stack[-1] if stack else None)
        except Exception as error:  # noqa: BLE001 - as above
            tracer.fail(error)

    def _stack(self) -> list[_Call]:
        stack: list[_Call] | None = getattr(self._calls, "stack", None)
        if stack is None:
            stack = self._calls.stack = []
        return stack

    # The backward pass

    def _watch(self, forward: Draft, outputs: list[Tensor], call: _Call, caller: _Call | None) -> None:
        arriving = [tensor for tensor in outputs if tensor.requires_grad and tensor.grad_fn is not None]
        if not arriving:
            return
        given = {id(node) for node in call.entries}
        last = [tensor.grad_fn for tensor in arriving]
        passed = {at for at, node in enumerate(last) if id(node) in given}
        edges = _boundary(last, call, given)
        if caller is not None:
            caller.inner.update((id(node), (node, edges)) for node in last)
        leaving: dict[int, tuple[Any, list[int]]] = {}
        for node, at, _ in edges:
            leaving.setdefault(id(node), (node, []))[1].append(at)
        passage = _Passage(self.tracer, forward.scope, forward.microbatch, len(arriving), len(leaving), passed)
        tensor: Any
        for at, tensor in enumerate(arriving):
            tensor.register_hook(passage.arrives(at))
        for at, (node, places) in enumerate(leaving.values()):
            node.register_hook(passage.leaves(at, places))


@dataclass
class _Call:
    """A call of a module that has not returned. first: the number that the next node of the graph got when it began.
    entries: the nodes that made what went in. inner: of the calls inside of it, by the nodes of what they returned,
    the edges that lead out of them: what is between is not looked at again."""

    module: nn.Module
    draft: Draft | None
    first: int
    entries: list[Any]
    inner: dict[int, tuple[Any, list[_Edge]]] = field(default_factory=dict)


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


def _boundary(outputs: list[Any], call: _Call, given: set[int]) -> list[_Edge]:
    """The edges by which gradients leave a call: those to a node that is older than the call or made what went in
    (`given`, by identity)."""
    first, inner = call.first, call.inner
    seen: set[int] = set()
    alive: list[Any] = []  # an id is worth nothing once its object is gone
    found: list[_Edge] = []
    waiting = [node for node in outputs if id(node) not in given and node._sequence_nr() >= first]
    while waiting and len(alive) < _MOST_NODES:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        alive.append(node)
        known = inner.get(id(node))
        if known is None:
            edges = [(node, at, following) for at, (following, _) in enumerate(node.next_functions)]
        else:
            edges = known[1]
        for edge in edges:
            following = edge[2]
            if following is None:
                continue
            number = following._sequence_nr()
            if number >= _NO_ORDER:
                continue
            alive.append(following)
            if number < first or id(following) in given:
                found.append(edge)
            else:
                waiting.append(following)
    return list({(id(edge[0]), edge[1]): edge for edge in found}.values())


def _keywords() -> dict[str, Any]:
    """The keyword arguments of the module call that a global forward pre-hook is called for, which torch does not hand
    to it: they stand in the frame that calls the hook."""
    keywords = sys._getframe(2).f_locals.get("kwargs")
    return keywords if isinstance(keywords, dict) else {}
