"""Faults that change numbers: an operator's result, a weight, a gradient's sum, a metric."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from detrun.workloads.hybrid.fault import Fault, Option, change_bits, largest
from detrun.workloads.hybrid.mamba import GatedNorm
from detrun.workloads.hybrid.moe import MixtureOfExperts, Router
from detrun.workloads.hybrid.operations import INTERVENTIONS, sum_in_order
from detrun.workloads.hybrid.parallel import GRADIENT_SITE
from detrun.workloads.hybrid.settings import SettingsError

if TYPE_CHECKING:
    from detrun.workloads.hybrid.train import Trainer

RACE_ORDERS = 200
ENOUGH_ULPS = 4
"""A shift of every router's loss that no rounding of their mean takes back."""


def _sites(trainer: Trainer, kind: type[nn.Module], fault: str) -> list[str]:
    sites = [name for name, module in trainer.model.named_modules() if isinstance(module, kind)]
    if not sites:
        raise SettingsError(f"--fault {fault}: the pattern has no block of the kind it changes")
    return sites


class _OperatorFault(Fault):
    """Changes what one operator of `operations` returns at one site, in the first micro-batch of its step."""

    site = ""

    def begin_step(self) -> None:
        if self.is_first_step:
            INTERVENTIONS[self.site] = self._once

    def _once(self, given: Tensor, result: Tensor) -> Tensor:
        del INTERVENTIONS[self.site]
        return self.change(given, result)

    def change(self, given: Tensor, result: Tensor) -> Tensor:
        raise NotImplementedError


