"""A mixture-of-experts block without dropped tokens, its two auxiliary losses and its expert bias."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from detrun.workloads.hybrid.operations import order_tokens, ordered_sum
from detrun.workloads.hybrid.parallel import Ranks
from detrun.workloads.hybrid.settings import ModelSettings


class Routing(NamedTuple):
    """Where tokens go: T tokens, K experts a token, E experts."""

    experts: Tensor
    """int64 [T, K]."""
    gates: Tensor
    """float [T, K], each token's sum to 1."""
    load_balancing_loss: Tensor
    """0-dim; 1 when the load is even."""
    z_loss: Tensor
    """0-dim, before its coefficient."""


class Router(nn.Module):
    """Chooses experts by sigmoid affinity (DeepSeek-V3, arXiv:2412.19437, equations 12 to 15).

    With an expert bias the choice, not the gates, follows affinity plus a bias that no gradient reaches: see
    `balance_experts`.
    """

    expert_bias: Tensor
    load: Tensor

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.site = "router"
        self.experts = settings.experts
        self.per_token = settings.experts_per_token
        self.affinity = nn.Linear(settings.width, settings.experts, bias=False)
        self.biased = settings.expert_bias > 0.0
        if self.biased:
            self.register_buffer("expert_bias", torch.zeros(settings.experts))
            # Assignments of the step under way; zero between steps, so no checkpoint needs it.
            self.register_buffer("load", torch.zeros(settings.experts, dtype=torch.int64), persistent=False)

    def forward(self, tokens: Tensor) -> Routing:
        """tokens: [T, width]."""
        logits = self.affinity(tokens)
        scores = logits.sigmoid()
        chosen, experts = self._choose(scores)
        # Counted with integers, so that no order matters.
        counts = (experts.reshape(-1, 1) == torch.arange(self.experts, device=experts.device)).sum(0)
        if self.biased and self.training:
            self.load += counts
        return Routing(
            experts,
            chosen / chosen.sum(-1, keepdim=True),
            self._load_balancing_loss(scores, counts),
            logits.logsumexp(-1).square().mean(),  # ST-MoE, arXiv:2202.08906, equation 5
        )

    def _choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """(affinity of the chosen experts, their numbers), both [T, K]."""
        if not self.biased:
            return scores.topk(self.per_token, dim=-1)
        experts = (scores.detach() + self.expert_bias).topk(self.per_token, dim=-1).indices
        # One term of each sum is not zero. A gather's backward would scatter, which CUDA does with atomics.
        picked = experts[..., None] == torch.arange(self.experts, device=experts.device)
        return (picked * scores[:, None]).sum(-1), experts

    def _load_balancing_loss(self, scores: Tensor, counts: Tensor) -> Tensor:
        """E · Σ_e f_e · P_e (Switch Transformer, arXiv:2101.03961, equations 4 to 6), 0-dim.

        f_e is the share of the assignments, `counts` int64 [E], that expert e got, P_e its share of all affinity: with
        S_e the affinity to e summed over tokens, the loss is E · (Σ f_e S_e) / (Σ S_e). Both sums are added up token by
        token, as a fused kernel does with atomics. As one is a denominator, their last bits reach the
        router's gradient, not only the loss.
        """
        share = counts.to(scores.dtype) / (scores.shape[0] * self.per_token)
        sums = ordered_sum(torch.stack([(scores * share).sum(-1), scores.sum(-1)], dim=-1), self.site)
        loss: Tensor = self.experts * sums[0] / sums[1]
        return loss


def balance_experts(model: nn.Module, rate: float, ranks: Ranks) -> None:
    """End a step: experts with more than their share become less likely, the others more. Every rank calls.

    b_e += rate · sign(mean load - load_e) over all ranks and micro-batches (arXiv:2408.15664, algorithm 1).
    """
    routers = [module for module in model.modules() if isinstance(module, Router) and module.biased]
    if not routers:
        return
    loads = ranks.total(torch.stack([router.load for router in routers])).float()
    for router, load in zip(routers, loads, strict=True):
        router.expert_bias += rate * torch.sign(load.mean() - load)
        router.load.zero_()


class Expert(nn.Module):
    """Two layers with squared ReLU (Primer, arXiv:2109.08668): [n, width] -> [n, width]; n may be 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.up(x).relu().square())
        return result


class MixtureOfExperts(nn.Module):
    """Mixer of an `E` block: [batch, T, width] -> [batch, T, width].

    Keeps the auxiliary losses of its latest call in `routing`, for the model to add up.
    """

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.site = "moe"
        self.router = Router(settings)
        self.experts = nn.ModuleList(Expert(settings.width) for _ in range(settings.experts))
        self.routing: Routing | None = None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        routing: Routing = self.router(tokens)
        self.routing = routing
        assignments = routing.experts.reshape(-1)
        order = order_tokens(assignments, self.site)
        counts = (assignments[:, None] == torch.arange(len(self.experts), device=x.device)).sum(0).tolist()

        # Both gathers are permutations: no row is added to twice in their backward, so no order can matter.
        per_token = routing.experts.shape[1]
        copies = tokens[:, None].expand(-1, per_token, -1).reshape(-1, tokens.shape[-1])
        dispatched = torch.split(copies.index_select(0, order), counts)
        # Every expert runs, also on no token: each parameter has a gradient on every rank at every step.
        results = torch.cat([expert(part) for expert, part in zip(self.experts, dispatched, strict=True)])
        returned = results.index_select(0, torch.argsort(order))
        combined = (returned * routing.gates.reshape(-1, 1)).view(-1, per_token, tokens.shape[-1]).sum(1)
        return combined.view_as(x)
