"""Breaks one piece of state on purpose, once, right before a resumed program's first step: the control arms in which
detrun has to notice. With the interruption this is all of the recorder that changes what a program does.

What was done is written to `sabotage/rank<r>.json`; where there is nothing of the kind, that is said there.
"""

from __future__ import annotations

import ctypes
import json
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType, GeneratorType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from detrun.recorder import reach
from detrun.recorder.copies import module_tensors
from detrun.recorder.hidden import hidden_iterators
from detrun.recorder.live import find
from detrun.recorder.liveness import live_variables
from detrun.recorder.owned import is_feed_type, is_program_file, is_program_type
from detrun.recorder.places import program_frames
from detrun.recorder.progress import write_atomically
from detrun.recorder.rng import UNSEEDED, RngStreams

KINDS = ("rng", "batch", "moment", "parameter", "scheduler")

_SEED = 20_011
_DEEPEST = 4
_NEXT_METHODS = ("next_batch", "get_batch", "next")
_INTEGERS = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}
# Their rates follow from `last_epoch` alone; of others the rate of an earlier step cannot be had.
_CLOSED_FORMS = ("LambdaLR", "OneCycleLR", "CyclicLR", "CosineAnnealingWarmRestarts")


class NothingToBreakError(Exception):
    """Nothing of the kind is there to be broken."""


class Sabotage:
    """One kind of sabotage of this process.

    optimizers, schedulers, roots: those that exist now. rank: of this process.
    """

    def __init__(
        self,
        kind: str,
        attempt: Path,
        rank: Callable[[], int],
        *,
        optimizers: Callable[[], Sequence[Optimizer]],
        schedulers: Callable[[], Sequence[Any]],
        roots: Callable[[], Sequence[nn.Module]],
        streams: RngStreams,
    ) -> None:
        self._kind = kind
        self._attempt = attempt
        self._rank = rank
        self._optimizers = optimizers
        self._schedulers = schedulers
        self._roots = roots
        self._streams = streams

    def first_forward(self, frame: FrameType) -> None:
        """The first root forward of the process begins: do it, and say what was done."""
        acts: dict[str, Callable[[], str]] = {
            "rng": lambda: self._reseed(frame),
            "batch": lambda: skip_batch(frame),
            "moment": self._clear_moment,
            "parameter": self._move_parameter,
            "scheduler": self._hold_scheduler_back,
        }
        document: dict[str, Any] = {"schema_version": 1, "kind": self._kind, "done": False}
        try:
            act = acts.get(self._kind)
            if act is None:
                raise NothingToBreakError(f"unknown kind {self._kind!r}; known are {', '.join(KINDS)}")
            document |= {"done": True, "what": act()}
        except NothingToBreakError as reason:
            document["why"] = str(reason)
        except Exception as error:  # noqa: BLE001 - the program's own iterators and schedulers may raise anything
            document["why"] = f"{type(error).__name__}: {error}"
        write_atomically(self._attempt / "sabotage" / f"rank{self._rank():05d}.json", document)

    def _reseed(self, frame: FrameType) -> str:
        digests = self._streams.digests()
        seeded = [name for name in ("torch_cpu", "numpy", "python") if digests.get(name, UNSEEDED) != UNSEEDED]
        default = torch.default_generator
        fresh = torch.Generator().manual_seed(default.initial_seed()).get_state()
        if seeded[:1] == ["torch_cpu"] and torch.equal(fresh, default.get_state()):
            seeded = [*seeded[1:], "torch_cpu"]  # nobody has drawn from it
        if seeded:
            acts: dict[str, Callable[[], object]] = {
                "torch_cpu": lambda: default.manual_seed(_SEED),
                "numpy": lambda: np.random.seed(_SEED),
                "python": lambda: random.seed(_SEED),
            }
            acts[seeded[0]]()
            return f"random number stream {seeded[0]} seeded anew"
        for found in find(frame, self._roots(), ()):
            if found.component == "rng" and found.standing != "soft" and not isinstance(found.value, Tensor):
                _reseed_own(found.value)
                return f"generator {found.name} seeded anew"
        raise NothingToBreakError("no random number stream was seeded")

    def _clear_moment(self) -> str:
        names = self._names()
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    entry = optimizer.state.get(parameter) or {}
                    for key in sorted(entry, key=str):
                        moment = entry[key]
                        if isinstance(moment, Tensor) and moment.is_floating_point() and moment.numel() > 1:
                            local = getattr(moment, "_local_tensor", moment)
                            if bool((local.detach().float() != 0).any()):
                                with torch.no_grad():
                                    local.zero_()
                                return f"{key} of {names.get(id(parameter), 'a parameter')} set to zero"
        raise NothingToBreakError("no optimizer holds a tensor with an element other than zero")

    def _move_parameter(self) -> str:
        names = self._names()
        theirs = [p for o in self._optimizers() for group in o.param_groups for p in group["params"]]
        owned = {id(parameter) for parameter in theirs}
        ordered = [t for root in self._roots() for _, t in module_tensors(root) if id(t) in owned] or theirs
        for parameter in ordered:
            local = getattr(parameter, "_local_tensor", parameter)
            if parameter.requires_grad and local.is_floating_point() and local.numel():
                before = float(local.detach().reshape(-1)[0].float())
                move_by_one_ulp(local)
                name = names.get(id(parameter), "the first parameter")
                return f"first element of {name} moved by 1 ULP (it was {before.hex()})"
        raise NothingToBreakError("no optimizer has a trainable parameter")

    def _hold_scheduler_back(self) -> str:
        behind = [s for s in self._schedulers() if isinstance(getattr(s, "last_epoch", None), int) and s.last_epoch > 0]
        plain = [scheduler for scheduler in behind if not hasattr(scheduler, "_schedulers")]
        if not behind:
            raise NothingToBreakError("no scheduler has taken a step")
        scheduler = (plain or behind)[0]
        rates = step_scheduler_back(scheduler)
        changed = "and its learning rates" if rates else "(its learning rates stay: the earlier ones cannot be had)"
        return f"{type(scheduler).__name__} put one step behind {changed}, last_epoch {scheduler.last_epoch}"

    def _names(self) -> dict[int, str]:
        return {id(tensor): name for root in self._roots() for name, tensor in module_tensors(root)}


