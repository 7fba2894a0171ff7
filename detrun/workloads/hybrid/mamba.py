"""A Mamba-2 block: selective state-space model in its chunked, matrix-multiplication form.

Source: Dao & Gu, "Transformers are SSMs" (arXiv:2405.21060), Listing 1 for the algorithm, figure 6 for the
block.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from detrun.workloads.hybrid.operations import gated_norm
from detrun.workloads.hybrid.settings import ModelSettings

CONVOLUTION_TAPS = 4


def pass_states(states: Tensor, decays: Tensor) -> Tensor:
    """Carry the state from chunk to chunk: E[0] = 0, E[c+1] = decays[c] · E[c] + states[c].

    Args:
        states: [batch, chunks, heads, P, N], what each chunk alone leaves behind.
        decays: [batch, chunks, heads], how much of an earlier state survives each chunk.

    Returns:
        [batch, chunks, heads, P, N], the state with which each chunk begins.
    """
    entering = [torch.zeros_like(states[:, 0])]
    for chunk in range(states.shape[1] - 1):
        entering.append(decays[:, chunk, :, None, None] * entering[-1] + states[:, chunk])
    return torch.stack(entering, dim=1)


def ssd_chunked(x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, chunk: int) -> Tensor:
    """Y[t] = Σ_{s≤t} exp(Σ_{r=s+1..t} log_decay[r]) · (C[t]·B[s]) · X[s], in chunks.

    Within a chunk the sum is one masked matrix product; between chunks only the state [P, N] is carried.

    Args:
        x: [batch, T, heads, P], float; already scaled by the step size.
        log_decay: [batch, T, heads], non-positive.
        b: [batch, T, N], shared by all heads.
        c: [batch, T, N], shared by all heads.
        chunk: tokens a chunk; T is a multiple of it.

    Returns:
        [batch, T, heads, P].
    """
    batch, length, heads, size = x.shape
    x = x.view(batch, -1, chunk, heads, size).transpose(2, 3)  # [batch, chunks, heads, chunk, P]
    b = b.view(batch, -1, 1, chunk, b.shape[-1])
    c = c.view(batch, -1, 1, chunk, c.shape[-1])
    # A product with a triangle of ones, not cumsum: torch refuses CUDA's float cumsum in deterministic mode.
    triangle = torch.ones(chunk, chunk, dtype=x.dtype, device=x.device).tril()
    decay = log_decay.view(batch, -1, chunk, heads).transpose(2, 3) @ triangle.T  # inclusive sums
    pairwise = decay[..., :, None] - decay[..., None, :]
    mask = torch.exp(pairwise.masked_fill(triangle == 0, -math.inf))

    within = ((c @ b.transpose(-1, -2)) * mask) @ x
    to_end = torch.exp(decay[..., -1:] - decay)
    states = (x * to_end[..., None]).transpose(-1, -2) @ b  # [batch, chunks, heads, P, N]
    entering = pass_states(states, torch.exp(decay[..., -1]))
    across = (c @ entering.transpose(-1, -2)) * torch.exp(decay)[..., None]
    y: Tensor = (within + across).transpose(2, 3)
    return y.reshape(batch, length, heads, size)


class CausalConvolution(nn.Module):
    """Depthwise causal convolution over time, as shifted products.

    Not `conv1d`: its weight gradient is summed in an order that depends on threads (CPU) and on the algorithm
    (CUDA).
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(CONVOLUTION_TAPS, channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        nn.init.uniform_(self.weight, -(CONVOLUTION_TAPS**-0.5), CONVOLUTION_TAPS**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, T, channels] -> same shape; position t sees t-3 … t."""
        padded = functional.pad(x, (0, 0, CONVOLUTION_TAPS - 1, 0))
        result = self.bias + padded[:, : x.shape[1]] * self.weight[0]
        for tap in range(1, CONVOLUTION_TAPS):
            result = result + padded[:, tap : tap + x.shape[1]] * self.weight[tap]
        return result


class GatedNorm(nn.Module):
    """`operations.gated_norm` with its weight: two tensors [..., width] -> [..., width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.site = "norm"
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        normed: Tensor = gated_norm(y, gate, self.weight, 1e-5, self.site)
        return normed


class Mamba2(nn.Module):
    """Mixer of an `M` block: [batch, T, width] -> [batch, T, width]."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.chunk = settings.ssm_chunk
        self.head_size = settings.head_size
        self.state_size = settings.state_size
        self.inner = 2 * settings.width
        self.heads = self.inner // settings.head_size
        self.in_projection = nn.Linear(settings.width, 2 * self.inner + 2 * self.state_size + self.heads, bias=False)
        self.convolution = CausalConvolution(self.inner + 2 * self.state_size)
        # Decay rates 1…heads and step sizes from 0.001 to 0.1, evenly in the logarithm: the reference's
        # ranges, without its random draws.
        self.a_log = nn.Parameter(torch.arange(1, self.heads + 1, dtype=torch.float32).log())
        steps = torch.logspace(-3, -1, self.heads)
        self.dt_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))  # inverse of softplus
        self.skip = nn.Parameter(torch.ones(self.heads))
        self.norm = GatedNorm(self.inner)
        self.out_projection = nn.Linear(self.inner, settings.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = [self.inner, self.inner + 2 * self.state_size, self.heads]
        gate, mixed, dt = torch.split(self.in_projection(x), parts, dim=-1)
        mixed = functional.silu(self.convolution(mixed))
        values, b, c = torch.split(mixed, [self.inner, self.state_size, self.state_size], dim=-1)
        values = values.reshape(batch, length, self.heads, self.head_size)
        dt = functional.softplus(dt + self.dt_bias)
        y = ssd_chunked(
            values * dt[..., None],
            -dt * self.a_log.exp(),
            b.contiguous(),
            c.contiguous(),
            self.chunk,
        )
        y = (y + values * self.skip[:, None]).reshape(batch, length, self.inner)
        projected: Tensor = self.out_projection(self.norm(y, gate))
        return projected
