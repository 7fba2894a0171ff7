"""The hybrid language model: a pattern of blocks, a language-model head and a multi-token-prediction head."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from detrun.workloads.hybrid.attention import Attention
from detrun.workloads.hybrid.data import VOCABULARY
from detrun.workloads.hybrid.low_precision import projection
from detrun.workloads.hybrid.mamba import Mamba2
from detrun.workloads.hybrid.moe import MixtureOfExperts
from detrun.workloads.hybrid.settings import ModelSettings


class Losses(NamedTuple):
    """0-dim tensors; `loss` is trained on: the sum of the others, each with its coefficient. In nats."""

    loss: Tensor
    lm_loss: Tensor
    load_balancing_loss: Tensor
    mtp_loss: Tensor
    router_z_loss: Tensor
    """With its coefficient: exactly +0.0 while that is 0."""


def shifted(tokens: Tensor, length: int, by: int) -> Tensor:
    """The `length` tokens that start `by` positions later: [batch, ≥ length + by] -> [batch, length]."""
    return tokens[:, by : by + length]


class Block(nn.Module):
    """x + dropout(mixer(norm(x))), on [batch, T, width]."""

    def __init__(self, letter: str, settings: ModelSettings) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(settings.width, eps=1e-5)
        self.mixer = {"M": Mamba2, "*": Attention, "E": MixtureOfExperts}[letter](settings)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.dropout(self.mixer(self.norm(x)))
        return result


class MultiTokenPrediction(nn.Module):
    """Predicts the token after the next one (DeepSeek-V3, arXiv:2412.19437, section 2.2, depth 1).

    Joins the main model's hidden state at i with the embedding of token i+1, runs one attention block, and
    leaves it to the shared head to predict token i+2.
    """

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.hidden_norm = nn.RMSNorm(settings.width, eps=1e-5)
        self.embedding_norm = nn.RMSNorm(settings.width, eps=1e-5)
        self.projection = projection(settings, 2 * settings.width, settings.width)
        self.block = Block("*", settings)

    def forward(self, hidden: Tensor, next_embedding: Tensor) -> Tensor:
        """Both [batch, T, width]; so is the result."""
        joined = torch.cat([self.hidden_norm(hidden), self.embedding_norm(next_embedding)], dim=-1)
        result: Tensor = self.block(self.projection(joined))
        return result


class HybridModel(nn.Module):
    """tokens int64 [batch, T + 2] -> `Losses`. The two tokens beyond T are targets only."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.settings = settings
        self.embedding = nn.Embedding(VOCABULARY, settings.width)
        self.blocks = nn.ModuleList(Block(letter, settings) for letter in settings.pattern)
        self.norm = nn.RMSNorm(settings.width, eps=1e-5)
        # Not tied to the embedding: the rows of ids that never occur then get no gradient at all.
        self.head = nn.Linear(settings.width, VOCABULARY, bias=False)
        self.mtp = MultiTokenPrediction(settings)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)
        for name, module in self.named_modules():
            if hasattr(module, "site"):
                module.site = name

    def forward(self, tokens: Tensor) -> Losses:
        length = tokens.shape[1] - 2
        hidden = self.embedding(shifted(tokens, length, 0))
        for block in self.blocks:
            hidden = block(hidden)
        following = self.embedding(shifted(tokens, length, 1))
        lm_loss = self._cross_entropy(hidden, shifted(tokens, length, 1))
        mtp_loss = self._cross_entropy(self.mtp(hidden, following), shifted(tokens, length, 2))
        load_balancing_loss, z_loss = self._router_losses(lm_loss)
        router_z_loss = self.settings.z_loss_coefficient * z_loss
        loss = (
            lm_loss
            + self.settings.load_balancing_coefficient * load_balancing_loss
            + self.settings.mtp_coefficient * mtp_loss
            + router_z_loss
        )
        return Losses(loss, lm_loss, load_balancing_loss, mtp_loss, router_z_loss)

    def _cross_entropy(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))

    def _router_losses(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean over the expert blocks of (load-balancing loss, z-loss); zeros if the pattern has none."""
        routings = [
            block.mixer.routing
            for block in self.blocks
            if isinstance(block.mixer, MixtureOfExperts) and block.mixer.routing is not None
        ]
        if not routings:
            return torch.zeros_like(like), torch.zeros_like(like)
        return (
            torch.stack([routing.load_balancing_loss for routing in routings]).mean(),
            torch.stack([routing.z_loss for routing in routings]).mean(),
        )
