"""Where the program is: in which module, which phase of training, which micro-batch.

Modules are seen as they are called. An operation of a backward pass belongs to the module in which its node of the
graph was made: nodes are numbered in the order in which they are made, so it is enough to note that number whenever a
module is entered or left. A module that is called while a node of the graph is being executed is a recomputation.
"""

from __future__ import annotations

import functools
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer

from detrun.recorder.trace.leaves import tensors_of

Place = tuple[str, str, int]
"""(phase, scope, micro-batch)."""

_sequence: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
_thread = threading.get_ident
_current_node = torch._C._current_autograd_node
_NO_NUMBER = 1 << 62
"""Nodes that are never made anew, those that add to a leaf's gradient, all have a number above this."""

_PLACE = "detrun.place"
"""Under which a node of the graph says where it belongs, if its number does not."""

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Names under which a wrapper holds what it wraps: they are left out, so that arms with and without it compare."""


class _Marks:
    """On one thread: from which node number on, which scope and micro-batch nodes belong to."""

    __slots__ = ("infos", "numbers", "since")

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.infos: list[tuple[str, int]] = []
        self.since = 0

    def add(self, scope: str, microbatch: int) -> None:
        self.numbers.append(_sequence())
        self.infos.append((scope, microbatch))

    def find(self, number: int) -> tuple[str, int] | None:
        index = bisect_right(self.numbers, number) - 1
        return self.infos[index] if index >= 0 else None

    def step_begins(self) -> None:
        """Forget what is older than the last step: its graph may still be in use."""
        del self.numbers[: self.since], self.infos[: self.since]
        self.since = len(self.numbers)


class _Local(threading.local):
    def __init__(self) -> None:
        self.stack: list[Place] = []
        self.marks = _Marks()
        self.optimizers: list[tuple[Optimizer, dict[int, tuple[weakref.ref[Tensor], str]]]] = []
        self.parameter = ""
        self.last: tuple[int, tuple[str, int]] | None = None


class Scopes:
    """One object for all threads; the stack of modules is each thread's own."""

    def __init__(self) -> None:
        self.active = False
        self.names_operators = True
        """Whether operators inside an optimizer are looked at, so that it matters whose tensors are whose."""
        self.microbatch = 0
        self.root_begins: Callable[[nn.Module], None] | None = None
        """Told of every call of a module from outside any other, before it counts as a micro-batch."""
        self.batch_begins: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None
        """Told of the arguments of a call that counts as one."""
        self.thread_begins: Callable[[], None] | None = None
        """Told when another thread than the one that trains begins a part of the forward pass, and when it ends it."""
        self.thread_ends: Callable[[], None] | None = None
        self._forwards = 0
        self._trains = 0
        self._shared = False
        self._local = _Local()
        self._main = self._local.marks
        self._names: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._owners: dict[int, tuple[weakref.ref[Tensor], str, str]] = {}
        self._roots: list[tuple[weakref.ref[nn.Module], str]] = []

    # What the program does

    def step_begins(self) -> None:
        self._forwards = 0
        self._trains = threading.get_ident()
        self.microbatch = 0
        self._main.step_begins()
        if self._local.marks is not self._main:
            self._local.marks.step_begins()
        self._local.last = None

    def enter(self, module: nn.Module, counts: bool) -> None:
        """A module is called. counts: whether that is a micro-batch if it is called from outside any other."""
        local = self._local
        stack = local.stack
        node = _current_node()
        if node is None:
            if not stack and counts:
                self.microbatch = self._forwards
                self._forwards += 1
                self._main = local.marks
            place = ("forward", self.name(module), self.microbatch)
        elif stack and stack[-1][0] == "recompute":
            place = ("recompute", self.name(module), stack[-1][2])
        else:
            place = ("recompute", self.name(module), self._of_node(node)[1])
        stack.append(place)
        marks = local.marks
        marks.numbers.append(_sequence())
        marks.infos.append((place[1], place[2]))

    def leave(self) -> None:
        """The module entered last returned, or raised."""
        local = self._local
        stack = local.stack
        if stack:
            stack.pop()
            top = stack[-1] if stack else ("", "", self.microbatch)
            marks = local.marks
            marks.numbers.append(_sequence())
            marks.infos.append((top[1], top[2]))

    def push(self, phase: str, scope: str, microbatch: int) -> None:
        """What happens on this thread until `leave` belongs there: for a recomputation that is no module."""
        self._local.stack.append((phase, scope, microbatch))
        self._local.marks.add(scope, microbatch)

    def is_elsewhere(self) -> bool:
        """Whether this is another thread than the one that trains. Nothing there counts as a micro-batch: which of
        several threads comes first is chance."""
        return _thread() != self._trains

    def made_elsewhere(self, result: Any, given: Any, since: int, place: Place) -> None:
        """Another thread made `result` from `given`. Its nodes of the graph have numbers of that thread's own, from
        `since` on: they are told where they belong, unless something inside already did."""
        self._shared = True
        last = _sequence()
        seen = {tensor.grad_fn for tensor in tensors_of(given)}
        nodes = [tensor.grad_fn for tensor in tensors_of(result)]
        while nodes:
            node: Any = nodes.pop()
            if node is None or node in seen or not since <= node._sequence_nr() < last:
                continue
            seen.add(node)
            node.metadata.setdefault(_PLACE, (place[1], place[2]))
            nodes += [each for each, _ in node.next_functions]

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        local = self._local
        local.optimizers = [each for each in local.optimizers if each[0] is not optimizer]
        names: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        for group in optimizer.param_groups if self.names_operators else ():
            for parameter in group["params"]:
                owner = self._owners.get(id(parameter))
                name = owner[2] if owner is not None and owner[0]() is parameter else ""
                state = optimizer.state.get(parameter)
                values = state.values() if isinstance(state, dict) else ()
                for value in (parameter, parameter.grad, *values):
                    if isinstance(value, Tensor):
                        names[id(value)] = (weakref.ref(value), name)
        local.optimizers.append((optimizer, names))
        local.parameter = ""

    def optimizer_ends(self, optimizer: Optimizer) -> None:
        local = self._local
        local.optimizers = [each for each in local.optimizers if each[0] is not optimizer]

    # Where it is

    def here(self) -> Place:
        """Where the operation belongs that this thread is about to execute."""
        local = self._local
        stack = local.stack
        node = _current_node()
        if node is None:
            if stack:
                return stack[-1]
            if local.optimizers:
                return ("optimizer", local.parameter, self.microbatch)
            return ("between", "", self.microbatch)
        if stack and stack[-1][0] == "recompute":
            return stack[-1]
        scope, microbatch = self._of_node(node)
        return ("backward", scope, microbatch)

    def place(self, inputs: Sequence[object], replaced: Sequence[object]) -> Place:
        """The same for an operation on these tensors: inside an optimizer they tell which parameter it is about."""
        local = self._local
        stack = local.stack
        node = _current_node()
        if node is None:
            if stack:
                return stack[-1]
            if local.optimizers:
                self._note_tensors(local, inputs, replaced)
                return ("optimizer", local.parameter, self.microbatch)
            return ("between", "", self.microbatch)
        if stack and stack[-1][0] == "recompute":
            return stack[-1]
        scope, microbatch = self._of_node(node)
        return ("backward", scope, microbatch)

    def _note_tensors(self, local: _Local, *given: Sequence[object]) -> None:
        names = local.optimizers[-1][1]
        for tensors in given:
            for each in tensors:
                if isinstance(each, (list, tuple)):
                    if len(each) != 1:
                        local.parameter = ""
                        return
                    each = each[0]
                known = names.get(id(each))
                if known is not None and known[0]() is each:  # another one may have the number of one that is gone
                    local.parameter = known[1]
                    return

    def name(self, module: nn.Module) -> str:
        """The dotted name of a module, "" for the model itself."""
        known = self._names.get(id(module))
        if known is not None and known[0]() is module:
            return known[1]
        if self._local.stack:
            for reference, prefix in self._roots:  # a module that was put in since
                root = reference()
                if root is not None:
                    self._learn(root, prefix)
            known = self._names.get(id(module))
            if known is not None and known[0]() is module:
                return known[1]
            parent = self._local.stack[-1][1]
            own = type(module).__name__.lower()
            return f"{parent}.{own}" if parent else own
        return self._add_root(module)

    def parameter_name(self, tensor: Tensor) -> str:
        """The dotted name of a parameter, "" for a tensor that is none of a module that was called."""
        owner = self._owners.get(id(tensor))
        return owner[2] if owner is not None and owner[0]() is tensor else ""

    def _add_root(self, module: nn.Module) -> str:
        self._roots = [each for each in self._roots if each[0]() is not None]
        prefix = ""
        has_parameters = next(module.parameters(), None) is not None
        if not has_parameters or any(name == "" for _, name in self._roots):
            prefix = own = type(module).__name__.lower()
            count, taken = 2, {name for _, name in self._roots}
            while prefix in taken:
                prefix, count = f"{own}{count}", count + 1
        self._roots.append((weakref.ref(module), prefix))
        self._learn(module, prefix)
        return prefix

    def _learn(self, root: nn.Module, prefix: str) -> None:
        for dotted, module in root.named_modules():
            name = _joined(prefix, _plain(dotted, root))
            self._names[id(module)] = (weakref.ref(module), name)
            for own, parameter in module._parameters.items():
                if parameter is not None:
                    full = _joined(name, own)
                    self._owners[id(parameter)] = (weakref.ref(parameter), name, full)

    def _of_node(self, node: Any) -> tuple[str, int]:
        number = node._sequence_nr()
        local = self._local
        last = local.last
        if number >= _NO_NUMBER:
            variable = getattr(node, "variable", None)
            owner = self._owners.get(id(variable)) if variable is not None else None
            scope = owner[1] if owner is not None and owner[0]() is variable else ""
            return (scope, last[1][1] if last is not None else self.microbatch)
        if self._shared:
            told: tuple[str, int] | None = node.metadata.get(_PLACE)
            if told is not None:
                local.last = (-1, told)
                return told
        if last is not None and last[0] == number:
            return last[1]
        info = self._main.find(number) or ("", self.microbatch)
        local.last = (number, info)
        return info


