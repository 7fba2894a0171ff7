"""The rows of what torch itself keeps: parameters, buffers, gradients, optimizers, schedulers, gradient scalers.

Everything has the name that the program gives it, so that a row of one run meets its partner of another.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from detrun.recorder.optimizers import all_of
from detrun.recorder.rows import Rows
from detrun.recorder.state import UNCOMPARED_BUFFERS, UNREAD_KEYS
from detrun.records.state_row import Component

T = TypeVar("T")
Warn = Callable[[str], None]

Piece = tuple[str, int, int]
"""A part of a flat tensor: its name, where it begins and how many elements it has."""

BOOKKEEPING: Mapping[str, str] = {
    "optimizer": "the optimizer has rows of its own",
    "_step_count": "counts calls for a warning about their order; a rebuilt scheduler begins again",
    "_get_lr_called_within_step": "set only while a step of the scheduler runs",
    "_is_initial": "set only while the scheduler is constructed",
    "_last_lr": "what was last reported; the rate in force is in the optimizer's groups",
    "verbose": "whether to print",
    "_schedulers": "schedulers inside this one have rows of their own",
}
"""Attributes of a scheduler that are no state, and why."""

_SCALER_PLAIN = ("_growth_factor", "_backoff_factor", "_growth_interval", "_enabled")
_SCALER_LAZY = (("_scale", "_init_scale", "float32", "<f"), ("_growth_tracker", "_init_growth_tracker", "int32", "<i"))


class Live(Generic[T]):
    """Objects of a kind that exist, in the order of their construction. Holds none of them alive."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[T]] = []

    def add(self, thing: T) -> None:
        """Once, however often it is told."""
        if not any(reference() is thing for reference in self._references):
            self._references = [reference for reference in self._references if reference() is not None]
            self._references.append(weakref.ref(thing))

    def all(self) -> list[T]:
        return [thing for thing in (reference() for reference in self._references) if thing is not None]


class Names:
    """What the program calls each of its parameters, and of which modules.

    roots: (prefix, module), the prefix "" unless two modules would give one name to two parameters. free: by id, names
    of parameters that only an optimizer has, or, of a flat tensor that holds parts of several, the pieces. pieces: by
    id, those of the tensors here. unread: ids of buffers that only explain.
    """

    def __init__(
        self,
        roots: Sequence[tuple[str, nn.Module]],
        optimizers: Sequence[Optimizer],
        free: Mapping[int, str | Sequence[Piece]] = MappingProxyType({}),
    ) -> None:
        self.roots = list(roots)
        self.parameters: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        self.pieces: dict[int, Sequence[Piece]] = {}
        self.unread: set[int] = {
            id(module._buffers.get(name)) for module, names in UNCOMPARED_BUFFERS.items() for name in names
        }
        self._by_id: dict[int, str] = {}
        for prefix, root in self.roots:
            for name, parameter in root.named_parameters(prefix):
                self._take(self.parameters, name, parameter)
            for name, buffer in root.named_buffers(prefix):
                self._take(self.buffers, name, buffer)
        for number, optimizer in enumerate(optimizers):
            for place, group in enumerate(optimizer.param_groups):
                for index, parameter in enumerate(group["params"]):
                    self._take_free(f"optimizer{number}.group{place}.param{index}", parameter, free)
            for index, tensor in enumerate(all_of(optimizer)):
                self._take_free(f"optimizer{number}.param{index}", tensor, free)

    def _take_free(self, name: str, parameter: Tensor, free: Mapping[int, str | Sequence[Piece]]) -> None:
        called = free.get(id(parameter), name)
        if not isinstance(called, str):
            self.pieces[id(parameter)] = called
            called = name
        self._take(self.parameters, name if called in self.parameters else called, parameter)

    def of(self, parameter: Tensor) -> str:
        return self._by_id.get(id(parameter), "?")

    def _take(self, into: dict[str, Tensor], name: str, tensor: Tensor) -> None:
        if id(tensor) not in self._by_id:
            self._by_id[id(tensor)] = name
            into[name] = tensor


def add_parameters(rows: Rows, names: Names, warn: Warn) -> None:
    for name, parameter in names.parameters.items():
        for shown, part in _parts(name, parameter, names.pieces.get(id(parameter), ())):
            _try(warn, f"parameter {shown}", rows.tensor, "parameters", shown, part)


def add_buffers(rows: Rows, names: Names, warn: Warn) -> None:
    """Persistent or not."""
    for name, buffer in names.buffers.items():
        standing = "soft" if id(buffer) in names.unread else "hard"
        _try(warn, f"buffer {name}", rows.tensor, "buffers", name, buffer, standing)


def add_gradients(rows: Rows, parameters: Mapping[str, Tensor], warn: Warn) -> list[str]:
    """Of every parameter that may have one; where it is None, that is what the row says. Returns the names of those
    that are not known to be zero."""
    left = []
    for name, parameter in parameters.items():
        gradient = parameter.grad
        if gradient is not None:
            _try(warn, f"gradient {name}", lambda n, g: rows.tensor("gradients", n, g, zero=True), name, gradient)
            if not rows.is_zero("gradients", name):
                left.append(name)
        elif parameter.requires_grad:
            rows.absent("gradients", name)
    return left


def add_optimizers(rows: Rows, names: Names, optimizers: Sequence[Optimizer], warn: Warn) -> None:
    """Every state of every parameter by its name, then what an optimizer keeps for all of them under a name."""
    for number, optimizer in enumerate(optimizers):
        # A defaultdict: reading a missing key by [] would create it and so change the checkpoint.
        state = optimizer.state
        for parameter in all_of(optimizer):
            entry = state.get(parameter)
            if entry:
                _try(warn, "optimizer state", _add_state, rows, names, parameter, entry)
        shared = {key: value for key, value in state.items() if not isinstance(key, Tensor)}
        for key in sorted(shared, key=str):
            name = _numbered("optimizer", number, len(optimizers), str(key))
            _try(warn, "optimizer state", _add_nested, rows, "optimizer", name, shared[key])


