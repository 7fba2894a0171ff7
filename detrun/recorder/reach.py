"""What an object of the program holds, by name, read without running any of the program's code.

Attributes come from instance dictionaries and slots, never from properties or `__getattr__`; containers are read by
their base type's own methods, iterators by what the interpreter can see in them.
"""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from detrun.recorder.liveness import live_variables

Child = tuple[str, Any]
"""What stands behind the name of its owner (`.weight`, `[3]`, or nothing for the same thing seen from outside)."""

MOST_CHILDREN = 512
MOST_TENSORS = 4096
"""Children of one container that are looked at; more where they are tensors, as in a memory bank."""

_ADDRESS = 1 << 40
"""An int key as large as this is an object's id."""

_mro = type.__dict__["__mro__"].__get__
_names = type.__dict__["__dict__"].__get__

_BUILTIN_ITERATORS: tuple[type, ...] = (
    enumerate,
    filter,
    map,
    reversed,
    zip,
    itertools.chain,
    itertools.count,
    itertools.cycle,
    itertools.islice,
    type(iter([])),
    type(iter(())),
    type(iter({})),
    type(iter({}.values())),
    type(iter({}.items())),
    type(iter(set())),
    type(iter(range(0))),
    type(iter(collections.deque())),
)
_POSITIONS = {type(iter([])): -1, type(iter(())): -1, type(iter(range(0))): -1, itertools.count: 0}
"""Iterators that tell their position by `__reduce__`, and where in its answer."""


def attributes(item: object) -> Iterator[tuple[str, Any]]:
    """The instance's own attributes: its dictionary, then its slots, in the order in which they were made."""
    kind = type(item)
    yield from instance_dict(item).items()
    for name, member in _slots(kind):
        try:
            yield name, member.__get__(item)
        except AttributeError:
            continue


def instance_dict(item: object) -> dict[str, Any]:
    """`item.__dict__`, whatever its class has made of that name; empty if there is none."""
    for base in _mro(type(item)):
        own = _names(base).get("__dict__")
        if own is not None:
            read = isinstance(own, (types.GetSetDescriptorType, types.MemberDescriptorType))
            found = own.__get__(item) if read else None
            return dict(found) if isinstance(found, dict) else {}
    return {}


def _slots(kind: type) -> list[tuple[str, Any]]:
    return [
        (name, member)
        for base in reversed(_mro(kind))
        if "__slots__" in _names(base)
        for name, member in _names(base).items()
        if isinstance(member, types.MemberDescriptorType) and not name.startswith("__")
    ]


def members(item: object, kind: type, names_of: Mapping[int, str]) -> list[Child]:
    """The members of a dict, list, tuple, deque or set, cut at a fixed number; compare `size`.

    names_of: names of the objects that may be keys of dictionaries, by their id (a dict by parameter)."""
    if issubclass(kind, dict):
        pairs: Iterator[tuple[Any, Any]] = iter(dict.items(item))  # type: ignore[arg-type]
        listed = list(itertools.islice(pairs, MOST_TENSORS))
        if len(listed) > MOST_CHILDREN and not issubclass(type(listed[0][1]), Tensor):
            del listed[MOST_CHILDREN:]
        return [(_key(key, place, names_of), value) for place, (key, value) in enumerate(listed)]
    if issubclass(kind, (set, frozenset)):
        # A set of objects has no order that two processes share.
        return [("[0]", next(_iterate(item, kind)))] if size(item, kind) == 1 else []
    fields = _names(kind).get("_fields") if issubclass(kind, tuple) and kind is not tuple else None
    named = fields if isinstance(fields, tuple) else ()
    values = list(itertools.islice(_iterate(item, kind), MOST_TENSORS))
    if len(values) > MOST_CHILDREN and not issubclass(type(values[0]), Tensor):
        del values[MOST_CHILDREN:]
    return [(f".{named[i]}" if i < len(named) else f"[{i}]", value) for i, value in enumerate(values)]


def size(item: object, kind: type) -> int:
    """Members of a container, by its base type's own count."""
    for base in (dict, list, tuple, collections.deque, set, frozenset):
        if issubclass(kind, base):
            return int(base.__len__(item))  # type: ignore[arg-type]
    return 0


