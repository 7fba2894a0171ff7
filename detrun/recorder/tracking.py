"""What the program told of itself by `detrun.track`: state that no walk would find, or not under that name."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from detrun.recorder.live import Found

_DEEPEST = 12
_MOST = 20_000
_CONTAINERS = (Mapping, list, tuple, set, deque)
_PLAIN = (bool, int, float, complex, str)

_tracked: dict[str, Callable[[], Any]] = {}


def track(name: str, thing: object) -> None:
    """Remember a thing under a name; a later call with the same name takes its place. Does nothing in a process that
    detrun does not record. Never raises."""
    if os.environ.get("DETRUN_ATTEMPT_DIR"):
        _tracked[str(name)] = _reference(thing)


def tracked(warn: Callable[[str], None]) -> list[Found]:
    """Everything that is tracked and still exists, taken apart: tensors, arrays, numbers and texts (component
    `tracked`), generators (component `rng`), all hard. warn: is told what could not be read."""
    found: list[Found] = []
    for name, reference in list(_tracked.items()):
        try:
            thing = reference()
            if thing is None:
                del _tracked[name]  # it is gone
            else:
                found += _taken_apart(name, _state_of(thing), warn)
        except Exception as error:  # noqa: BLE001 - the program's own functions may raise anything
            warn(f"detrun.track({name!r}): {type(error).__name__}: {error}")
    return found


def _reference(thing: object) -> Callable[[], Any]:
    """Weak where that is possible, except for functions and containers, of which a program often has nothing else."""
    owned_elsewhere = callable(getattr(thing, "state_dict", None)) or not callable(thing)
    if not owned_elsewhere or isinstance(thing, _CONTAINERS):
        return lambda: thing
    try:
        return weakref.ref(thing)
    except TypeError:
        return lambda: thing


def _state_of(thing: Any) -> Any:
    import torch

    from detrun.recorder.streams import is_generator

    if isinstance(thing, torch.Tensor) or is_generator(type(thing)):
        return thing
    if callable(getattr(thing, "state_dict", None)):
        return thing.state_dict()
    return _state_of(thing()) if callable(thing) else thing


def _taken_apart(name: str, value: Any, warn: Callable[[str], None]) -> Iterator[Found]:
    count = 0
    for found in _pieces(name, value, 0):
        if count == _MOST:
            warn(f"detrun.track({name!r}): more than {_MOST} pieces; the rest is left out")
            return
        count += 1
        yield found
    if count == 0 and not isinstance(value, _CONTAINERS):
        warn(f"detrun.track({name!r}): nothing in a {type(value).__name__} can be compared")


def _pieces(name: str, value: Any, depth: int) -> Iterator[Found]:
    import numpy as np
    import torch

    from detrun.recorder.live import Found
    from detrun.recorder.streams import is_generator

    if isinstance(value, (torch.Tensor, np.ndarray, np.generic, *_PLAIN)) or value is None:
        yield Found("tracked", name, "hard", value)
    elif is_generator(type(value)):
        yield Found("rng", name, "hard", value)
    elif depth > _DEEPEST:
        return
    elif isinstance(value, Mapping):
        for key in value:
            yield from _pieces(f"{name}.{key}" if isinstance(key, (str, int)) else f"{name}.?", value[key], depth + 1)
    elif isinstance(value, (list, tuple, deque)):
        if all(isinstance(item, (bool, int, float)) for item in value):
            yield Found("tracked", name, "hard", tuple(value))
        else:
            for index, item in enumerate(value):
                yield from _pieces(f"{name}[{index}]", item, depth + 1)
    elif callable(getattr(value, "state_dict", None)):
        yield from _pieces(name, value.state_dict(), depth + 1)