def asked(env: Mapping[str, str], attempt: Path, rank: Callable[[], int], **live: Any) -> Sabotage | None:
    """What DETRUN_SABOTAGE asks for; None if it is not set. live: the keywords of `Sabotage`. Raises ValueError for
    what the launcher cannot have written."""
    text = env.get("DETRUN_SABOTAGE")
    return Sabotage(str(json.loads(text)["kind"]), attempt, rank, **live) if text else None


def move_by_one_ulp(tensor: Tensor) -> None:
    """Move the first element of a floating tensor to its neighbour towards zero, and a zero away from it. In host
    memory through its address: no operator runs, and no version is counted."""
    width = tensor.element_size()
    if width not in _INTEGERS:
        raise ValueError(f"elements of {tensor.dtype} are not moved")
    sign = 1 << (8 * width - 1)
    if tensor.is_cpu:
        word = _INTEGERS[width].from_address(tensor.data_ptr())
        word.value += 1 if word.value & (sign - 1) == 0 else -1
        return
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    words = tensor.data.as_strided((1,), (1,), tensor.storage_offset()).view(integers[width])
    words += 1 if int(words[0]) & (sign - 1) == 0 else -1


def step_scheduler_back(scheduler: Any) -> bool:
    """Put a learning rate scheduler one step behind: its count, and the rates of its optimizer to what they were then.
    Returns whether the rates could be had."""
    scheduler.last_epoch -= 1
    if getattr(scheduler, "T_cur", 0) > 0:
        scheduler.T_cur -= 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch expects these calls inside of `step` only
        if hasattr(scheduler, "_get_closed_form_lr"):
            rates = scheduler._get_closed_form_lr()
        elif any(base.__name__ in _CLOSED_FORMS for base in type(scheduler).__mro__):
            rates = scheduler.get_lr()
        else:
            return False
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=False):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    scheduler._last_lr = list(rates)
    return True


def skip_batch(frame: FrameType) -> str:
    """Advance the program's iterator over its data by one: a variable of its frames or an attribute of what these hold,
    a loop's, or an object with a method for the next batch. The one place where the program's code is called. Raises
    NothingToBreakError if none is found."""
    named = list(_iterators(frame))
    chosen = [(name, item) for name, item in [*named, *hidden_iterators()] if hasattr(type(item), "__next__")]
    # What torch's loader makes is certain to be the data.
    for name, item in sorted(chosen, key=lambda entry: not is_feed_type(type(entry[1]))):
        try:
            next(item)
        except StopIteration:
            continue
        return f"one batch of {name} skipped"
    for name, item in named:
        for method in _NEXT_METHODS:
            function = type(item).__dict__.get(method)
            if isinstance(function, FunctionType) and function.__code__.co_argcount == 1:
                function(item)
                return f"one batch of {name} skipped by {method}()"
    raise NothingToBreakError("no iterator over the data was found among the program's variables")


def _iterators(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """What may be the program's iterators, nearest first, and objects of its own."""
    level = [entry for own in program_frames(frame) for entry in live_variables(own).items()]
    seen: set[int] = set()
    for _ in range(_DEEPEST):
        following: list[tuple[str, Any]] = []
        for name, item in level:
            kind = type(item)
            if id(item) in seen or issubclass(kind, (nn.Module, Optimizer, type, Tensor)):
                continue
            seen.add(id(item))
            if isinstance(item, GeneratorType):
                code: CodeType = item.gi_code
                if not item.gi_running and is_program_file(code.co_filename):
                    yield name, item
            elif reach.is_iterator(kind):
                yield name, item
            elif is_feed_type(kind) or (is_program_type(kind) and not reach.is_container(kind)):
                yield name, item
                following += [(f"{name}.{attribute}", value) for attribute, value in reach.attributes(item)]
            elif reach.is_container(kind) and reach.size(item, kind) <= reach.MOST_CHILDREN:
                following += [(name + suffix, value) for suffix, value in reach.members(item, kind, {})]
        level = following


def _reseed_own(generator: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(_SEED)
    elif isinstance(generator, np.random.Generator):
        stream: Any = generator.bit_generator
        stream.state = type(stream)(_SEED).state
    elif isinstance(generator, np.random.BitGenerator):
        made: Any = type(generator)
        generator.state = made(_SEED).state
    else:
        generator.seed(_SEED)
