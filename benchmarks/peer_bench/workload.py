"""A language model of two blocks with mixtures of experts, trained with AdamW, tens of milliseconds a step on a CPU.

Bitwise repeatable on one thread. Ordinary PyTorch: it knows nothing of what may record it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """Of the model and its batches."""

    width: int
    heads: int
    hidden: int
    vocabulary: int
    batch: int
    length: int
    experts: int = 4
    active: int = 3


SIZES = {"small": Size(128, 4, 256, 512, 8, 64), "medium": Size(512, 8, 1024, 2048, 4, 128)}


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.proj = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class Expert(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate = nn.Linear(size.width, size.hidden, bias=False)
        self.up = nn.Linear(size.width, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """Each token goes to `active` experts; what they return is summed by index."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.active = size.active
        self.router = nn.Linear(size.width, size.experts, bias=False)
        self.experts = nn.ModuleList(Expert(size) for _ in range(size.experts))
        self.balance: Tensor = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        shares = torch.softmax(self.router(x), dim=-1)
        weights, chosen = torch.topk(shares, self.active, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        tokens, results = [], []
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            results.append(expert(x[token]) * weights[token, slot].unsqueeze(-1))
            tokens.append(token)
        out = torch.index_add(torch.zeros_like(x), 0, torch.cat(tokens), torch.cat(results))
        load = F.one_hot(chosen, shares.shape[-1]).float().mean((0, 1))
        self.balance = (load * shares.mean(0)).sum() * shares.shape[-1]
        return out.view(shape)


class Block(nn.Module):
    def __init__(self, size: Size, dropout: float, fp8: bool) -> None:
        super().__init__()
        self.fp8 = fp8
        self.ln1, self.attn = nn.LayerNorm(size.width), Attention(size)
        self.ln2, self.moe = nn.LayerNorm(size.width), Mixture(size)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.ln1(x)))
        h = self.ln2(x)
        if self.fp8:
            h = through_fp8(h)
        return x + self.drop(self.moe(h))


def through_fp8(x: Tensor) -> Tensor:
    """Round to 8 bits with one scale and back; the gradient passes as if nothing had happened."""
    scale = torch.amax(x.detach().abs(), keepdim=True) / 448.0
    packed = (x.detach() / scale).to(torch.float8_e4m3fn)
    return x + (packed.to(torch.float32) * scale - x).detach()


class Model(nn.Module):
    def __init__(self, size: Size, dropout: float = 0.0, fp8: bool = False) -> None:
        super().__init__()
        self.tok_emb, self.pos_emb = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.length, size.width)
        self.layers = nn.ModuleList(Block(size, dropout, fp8) for _ in range(2))
        self.ln, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tok_emb(ids) + self.pos_emb(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.ln(x)), sum(layer.moe.balance for layer in self.layers)  # type: ignore[return-value]


class Step(NamedTuple):
    """What one step came to, read outside the part that is timed: the truth that nothing which records it sees."""

    step: int
    loss: str
    grad_norm: str
    seconds: float
    cpu_seconds: float
    state: str


def build(size: Size, dropout: float = 0.0, fp8: bool = False) -> tuple[Model, torch.optim.Optimizer]:
    """The model and its optimizer, one operation a parameter, so that what traces operators sees each update."""
    torch.manual_seed(1234)
    model = Model(size, dropout, fp8)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def batch(step: int, size: Size, rank: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    ids = torch.randint(0, size.vocabulary, (size.batch, size.length + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def train(
    model: Model,
    optimizer: torch.optim.Optimizer,
    size: Size,
    steps: int,
    peer: Any,
    on_step: Callable[[int], None] | None = None,
) -> list[Step]:
    """`steps` steps, counted from 0. peer: whose `before_step` and `after_step` are called around each, timed."""
    done = []
    for step in range(steps):
        if on_step is not None:
            on_step(step)
        ids, targets = batch(step, size)
        wall, cpu = time.perf_counter(), time.process_time()
        peer.before_step(step)
        logits, balance = model(ids)
        loss = F.cross_entropy(logits.view(-1, size.vocabulary), targets.view(-1)) + 0.01 * balance
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        peer.after_step(step)
        optimizer.zero_grad(set_to_none=True)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        done.append(Step(step, loss.item().hex(), norm.item().hex(), wall, cpu, state_digest(model, optimizer)))
    return done


def state_digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of the weights and the moments."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    for state in optimizer.state.values():
        for name in sorted(state):
            found.update(state[name].numpy().tobytes())
    return found.hexdigest()[:16]