def install(scopes: Scopes, counts: Callable[[nn.Module], bool], guard: Callable[[BaseException], None]) -> None:
    """Tell `scopes` of every module's call while it is active. counts: whether a module is one that is trained.
    guard: told of what goes wrong, instead of the program."""
    original: Callable[..., Any] = nn.Module.__call__

    @functools.wraps(original)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return original(self, *args, **kwargs)
        local = scopes._local
        outermost = not local.stack and _current_node() is None
        elsewhere = scopes.active and _thread() != scopes._trains and _current_node() is None
        if elsewhere and outermost:
            if not torch.is_grad_enabled() or not counts(self):
                return original(self, *args, **kwargs)  # a thread of its own business, that loads or looks at data
            return apart(scopes, ("forward", "", scopes.microbatch), call, guard)(self, *args, **kwargs)
        if outermost and scopes.root_begins is not None:
            scopes.root_begins(self)
        if not scopes.active:
            return original(self, *args, **kwargs)
        try:
            depth = len(local.stack)
            counted = outermost and torch.is_grad_enabled() and counts(self)
            since = _sequence()
            scopes.enter(self, counted)
            if counted and scopes.batch_begins is not None:
                scopes.batch_begins(args, kwargs)
        except Exception as error:  # noqa: BLE001 - the program's run is worth more than its trace
            guard(error)
            return original(self, *args, **kwargs)
        try:
            result = original(self, *args, **kwargs)
            if elsewhere:
                scopes.made_elsewhere(result, (args, kwargs), since, local.stack[depth])
            return result
        finally:
            del local.stack[depth + 1 :]
            scopes.leave()

    nn.Module.__call__ = call  # type: ignore[method-assign]
    submit: Callable[..., Any] = ThreadPoolExecutor.submit

    @functools.wraps(submit)
    def submit_inside(self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """A module hands a part of its work to another thread: it is still that module's work."""
        stack = scopes._local.stack
        if scopes.active and stack and _current_node() is None:
            fn = apart(scopes, stack[-1], fn, guard)
        return submit(self, fn, *args, **kwargs)

    ThreadPoolExecutor.submit = submit_inside  # type: ignore[method-assign, assignment]


def apart(
    scopes: Scopes, place: Place, function: Callable[..., Any], guard: Callable[[BaseException], None]
) -> Callable[..., Any]:
    """A part of the forward pass that belongs to `place`, to be called on another thread."""

    @functools.wraps(function)
    def part(*args: Any, **kwargs: Any) -> Any:
        if not scopes.active or not scopes.is_elsewhere() or scopes._local.stack:
            return function(*args, **kwargs)
        since = _sequence()
        try:
            if scopes.thread_begins is not None:
                scopes.thread_begins()
            scopes.push(*place)
        except Exception as error:  # noqa: BLE001 - the program's run is worth more than its trace
            guard(error)
        try:
            result = function(*args, **kwargs)
            if scopes.active:
                scopes.made_elsewhere(result, (args, kwargs), since, place)
            return result
        finally:
            scopes._local.stack.clear()
            if scopes.thread_ends is not None:
                scopes.thread_ends()

    return part


def _plain(dotted: str, root: nn.Module) -> str:
    parts = [part for part in dotted.split(".") if part not in _WRAPPERS] if dotted else []
    if parts and parts[0] == "module" and list(root._modules) == ["module"]:
        parts = parts[1:]
    return ".".join(parts)


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
