"""The optimizers of this process, in the order they were constructed. Holds none of them alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from types import FrameType

from torch import Tensor
from torch.optim import Optimizer


class Optimizers:
    """Gives each optimizer a serial number, the same one in equal runs. Those that are made while the program trains,
    one for each parameter that it meets, may be made in another order in each run: they have a place as well."""

    def __init__(self) -> None:
        self._next = 0
        self._places: dict[int, int] = {}
        self._by_id: dict[int, tuple[weakref.ref[Optimizer], int]] = {}
        self._serials: set[int] = set()

    def serial(self, optimizer: Optimizer) -> int:
        """Its number; an optimizer seen for the first time (constructed, or unpickled and now stepping) gets one."""
        key = id(optimizer)
        entry = self._by_id.get(key)
        if entry is not None and entry[0]() is optimizer:
            return entry[1]
        self._next += 1
        serial = self._next
        serials, by_id = self._serials, self._by_id

        places = self._places

        def gone(reference: weakref.ref[Optimizer]) -> None:
            serials.discard(serial)
            places.pop(serial, None)
            if by_id.get(key, (None, 0))[0] is reference:
                del by_id[key]

        by_id[key] = (weakref.ref(optimizer, gone), serial)
        serials.add(serial)
        return serial

    def serials(self) -> AbstractSet[int]:
        """The numbers of those that still exist."""
        return self._serials

    def live(self) -> dict[int, Optimizer]:
        """Those that still exist, by serial number, in an order that equal runs share."""
        found = {serial: reference() for reference, serial in list(self._by_id.values())}
        return {serial: each for serial in self.in_order(found) if (each := found[serial]) is not None}

    def made_late(self, serial: int, parameters: Sequence[Tensor]) -> None:
        """This one was made after the first backward pass; parameters: the model's, in the model's order."""
        optimizer = self.live()[serial]
        own = {id(parameter) for parameter in parameters_of([optimizer])}
        self._places[serial] = next((n for n, p in enumerate(parameters, 1) if id(p) in own), len(parameters) + 1)

    def place(self, serial: int) -> int:
        """Where one that was made late stands among the model's parameters, from 1; 0 for all others."""
        return self._places.get(serial, 0)

    def in_order(self, serials: Iterable[int]) -> list[int]:
        """In an order that equal runs share."""
        return sorted(serials, key=lambda serial: (self.place(serial), serial))


def parameters_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Each parameter once, in order of optimizer, group and position."""
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    if len(groups) == 1:
        return list(groups[0])
    return list({id(parameter): parameter for group in groups for parameter in group}.values())


def all_of(optimizer: Optimizer) -> list[Tensor]:
    """Its parameters in order of group and position, then those that it has state for and that stand in no group: some
    frameworks put a parameter into its group only while it is stepped."""
    found = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    found |= {id(key): key for key in optimizer.state if isinstance(key, Tensor) and id(key) not in found}
    return list(found.values())


def with_inner(optimizers: Sequence[Optimizer], live: Iterable[Optimizer]) -> list[Optimizer]:
    """These, and behind them those that step some of their parameters from inside them: a wrapper has no state."""
    others = [other for other in live if not any(other is one for one in optimizers)]
    if not others:
        return list(optimizers)
    theirs = {id(parameter) for one in optimizers for parameter in all_of(one)}
    inner = [other for other in others if (its := all_of(other)) and all(id(parameter) in theirs for parameter in its)]
    return [*optimizers, *inner]


def owns_any(optimizer: Optimizer, parameters: Sequence[Tensor]) -> bool:
    """Does it update at least one of these parameters?"""
    wanted = {id(parameter) for parameter in parameters}
    return any(id(parameter) in wanted for group in optimizer.param_groups for parameter in group["params"])


def is_rehearsal(optimizer: Optimizer, frame: FrameType | None, *, first: bool) -> bool:
    """Is a step that nothing led to (no forward, no backward) one that only makes an optimizer's state exist, so that a
    checkpoint can be loaded into it? torch's own checkpointing takes such steps at any time; others do before the
    `first` real one, with a rate of zero or gradients of zero."""
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("torch.distributed.checkpoint"):
            return True
        frame = frame.f_back
    if not first:
        return False
    rates = [group.get("lr", 1.0) for group in optimizer.param_groups]
    if all(isinstance(rate, (int, float)) and rate == 0 for rate in rates):
        return True
    return all(_is_nothing(parameter.grad) for parameter in parameters_of([optimizer]))


def _is_nothing(gradient: Tensor | None) -> bool:
    """None, or zeros in host memory: a device is not waited for."""
    return gradient is None or (type(gradient) is Tensor and gradient.is_cpu and not bool(gradient.any()))
