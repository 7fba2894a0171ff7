"""Lines as Megatron Core 0.19.2's `training_log` prints them: its accumulators and format strings, without Megatron."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np


@dataclass
class TrainingLog:
    """One process's logging. interval: --log-interval."""

    steps: int = 12
    interval: int = 1
    total: dict[str, np.float32] = field(default_factory=dict)
    advanced: int = 0
    skipped: int = 0
    nans: int = 0
    first: bool = True

    def step(
        self,
        iteration: int,
        losses: dict[str, float],
        moe: dict[str, float] | None = None,
        grad_norm: float = 2.389,
        skip: bool = False,
    ) -> str | None:
        """The line of an iteration, where it prints one. losses: the loss dictionary; moe: what trackers add to the
        totals, on skipped iterations too."""
        self.advanced += not skip
        self.skipped += skip
        for name, value in losses.items():
            if not skip:
                self.total[name] = self.total.get(name, np.float32(0)) + np.float32(value)
            elif not math.isfinite(value):
                self.nans += 1
        for name, value in (moe or {}).items():
            self.total[name] = self.total.get(name, np.float32(0)) + np.float32(value)
        first, self.first = self.first, False
        if iteration % self.interval and not first:
            return None
        line = f" [2026-08-22 10:15:31.123456] iteration {iteration:8d}/{self.steps:8d} |"
        line += f" consumed samples: {iteration * 32:12d} | elapsed time per iteration (ms): 1234.6 |"
        line += f" learning rate: {1.5e-5:.6E} | global batch size: {32:5d} |"
        for name, total in self.total.items():
            mean = float(total) / max(1, self.advanced)
            if mean >= 0.0:
                line += f" {name}: {mean:.6E} |"
            if not first:
                self.total[name] = np.float32(0)
        line += f" loss scale: 1.0 | grad norm: {grad_norm:.3f} |"
        line += f" number of skipped iterations: {self.skipped:3d} | number of nan iterations: {self.nans:3d} |"
        if not first:
            self.advanced = self.skipped = self.nans = 0
        return line


def loss_of(step: int) -> float:
    """A loss that falls and is no round number."""
    return float(np.float32(10.9 - 0.37 * step + math.sin(step) / 7))


def balance_of(step: int) -> float:
    return float(np.float32(0.96 + math.cos(step) / 50))


def log_of(
    steps: Iterable[int],
    change: dict[int, float] | None = None,
    skips: Iterable[int] = (),
    interval: int = 1,
    last: int = 12,
) -> list[str]:
    """The lines of a process that runs these steps. change: what is added to the loss of a step."""
    log, skips = TrainingLog(last, interval), set(skips)
    lines = []
    for step in steps:
        loss = loss_of(step) + (change or {}).get(step, 0.0)
        balance = {"load_balancing_loss": balance_of(step)}
        line = log.step(step, {"lm loss": loss}, balance, 2.0 + loss_of(step) / 9, step in skips)
        if line is not None:
            lines.append(line)
    return lines
