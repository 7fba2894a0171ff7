"""Small training programs that know nothing of a recorder. Each returns what it ended with, as bytes by name."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
from torch import nn


def seed() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


class Net(nn.Module):
    def __init__(self, inputs: int = 6, outputs: int = 1) -> None:
        super().__init__()
        self.l0 = nn.Linear(inputs, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.2)
        self.l1 = nn.Linear(16, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.l1(self.drop(torch.tanh(self.norm(self.l0(x)))))


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def ending(modules: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> dict[str, bytes]:
    found = {"torch": raw(torch.get_rng_state()), "python": repr(random.getstate()).encode()}
    found["numpy"] = repr(np.random.get_state()[1].tolist()).encode()
    for i, module in enumerate(modules):
        for name, tensor in module.state_dict().items():
            found[f"{i}.{name}"] = raw(tensor)
    for i, optimizer in enumerate(optimizers):
        for j, (_, state) in enumerate(optimizer.state.items()):
            for name, value in state.items():
                found[f"opt{i}.{j}.{name}"] = raw(value) if isinstance(value, torch.Tensor) else repr(value).encode()
    return found


def batch(step: int, rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(step))


def clipped(steps: int = 3) -> dict[str, bytes]:
    seed()
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        net(batch(step) + random.random() + np.random.rand()).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
    return ending([net], [optimizer])


def plain(steps: int = 3, **options: object) -> dict[str, bytes]:
    seed()
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, **options)  # type: ignore[arg-type]
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        net(batch(step)).square().mean().backward()
        optimizer.step()
    return ending([net], [optimizer])


def fused() -> dict[str, bytes]:
    return plain(fused=True)


def foreach() -> dict[str, bytes]:
    return plain(foreach=True)


def accumulating() -> dict[str, bytes]:
    seed()
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(3):
            (net(batch(10 * step + part)).square().mean() / 3).backward()
        optimizer.step()
    return ending([net], [optimizer])


def adversarial() -> dict[str, bytes]:
    seed()
    maker, judge = Net(6, 6), Net()
    first = torch.optim.Adam(judge.parameters(), lr=1e-3)
    second = torch.optim.Adam(maker.parameters(), lr=1e-3)
    for step in range(4):
        first.zero_grad()
        (judge(batch(step)).mean() - judge(maker(batch(step + 100)).detach()).mean()).backward()
        first.step()
        second.zero_grad()
        judge(maker(batch(step + 200))).mean().backward()
        second.step()
    return ending([maker, judge], [first, second])


def critics() -> dict[str, bytes]:
    """The judge steps three times for each step of the maker."""
    seed()
    maker, judge = Net(6, 6), Net()
    first = torch.optim.Adam(judge.parameters(), lr=1e-3)
    second = torch.optim.Adam(maker.parameters(), lr=1e-3)
    for step in range(9):
        first.zero_grad()
        judge(batch(step)).mean().backward()
        first.step()
        if step % 3 == 2:
            second.zero_grad()
            judge(maker(batch(step + 200))).mean().backward()
            second.step()
    return ending([maker, judge], [first, second])


def scaled() -> dict[str, bytes]:
    """A gradient scaler on the host; the second step overflows and is skipped."""
    seed()
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    for step in range(1, 4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(batch(step)).square().mean()
        if step == 2:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return {**ending([net], [optimizer]), "scale": repr(scaler.get_scale()).encode()}


def with_closure() -> dict[str, bytes]:
    seed()
    net = nn.Linear(6, 1)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
    for step in range(2):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(batch(step)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    return ending([net], [])


def checkpointed() -> dict[str, bytes]:
    """Activations are computed again in the backward pass, by a backward pass of their own in the reentrant form."""
    from torch.utils.checkpoint import checkpoint

    seed()
    net, head = Net(6, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=1e-2)
    for step in range(2):
        optimizer.zero_grad()
        hidden = checkpoint(net, batch(step).requires_grad_(), use_reentrant=True)
        head(hidden).square().mean().backward()
        optimizer.step()
    return ending([net, head], [optimizer])


def sparse() -> dict[str, bytes]:
    seed()
    table = nn.Embedding(20, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(list(table.parameters()), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        table(torch.tensor([step, 3, 3, 7])).square().sum().backward()
        optimizer.step()
    return ending([table], [optimizer])


class _Wrapping(torch.optim.Optimizer):
    """Steps by calling an inner optimizer, as sharding and mixed-precision wrappers do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.inner.step(closure)


def nested() -> dict[str, bytes]:
    seed()
    net = Net()
    inner = torch.optim.SGD(net.parameters(), lr=1e-2)
    optimizer = _Wrapping(inner)
    for step in range(3):
        optimizer.zero_grad()
        net(batch(step)).square().mean().backward()
        optimizer.step()
    return ending([net], [inner])


ALL = (
    clipped, plain, fused, foreach, accumulating, adversarial, critics, scaled, with_closure, checkpointed, sparse,
    nested,
)  # fmt: skip
