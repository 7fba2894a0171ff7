"""A causal self-attention block with rotary positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from detrun.workloads.hybrid.low_precision import projection
from detrun.workloads.hybrid.settings import ModelSettings

ROTARY_BASE = 10_000.0


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., arXiv:2104.09864): [batch, heads, T, size] -> same shape."""
    length, size = x.shape[-2:]
    frequencies = ROTARY_BASE ** (-torch.arange(0, size, 2, dtype=torch.float32, device=x.device) / size)
    angles = torch.arange(length, dtype=torch.float32, device=x.device)[:, None] * frequencies
    cosine, sine = angles.cos(), angles.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)


class Attention(nn.Module):
    """Mixer of a `*` block: [batch, T, width] -> [batch, T, width].

    Written out, not `scaled_dot_product_attention`: the fused CUDA backward adds to dQ with atomics.
    """

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.head_size = settings.head_size
        self.qkv = projection(settings, settings.width, 3 * settings.width)
        self.dropout = nn.Dropout(settings.dropout)
        self.out_projection = projection(settings, settings.width, settings.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, -1, self.head_size).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)
        scores = rotate(query) @ rotate(key).transpose(-1, -2) / math.sqrt(self.head_size)
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = self.dropout(scores.masked_fill(future, -math.inf).softmax(-1))
        joined = (weights @ value).transpose(1, 2).reshape(batch, length, width)
        projected: Tensor = self.out_projection(joined)
        return projected