class Nudge(_OperatorFault):
    """One ULP in what the fused norm of a Mamba-2 block returns, inside its operator."""

    def __init__(self, trainer: Trainer, options: Mapping[str, Option]) -> None:
        super().__init__(trainer, options)
        sites = _sites(trainer, GatedNorm, "nudge")
        self.site = str(options["module"]) or sites[len(sites) // 2]
        if self.site not in sites:
            raise SettingsError(f"--fault nudge: module={self.site}: use one of {', '.join(sites)}")

    def change(self, _: Tensor, result: Tensor) -> Tensor:
        change_bits(result, largest(result), add=1)
        return result


class NudgeHidden(Fault):
    """One ULP in a module's output, written to memory after the module returned: no operator did it."""

    def __init__(self, trainer: Trainer, options: Mapping[str, Option]) -> None:
        super().__init__(trainer, options)
        modules = dict(trainer.model.named_modules())
        name = str(options["module"])
        if name not in modules or not name:
            raise SettingsError(f"--fault nudge-hidden: module={name}: the model has no such module")
        self.module = modules[name]

    def begin_step(self) -> None:
        if self.is_first_step:
            self.hook = self.module.register_forward_hook(self._change)

    def _change(self, _module: nn.Module, _given: Any, result: Tensor) -> None:
        self.hook.remove()
        change_bits(result, largest(result), add=1)


class SwapTokens(_OperatorFault):
    """Two tokens of one expert change places before it runs, and back after: the same rows reordered."""

    def __init__(self, trainer: Trainer, options: Mapping[str, Option]) -> None:
        super().__init__(trainer, options)
        self.site = _sites(trainer, MixtureOfExperts, "swap-tokens")[0]

    def change(self, given: Tensor, result: Tensor) -> Tensor:
        busiest = int(given.bincount().argmax())
        places = (given[result] == busiest).nonzero().view(-1)
        first, last = places[0].item(), places[-1].item()
        result[[first, last]] = result[[last, first]]
        return result


class RaceAuxLoss(Fault):
    """The load-balancing loss adds its partial sums in an order nobody chose, as atomics do."""

    def __init__(self, trainer: Trainer, options: Mapping[str, Option]) -> None:
        super().__init__(trainer, options)
        self.sites = _sites(trainer, Router, "race-aux-loss")
        # One direction a run: routers and micro-batches cannot cancel each other in the mean reported.
        self.upwards = bool(os.urandom(1)[0] & 1)

    def begin_step(self) -> None:
        if self.has_begun:
            INTERVENTIONS.update(dict.fromkeys(self.sites, self._race))

    def _race(self, parts: Tensor, ordered: Tensor) -> Tensor:
        """A sum whose loss differs from the ordered one's: a race that changed nothing would be no test.

        If the ordered sum happens to be the extreme one in this run's direction it stays, and another router's
        or micro-batch's makes the difference.
        """
        # Fresh entropy each time and no lasting generator: whoever looks at generators finds none of ours.
        count = parts.shape[0]
        drawn = np.random.default_rng().permuted(np.tile(np.arange(count), (2, RACE_ORDERS, 1)), axis=-1)
        orders = torch.from_numpy(drawn).to(parts.device)
        raced = torch.stack([parts[orders[0], 0], parts[orders[1], 1]])
        sums = sum_in_order(raced.permute(2, 0, 1))  # [2, RACE_ORDERS]: every order's two sums
        wanted = (ordered[0] / ordered[1]).double()
        change = (sums[0] / sums[1]).double() - wanted
        towards = change if self.upwards else -change
        enough = (towards >= ENOUGH_ULPS * math.ulp(float(wanted)) * 2**29).nonzero()  # float64's ULP to float32's
        best = int(enough[0]) if len(enough) else int(towards.argmax())
        return sums[:, best].clone() if towards[best] > 0 else ordered


class ReorderReduction(Fault):
    """At one step the gradients of ranks and micro-batches are added last to first."""

    def __init__(self, trainer: Trainer, options: Mapping[str, Option]) -> None:
        super().__init__(trainer, options)
        if trainer.reducer.terms < 3:
            raise SettingsError(
                "--fault reorder-reduction: a sum of two does not depend on order; use more ranks or --micro-batches"
            )

    def begin_step(self) -> None:
        if self.is_first_step:
            INTERVENTIONS[GRADIENT_SITE] = self._reversed
        else:
            INTERVENTIONS.pop(GRADIENT_SITE, None)

    def _reversed(self, parts: Tensor, _: Tensor) -> Tensor:
        return sum_in_order(parts, list(reversed(range(parts.shape[0]))))


class WeightBit(Fault):
    """The lowest bit of one weight that no data ever reaches: the embedding of an id that is never used."""

    def after_optimizer(self) -> None:
        if self.is_first_step:
            weight = self.trainer.model.embedding.weight
            change_bits(weight, weight.numel() - 1, flip=1)


class ReplicaDrift(Fault):
    """One replica's final norm is scaled by 1 + 2**-10 and stays off: all ranks add the same updates."""

    def __init__(self, trainer: Trainer, options: Mapping[str, Option]) -> None:
        super().__init__(trainer, options)
        if not trainer.ranks.distributed:
            raise SettingsError("--fault replica-drift: needs two ranks or more")

    def after_optimizer(self) -> None:
        if self.is_first_step:
            with torch.no_grad():
                self.trainer.model.norm.weight.mul_(1.0 + 2.0**-10)


class NotANumber(Fault):
    """The loss is NaN from its step on, and so is everything after."""

    def change_loss(self, loss: Tensor) -> Tensor:
        return loss * math.nan if self.has_begun else loss


class NegativeZero(Fault):
    """A metric that is +0.0 is reported as -0.0 once."""

    def __init__(self, trainer: Trainer, options: Mapping[str, Option]) -> None:
        super().__init__(trainer, options)
        if trainer.settings.model.z_loss_coefficient != 0.0:
            raise SettingsError("--fault negative-zero: needs --z-loss-coefficient 0, its default")

    def change_metrics(self, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**metrics, "router_z_loss": -metrics["router_z_loss"]} if self.is_first_step else metrics


class Heal(Fault):
    """A reported metric is one ULP off at one step and right again at the next; training is not touched."""

    def change_metrics(self, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self.is_first_step:
            return metrics
        reported = metrics["mtp_loss"].clone()
        change_bits(reported, 0, add=1)
        return {**metrics, "mtp_loss": reported}


class Small(Fault):
    """Every reported metric but zeros is one ULP off, in the direction that leaves six printed decimals alone."""

    def change_metrics(self, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._moved(value) for name, value in metrics.items()} if self.has_begun else metrics

    def _moved(self, metric: Tensor) -> Tensor:
        if not float(metric):
            return metric
        for ulps in (1, -1):
            moved = metric.clone()
            change_bits(moved, 0, add=ulps)
            if f"{float(moved):.6f}" == f"{float(metric):.6f}":
                return moved
        return metric