def plain_numbers(item: object, kind: type) -> list[Any] | None:
    """The members of a container that holds numbers only, or lists of numbers (then one after the other); sorted if it
    is a set. None otherwise."""
    if size(item, kind) == 0:
        return None
    values = list(dict.values(item)) if issubclass(kind, dict) else list(_iterate(item, kind))  # type: ignore[arg-type]
    kinds = set(map(type, values))
    if kinds <= {list, tuple} and len(values) <= MOST_TENSORS:
        values = [number for inner in values for number in inner]
        kinds = set(map(type, values))
    if not kinds <= {bool, int, float} or not values:
        return None
    return sorted(values) if issubclass(kind, (set, frozenset)) else values


def kinds_in(item: object, kind: type) -> set[type]:
    """The types of a container's members."""
    return set(map(type, dict.values(item) if issubclass(kind, dict) else _iterate(item, kind)))  # type: ignore[arg-type]


def is_container(kind: type) -> bool:
    return issubclass(kind, (dict, list, tuple, collections.deque, set, frozenset))


def is_callable_holder(kind: type) -> bool:
    """Functions and what wraps them: they may hold state in closures, defaults and instances."""
    return kind is functools.partial or issubclass(
        kind,
        (types.FunctionType, types.MethodType, types.MethodWrapperType, types.BuiltinMethodType),
    )


def is_iterator(kind: type) -> bool:
    return kind in _BUILTIN_ITERATORS or kind is types.GeneratorType


def inside(item: Any) -> list[Child]:
    """What a function, method, partial, generator or built-in iterator holds."""
    kind = type(item)
    if kind is types.GeneratorType:
        return _in_generator(item)
    if kind is types.FunctionType:
        return _in_function(item)
    if kind is functools.partial:
        return [("", item.func), *(("", value) for value in item.args), *_dotted(item.keywords)]
    if kind in _BUILTIN_ITERATORS:
        held: list[Child] = [("", referent) for referent in gc.get_referents(item)]
        place = _POSITIONS.get(kind)
        if place is not None:
            reduced = item.__reduce__()
            position = reduced[1][0] if kind is itertools.count else (reduced[place] if len(reduced) > 2 else None)
            held.append((".position", position))
        return held
    owner = getattr(item, "__self__", None)  # of a bound method: a slot of its own type, nothing of the program's
    return [("", owner)] if owner is not None and not isinstance(owner, types.ModuleType) else []


def _in_function(item: types.FunctionType) -> list[Child]:
    code = item.__code__
    held: list[Child] = []
    for name, cell in zip(code.co_freevars, item.__closure__ or (), strict=False):
        try:
            held.append((f".{name}", cell.cell_contents))
        except ValueError:  # not filled yet
            continue
    defaults = item.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    held += [(f".{name}", value) for name, value in zip(names, defaults, strict=False)]
    return [*held, *_dotted(item.__kwdefaults__ or {}), *_dotted(item.__dict__)]


def _in_generator(item: types.GeneratorType[Any, Any, Any]) -> list[Child]:
    frame = item.gi_frame
    if frame is None or item.gi_running:
        return []
    held: list[Child] = [(f".{name.strip('.')}", value) for name, value in live_variables(frame).items()]
    # The iterators of its loops have no name; the interpreter lists them among what the generator holds.
    iterators = [value for value in gc.get_referents(item) if is_iterator(type(value))]
    named = {id(value) for _, value in held}
    return [*held, *(("", value) for value in iterators if id(value) not in named)]


def _dotted(values: Mapping[str, Any]) -> list[Child]:
    return [(f".{name}", value) for name, value in values.items() if not name.startswith("__")]


def _iterate(item: Any, kind: type) -> Iterator[Any]:
    base: Any
    for base in (list, tuple, collections.deque, set, frozenset):
        if issubclass(kind, base):
            return iter(base.__iter__(item))
    return iter(())


def _key(key: Any, place: int, names_of: Mapping[int, str]) -> str:
    kind = type(key)
    if kind is str:
        return f".{key}"
    if kind is int:
        name = names_of.get(key)
        if name is not None:
            return f".{name}"
        return f"[{key}]" if abs(key) < _ADDRESS else f"[#{place}]"
    if kind is tuple and all(type(part) in (str, int) for part in key):
        return f"[{', '.join(map(str, key))}]"
    name = names_of.get(id(key))
    return f".{name}" if name is not None else f"[#{place}]"
