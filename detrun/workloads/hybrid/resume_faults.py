"""Faults in the model, the optimizer and what surrounds them that only a resume shows: they act at every one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from detrun.workloads.hybrid.ema import WeightAverage
from detrun.workloads.hybrid.fault import Fault, Option, change_bits, keep, largest
from detrun.workloads.hybrid.low_precision import (
    E4M3_MAX,
    Fp8Linear,
    LowPrecisionLinear,
    MxFp8Linear,
    NvFp4Linear,
    layers_of,
)
from detrun.workloads.hybrid.moe import Router
from detrun.workloads.hybrid.settings import SettingsError

if TYPE_CHECKING:
    from detrun.workloads.hybrid.train import Trainer

MOMENTS = ("exp_avg", "exp_avg_sq")


def _parameter(trainer: Trainer, options: Mapping[str, Option], fault: str) -> nn.Parameter:
    name = str(options["parameter"])
    try:
        return trainer.model.get_parameter(name)
    except AttributeError as error:
        raise SettingsError(f"--fault {fault}: parameter={name}: the model has no such parameter") from error


class NudgeParameter(Fault):
    """One weight is one ULP off."""

    def __init__(self, trainer: Trainer, options: Mapping[str, Option]) -> None:
        super().__init__(trainer, options)
        self.parameter = _parameter(trainer, options, "resume-nudge-parameter")

    def after_restore(self) -> None:
        change_bits(self.parameter, largest(self.parameter), add=1)


class LoseBuffer(Fault):
    """One buffer is as in a new model."""

    def __init__(self, trainer: Trainer, options: Mapping[str, Option]) -> None:
        super().__init__(trainer, options)
        biases = [
            name for name, module in trainer.model.named_modules() if isinstance(module, Router) and module.biased
        ]
        self.buffer = str(options["buffer"]) or next((f"{name}.expert_bias" for name in biases), "")
        saved = [name for name, _ in trainer.model.named_buffers() if name in trainer.model.state_dict()]
        if self.buffer not in saved:
            there = f"use one of {', '.join(saved)}" if saved else "there is none without --expert-bias"
            raise SettingsError(f"--fault resume-lose-buffer: buffer={self.buffer}: {there}")
        self.fresh = keep(trainer.model.get_buffer(self.buffer).clone())

    def after_restore(self) -> None:
        self.trainer.model.get_buffer(self.buffer).copy_(self.fresh())


class LoseMoments(Fault):
    """The optimizer starts with empty moments."""

    def after_restore(self) -> None:
        self.trainer.optimizer.state.clear()


class RoundMoment(Fault):
    """One moment of one parameter was kept in bfloat16."""

    def __init__(self, trainer: Trainer, options: Mapping[str, Option]) -> None:
        super().__init__(trainer, options)
        self.parameter = _parameter(trainer, options, "resume-round-moment")
        self.moment = str(options["moment"])
        if self.moment not in MOMENTS:
            raise SettingsError(f"--fault resume-round-moment: moment={self.moment}: use {' or '.join(MOMENTS)}")

    def after_restore(self) -> None:
        moment = self.trainer.optimizer.state[self.parameter][self.moment]
        moment.copy_(moment.bfloat16())


class SetBackOptimizerStep(Fault):
    """Adam's bias correction counts fewer steps than were made."""

    def after_restore(self) -> None:
        for state in self.trainer.optimizer.state.values():
            state["step"] -= int(self.options["steps"])


class FirstLearningRate(Fault):
    """The parameter groups have the rate they were built with; the schedule writes the right one after a step."""

    def __init__(self, trainer: Trainer, options: Mapping[str, Option]) -> None:
        super().__init__(trainer, options)
        self.rates = keep([group["lr"] for group in trainer.optimizer.param_groups])

    def after_restore(self) -> None:
        for group, rate in zip(self.trainer.optimizer.param_groups, self.rates(), strict=True):
            group["lr"] = rate


class ScheduleTwice(Fault):
    """The learning-rate schedule is one step ahead."""

    def after_restore(self) -> None:
        self.trainer.scheduler.step()


class ResetScaler(Fault):
    """The loss scale starts anew."""

    def __init__(self, trainer: Trainer, options: Mapping[str, Option]) -> None:
        super().__init__(trainer, options)
        if not trainer.scaler.is_enabled():
            raise SettingsError("--fault resume-reset-scaler: needs --loss-scaling")
        self.fresh = keep(trainer.scaler.state_dict())

    def after_restore(self) -> None:
        self.trainer.scaler.load_state_dict(self.fresh())


class LoseEma(Fault):
    """The moving average of the weights starts anew."""

    def __init__(self, trainer: Trainer, options: Mapping[str, Option]) -> None:
        super().__init__(trainer, options)
        if not trainer.settings.ema:
            raise SettingsError("--fault resume-lose-ema: there is none with --ema 0")

    def after_restore(self) -> None:
        average: WeightAverage = self.trainer.ema
        average.restart(self.trainer.model)


class LoseAmaxHistory(Fault):
    """The amax histories are empty; the scales are as saved, and so what the first step computes with."""

    def __init__(self, trainer: Trainer, options: Mapping[str, Option]) -> None:
        super().__init__(trainer, options)
        self.layers = [layer for _, layer in layers_of(trainer.model) if isinstance(layer, Fp8Linear)]
        if not self.layers:
            raise SettingsError("--fault resume-lose-amax: needs --low-precision fp8")

    def after_restore(self) -> None:
        for layer in self.layers:
            for scaling in (layer.weight_scaling, layer.input_scaling):
                scaling.amax_history.zero_()


class Requantize(Fault):
    """Low-precision weights are made from the right masters another way: as good, and not the same."""

    def __init__(self, trainer: Trainer, options: Mapping[str, Option]) -> None:
        super().__init__(trainer, options)
        self.layers = [layer for _, layer in layers_of(trainer.model)]
        if not self.layers:
            raise SettingsError("--fault resume-requantize: needs --low-precision")

    def after_restore(self) -> None:
        for layer in self.layers:
            self._rebuild(layer)

    @torch.no_grad()
    def _rebuild(self, layer: LowPrecisionLinear) -> None:
        if isinstance(layer, Fp8Linear):
            layer.weight_scaling.scale = E4M3_MAX / layer.weight.abs().amax()
            layer.rebuild()
        elif isinstance(layer, MxFp8Linear):
            layer.quantized = layer.convert(rounding="FLOOR")
        elif isinstance(layer, NvFp4Linear):
            # The amax over E4M3's greatest value only, as for one level; two levels divide by E2M1's too.
            layer.quantized = layer.convert(6.0 * layer.tensor_scale())


class PreviousCheckpoint(Fault):
    """Takes the checkpoint before the one that was asked for."""

    def change_resume(self, path: Path) -> Path | None:
        steps = {int(found.name.removeprefix("step-")): found for found in path.parent.glob("step-*")}
        earlier = [step for step in steps if step < int(path.name.removeprefix("step-"))]
        if not earlier:
            raise SettingsError(f"--fault resume-previous: {path.parent} has no checkpoint before {path.name}")
        return steps[max(earlier)]


class IgnoreCheckpoint(Fault):
    """Starts from the beginning, and says nothing."""

    def change_resume(self, path: Path) -> Path | None:  # noqa: ARG002
        return None
