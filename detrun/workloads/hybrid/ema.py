"""A moving average of the weights, kept for evaluation: no training step reads it, so no metric misses it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class WeightAverage:
    """average = decay · average + (1 - decay) · weight after every step; starts as the weights are.

    Not torch's `AveragedModel`: that keeps the model's buffers in step too, packed low-precision ones among them.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights: dict[str, Tensor] = {}
        self.restart(model)

    def restart(self, model: nn.Module) -> None:
        """Forget the past: the average is what the weights are now. Empty if the decay is 0."""
        if self.decay:
            self.weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take in the weights of a step that is complete."""
        for name, average in self.weights.items():
            average.lerp_(model.get_parameter(name), 1.0 - self.decay)
