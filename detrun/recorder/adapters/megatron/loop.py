"""Megatron's own training loop, Megatron-LM's and Bridge's: it paces the steps.

A step begins with `train_step` and ends with `training_log`, which every rank calls in every step; so what is logged
belongs to the step, and a checkpoint, which is saved behind it, to the step's end. A loop of the user's own that calls
`train_step` alone ends its step there.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from detrun.recorder.adapters.megatron.known import Arguments, Known, plain

_NUMBERS = {"num_zeros_in_grad": "num_zeros", "params_norm": "params_norm", "learning_rate": "learning_rate",
            "loss_scale": "loss_scale"}  # fmt: skip
"""Parameters of `training_log` that are numbers: what they are called here."""


class Loop:
    """module: the one with `train`, `train_step` and `training_log`."""

    def __init__(self, module: ModuleType, known: Known) -> None:
        self.module = module
        self.known = known
        self.adapter = known.adapter
        self.is_open = False
        self.number: int | None = None
        self.skipped = False

    # What is replaced

    def stepping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        arguments = Arguments(original)

        def train_step(*args: Any, **kwargs: Any) -> Any:
            self._begin(arguments, args, kwargs)
            result = original(*args, **kwargs)
            if not self._logs(sys._getframe(1)):
                self.adapter.run(self._returned, result)
                self._end()
            return result

        return train_step

    def passing_over(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`--iterations-to-skip`: only the data goes on, and it counts."""

        def dummy_train_step(*args: Any, **kwargs: Any) -> Any:
            self.adapter.paces()
            self.adapter.step_begins()
            result = original(*args, **kwargs)
            self.adapter.step_ends(skipped=True)
            return result

        return dummy_train_step

    def logging(self, original: Callable[..., Any]) -> Callable[..., Any]:
        arguments = Arguments(original)

        def training_log(*args: Any, **kwargs: Any) -> Any:
            self.adapter.run(self._log, arguments, args, kwargs)
            result = original(*args, **kwargs)
            if self.is_open:
                self._end()
            return result

        return training_log

    # What happens then

    def _begin(self, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.is_open:
            self._end()
        self.number = None
        self.adapter.run(self._find_number, arguments, args, kwargs)
        self.is_open, self.skipped, self.known.norm_told = True, False, False
        self.adapter.paces()
        self.adapter.step_begins(self.number)

    def _find_number(self, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Counted from 1. Newer loops give `iteration`, counted from 0, or all of their state; older ones note it among
        the arguments of the command line."""
        done = arguments.read("iteration", args, kwargs)
        state = arguments.read("global_state", args, kwargs)
        if done is None and state is not None:
            done = self.adapter.needs(state, "train_state.step")
        elif done is None:
            done = self.adapter.needs(self.module.get_args(), "curr_iteration")
        self.number = None if done is None else int(done) + 1

    def _end(self) -> None:
        self.is_open = False
        self.adapter.run(self.known.look_once)
        self.adapter.step_ends(self.number, skipped=self.skipped)

    def _logs(self, caller: Any) -> bool:
        """Is it Megatron's own loop that called, which logs every step?"""
        return caller.f_code is getattr(getattr(self.module, "train", None), "__code__", None)

    def _returned(self, result: Any) -> None:
        """What `train_step` gave to a loop that is not Megatron's own."""
        if not isinstance(result, tuple) or not result or not isinstance(result[0], dict):
            self.adapter.lacks("the losses that train_step returns")
            return
        self._losses(result[0])
        self.skipped = len(result) > 1 and bool(result[1])

    def _log(self, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        def read(name: str) -> Any:
            return arguments.read(name, args, kwargs)

        self.skipped = bool(read("skipped_iter"))
        self._losses(read("loss_dict"))
        for name, called in _NUMBERS.items():
            value = read(name)
            if value is not None:
                self.adapter.metric(called, value)
        norm = read("grad_norm")
        if not self.known.norm_told and (norm is not None or self.skipped):
            self.adapter.metric("grad_norm", math.nan if norm is None else norm)
        self._counters(read("global_state"))

    def _losses(self, losses: dict[str, Any]) -> None:
        for name, value in losses.items():
            self.adapter.metric(plain(name), value)

    def _counters(self, state: Any) -> None:
        holder = self.module.get_args() if state is None else self.adapter.needs(state, "train_state")
        for attribute in ("consumed_train_samples", "skipped_train_samples"):
            value = self.adapter.needs(holder, attribute)
            if value is not None:
                self.adapter.metric(attribute.replace("_train", ""), int(value))


def install(module: ModuleType, known: Known) -> None:
    """`megatron.training.training`, or Bridge's module of the same."""
    adapter, loop = known.adapter, Loop(module, known)
    log = adapter.needs(module, "training_log")
    if log is not None:
        adapter.takes(log, "loss_dict", "skipped_iter", "grad_norm")
    adapter.wrap(module, "training_log", loop.logging)
    adapter.wrap(module, "train_step", loop.stepping)
    if hasattr(module, "dummy_train_step"):  # not in every version, and then nothing is skipped so
        adapter.wrap(module, "dummy_train_step", loop.passing_over)
    if "bridge" not in module.__name__:
        adapter.needs(module, "get_args")