def add_hyperparameters(rows: Rows, optimizers: Sequence[Optimizer], warn: Warn) -> None:
    for number, optimizer in enumerate(optimizers):
        for place, group in enumerate(optimizer.param_groups):
            for key in sorted(group, key=str):
                if key != "params" and key not in UNREAD_KEYS.get(optimizer, ()):
                    name = _numbered("optimizer", number, len(optimizers), f"group{place}.{key}")
                    _try(warn, name, rows.value, "hyperparameters", name, group[key])


def add_schedulers(rows: Rows, schedulers: Sequence[LRScheduler], warn: Warn) -> None:
    """What a scheduler keeps, but for its optimizer, what can be called, and its bookkeeping."""
    for number, scheduler in enumerate(schedulers):
        for key, value in sorted(vars(scheduler).items()):
            if key not in BOOKKEEPING:
                name = f"scheduler{number}.{key}"
                _try(warn, name, _add_plain, rows, name, value)


def add_scalers(rows: Rows, scalers: Sequence[Any], warn: Warn) -> None:
    """A gradient scaler's scale, count and settings. Its tensors are made at first use: until then the value that they
    will begin with stands for them. A scale on a device is not waited for."""
    for number, scaler in enumerate(scalers):
        prefix = f"scaler{number}"
        for attribute in _SCALER_PLAIN:
            if hasattr(scaler, attribute):
                rows.value("scaler", f"{prefix}.{attribute.lstrip('_')}", getattr(scaler, attribute))
        if not getattr(scaler, "_enabled", True):
            continue
        for attribute, initial, dtype, layout in _SCALER_LAZY:
            tensor = getattr(scaler, attribute, None)
            if tensor is None and hasattr(scaler, initial):
                raw = struct.pack(layout, getattr(scaler, initial))
                tensor = torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype))[0]
                if getattr(scaler, "_device", "cpu") != "cpu":
                    rows.as_on_device("scaler", f"{prefix}.{attribute.lstrip('_')}", tensor)
                    continue
            if isinstance(tensor, Tensor):
                _try(warn, prefix, rows.tensor, "scaler", f"{prefix}.{attribute.lstrip('_')}", tensor)


def captured_ids(names: Names, optimizers: Iterable[Optimizer]) -> set[int]:
    """The ids of the tensors that have rows: parameters, their gradients, buffers, optimizer state."""
    tensors: list[Any] = [*names.parameters.values(), *names.buffers.values()]
    tensors += [parameter.grad for parameter in names.parameters.values() if parameter.grad is not None]
    for optimizer in optimizers:
        for entry in optimizer.state.values():
            tensors += entry.values() if isinstance(entry, Mapping) else ()
    return {id(tensor) for tensor in tensors if isinstance(tensor, Tensor)}


def _add_state(rows: Rows, names: Names, parameter: Tensor, entry: Any) -> None:
    pieces = names.pieces.get(id(parameter), ())
    if not pieces or not isinstance(entry, Mapping):
        _add_nested(rows, "optimizer", names.of(parameter), entry)
        return
    for key in sorted(entry, key=str):
        value = entry[key]
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            for shown, part in _parts("", value, pieces):
                rows.tensor("optimizer", f"{shown}.{key}", part)
        else:
            _add_nested(rows, "optimizer", f"{names.of(parameter)}.{key}", value)


def _parts(name: str, tensor: Tensor, pieces: Sequence[Piece]) -> Iterator[tuple[str, Tensor]]:
    """A flat tensor by its pieces, in order; any other as it is."""
    if not pieces:
        yield name, tensor
    for shown, start, count in pieces:
        yield shown, tensor.detach().view(-1)[start : start + count]


def _add_nested(rows: Rows, component: Component, name: str, value: Any, depth: int = 0) -> None:
    """Tensors one by one, whatever they are nested in; everything else as a value."""
    if depth < 6 and isinstance(value, Mapping):
        for key in sorted(value, key=str):
            _add_nested(rows, component, f"{name}.{key}", value[key], depth + 1)
    elif depth < 6 and isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        for index, item in enumerate(value):
            _add_nested(rows, component, f"{name}.{index}", item, depth + 1)
    else:
        rows.value(component, name, value)


def _add_plain(rows: Rows, name: str, value: Any) -> None:
    if isinstance(value, (LRScheduler, Optimizer, weakref.ref)):
        return
    if isinstance(value, (list, tuple)) and any(callable(item) for item in value):
        # What the program computes its factors with; an object may count in its attributes.
        for index, item in enumerate(value):
            _add_plain(rows, f"{name}.{index}", item)
    elif callable(value):
        for key, item in sorted(getattr(value, "__dict__", {}).items()):
            if not callable(item):
                rows.value("scheduler", f"{name}.{key}", item)
    else:
        rows.value("scheduler", name, value)


def _numbered(kind: str, number: int, count: int, rest: str) -> str:
    return rest if count == 1 else f"{kind}{number}.{rest}"


def _try(warn: Warn, what: str, add: Callable[..., None], *args: Any) -> None:
    """Add one piece; what cannot be read of it must not cost the others."""
    try:
        add(*args)
    except Exception as error:  # noqa: BLE001 - objects of the program may raise anything
        warn(f"state of {what} is not captured: {type(error).__name__}: {error}")
