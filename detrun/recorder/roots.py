"""Which modules hold the training's parameters, and what the program calls them.

A module that was called is known by that, but a process that has just resumed has called none yet, and both must see
the same: so they are looked for in the variables of the program's functions, and in what these hold.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from detrun.recorder.liveness import live_variables

Named = tuple[str, nn.Module]

_MOST_ENTRIES = 64
"""Entries of a container that are looked at: a list of models is short."""
_DEEPEST = 3
_FOREIGN = frozenset({"torch", "detrun", "numpy", "runpy"})


def find_roots(frame: FrameType, seen: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[Named]:
    """The outermost modules of the training with their prefixes, in the order in which the program's variables name
    them, outermost function first.

    They are those of which an optimizer has a parameter, and others in training mode, except for copies of one of them
    (averages of weights). seen: modules that were called, by which those are known that no variable leads to. A prefix
    is "" unless two of them give one name to two tensors.
    """
    found: dict[int, Named] = {}
    for name, module in _modules_of(frame):
        found.setdefault(id(module), (name, module))
    for module in seen:
        found.setdefault(id(module), (type(module).__name__.lower(), module))
    return _prefixed(_trained(_outermost(list(found.values())), optimizers))


def names_of_free(frame: FrameType, roots: Sequence[Named], optimizers: Sequence[Optimizer]) -> dict[int, str]:
    """By id, what the program calls parameters that an optimizer has and no module: full-precision copies of a model's,
    or tensors that are a model by themselves."""
    theirs = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    theirs -= {id(p) for _, root in roots for p in root.parameters()}
    found: dict[int, str] = {}
    if not theirs:
        return found
    looked: set[int] = set()
    for each in reversed(list(program_frames(frame))):
        for name, value in live_variables(each).items():
            for called, tensor in _inside("" if name == "self" else name, value, 0, looked, Tensor):
                if id(tensor) in theirs:
                    found.setdefault(id(tensor), called)
    return found


def program_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames from this one outwards that are neither torch's, the standard library's nor the recorder's."""
    while frame is not None:
        top = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if top == "__main__" or (top not in _FOREIGN and top not in sys.stdlib_module_names):
            yield frame
        frame = frame.f_back


def _modules_of(frame: FrameType) -> Iterator[Named]:
    looked: set[int] = set()
    for each in reversed(list(program_frames(frame))):
        for name, value in live_variables(each).items():
            yield from _inside("" if name == "self" else name, value, 0, looked, nn.Module)


def _inside(name: str, value: Any, depth: int, looked: set[int], kind: type) -> Iterator[tuple[str, Any]]:
    if isinstance(value, kind):
        yield name or type(value).__name__.lower(), value
        return
    if isinstance(value, nn.Module):
        return
    if depth >= _DEEPEST or isinstance(value, (str, bytes, int, float, Tensor, type, Optimizer)) or id(value) in looked:
        return
    members: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, (list, tuple)):
        members = enumerate(value) if len(value) <= _MOST_ENTRIES else ()
    elif isinstance(value, dict):
        members = list(value.items()) if len(value) <= _MOST_ENTRIES else ()
    elif _is_programs(type(value)):
        members = list(getattr(value, "__dict__", {}).items())
    looked.add(id(value))
    for key, member in members:
        yield from _inside(f"{name}.{key}" if name else str(key), member, depth + 1, looked, kind)


def _is_programs(kind: type) -> bool:
    top = str(getattr(kind, "__module__", "")).partition(".")[0]
    return top == "__main__" or (top not in _FOREIGN and top not in sys.stdlib_module_names)


def _outermost(candidates: list[Named]) -> list[Named]:
    inner: set[int] = set()
    for _, module in candidates:
        inner.update(id(part) for part in module.modules() if part is not module)
    return [(name, module) for name, module in candidates if id(module) not in inner]


def _trained(candidates: list[Named], optimizers: Sequence[Optimizer]) -> list[Named]:
    theirs = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    owners = {id(m) for _, m in candidates if not theirs or any(id(p) in theirs for p in m.parameters())}
    shapes = [_shapes(module) for _, module in candidates if id(module) in owners]
    kept = []
    for name, module in candidates:
        own = _shapes(module)
        if id(module) in owners or (own and module.training and not any(_is_copy(own, shape) for shape in shapes)):
            kept.append((name, module))
    return kept


def _shapes(module: nn.Module) -> set[tuple[str, Any]]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {(name.removeprefix("module."), tensor.shape) for name, tensor in tensors}


def _is_copy(one: set[tuple[str, Any]], other: set[tuple[str, Any]]) -> bool:
    """All of one, but perhaps for a counter, has a partner in the other."""
    return len(one - other) <= 1 < len(one & other) or one == other


def _prefixed(roots: list[Named]) -> list[Named]:
    holders: dict[str, set[int]] = {}
    for _, module in roots:
        for name, _ in (*module.named_parameters(), *module.named_buffers()):
            holders.setdefault(name, set()).add(id(module))
    clashing = set().union(*(ids for ids in holders.values() if len(ids) > 1))
    prefixed: list[Named] = []
    taken: set[str] = set()
    for name, module in roots:
        prefix = ""
        if id(module) in clashing:
            prefix, count = name, 2
            while prefix in taken:
                prefix, count = f"{name}{count}", count + 1
            taken.add(prefix)
        prefixed.append((prefix, module))
    return prefixed
