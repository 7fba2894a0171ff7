"""Training programs that save and resume. Each takes where to save, after which micro-batches, and what to resume from,
and restores everything: what is captured at a begin must be the same as in a run that was never interrupted."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.recorder.programs import Net, batch, ending, seed

STEPS = 6


def streams() -> dict[str, Any]:
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def set_streams(saved: dict[str, Any]) -> None:
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["torch"])


def load(path: Path | None) -> dict[str, Any] | None:
    return None if path is None else torch.load(path, weights_only=False)


def scheduled(folder: Path, save_at: set[int], resume: Path | None) -> dict[str, bytes]:
    """Frozen and tied parameters, buffers that are not saved, a schedule, an average of the weights."""
    seed()
    net = Net()
    net.l0.bias.requires_grad_(False)
    net.l2 = nn.Linear(1, 1)
    net.l2.bias = net.l1.bias
    net.register_buffer("position", torch.arange(4), persistent=False)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    ema = {name: p.detach().clone() for name, p in net.named_parameters()}
    done = 0
    saved = load(resume)
    if saved is not None:
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        ema, done = saved["ema"], saved["done"]
        set_streams(saved["streams"])
    for step in range(done + 1, STEPS + 1):
        x = batch(step) + random.random() + np.random.rand()
        loss = net.l2(net(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for name, p in net.named_parameters():
                ema[name].lerp_(p, 0.1)
        if step in save_at:
            torch.save(
                {
                    "net": net.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(),
                    "ema": ema, "done": step, "streams": streams(),
                },
                folder / f"{step}.pt",
            )  # fmt: skip
    return ending([net], [optimizer])


def adversarial(folder: Path, save_at: set[int], resume: Path | None) -> dict[str, bytes]:
    """Two modules whose parameters have the same names. Resumed, only one of them has been called at the begin."""
    seed()
    maker, judge = Net(6, 6), Net()
    first = torch.optim.Adam(judge.parameters(), lr=1e-3)
    second = torch.optim.Adam(maker.parameters(), lr=1e-3)
    parts: list[Any] = [maker, judge, first, second]
    done = 0
    saved = load(resume)
    if saved is not None:
        for part, state in zip(parts, saved["parts"], strict=True):
            part.load_state_dict(state)
        done = saved["done"]
        set_streams(saved["streams"])
    for step in range(done + 1, STEPS + 1):
        first.zero_grad()
        (judge(batch(step)).mean() - judge(maker(batch(step + 100)).detach()).mean()).backward()
        first.step()
        second.zero_grad()
        judge(maker(batch(step + 200))).mean().backward()
        second.step()
        if step in save_at:
            states = [part.state_dict() for part in parts]
            torch.save({"parts": states, "done": step, "streams": streams()}, folder / f"{step}.pt")
    return ending([maker, judge], [first, second])


def accumulating(folder: Path, save_at: set[int], resume: Path | None) -> dict[str, bytes]:
    """Saves in the middle of a step, gradients included: `save_at` counts micro-batches, three a step."""
    seed()
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    done = 0
    saved = load(resume)
    if saved is not None:
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        for name, p in net.named_parameters():
            p.grad = saved["gradients"][name]
        done = saved["done"]
        set_streams(saved["streams"])
    for part in range(done + 1, 3 * STEPS + 1):
        (net(batch(part)).square().mean() / 3).backward()
        if part % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
        if part in save_at:
            gradients = {name: p.grad for name, p in net.named_parameters()}
            torch.save(
                {
                    "net": net.state_dict(), "optimizer": optimizer.state_dict(), "gradients": gradients, "done": part,
                    "streams": streams(),
                },
                folder / f"{part}.pt",
            )  # fmt: skip
    return ending([net], [optimizer])


def with_closure(folder: Path, save_at: set[int], resume: Path | None) -> dict[str, bytes]:
    """Forward and backward run inside the optimizer's step."""
    seed()
    net = nn.Linear(6, 1)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
    done = 0
    saved = load(resume)
    if saved is not None:
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["done"]
        set_streams(saved["streams"])
    for step in range(done + 1, STEPS + 1):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(batch(step)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        if step in save_at:
            torch.save(
                {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "done": step, "streams": streams()},
                folder / f"{step}.pt",
            )
    return ending([net], [])


def without_modules(folder: Path, save_at: set[int], resume: Path | None) -> dict[str, bytes]:
    """Plain tensors, no module: a begin is at the backward pass."""
    seed()
    weight = torch.randn(6, 1, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=1e-2)
    done = 0
    saved = load(resume)
    if saved is not None:
        with torch.no_grad():
            weight.copy_(saved["weight"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["done"]
        set_streams(saved["streams"])
    for step in range(done + 1, STEPS + 1):
        optimizer.zero_grad()
        (batch(step) @ weight + torch.rand(1)).square().mean().backward()
        optimizer.step()
        if step in save_at:
            torch.save(
                {"weight": weight, "optimizer": optimizer.state_dict(), "done": step, "streams": streams()},
                folder / f"{step}.pt",
            )
    return {"weight": weight.detach().numpy().tobytes()}


def at_rest(folder: Path, save_at: set[int], resume: Path | None) -> dict[str, bytes]:
    """Trains a module in evaluation mode, as in fine-tuning, and evaluates it with gradients on after each save."""
    seed()
    net = Net().eval()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    done = 0
    saved = load(resume)
    if saved is not None:
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["done"]
        set_streams(saved["streams"])
    for step in range(done + 1, STEPS + 1):
        loss = net(batch(step)).square().mean() * torch.rand(1)
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()
        if step in save_at:
            torch.save(
                {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "done": step, "streams": streams()},
                folder / f"{step}.pt",
            )
            net(batch(1000))
    return ending([net], [optimizer])


def tried_first(folder: Path, save_at: set[int], resume: Path | None) -> dict[str, bytes]:
    """Calls its module once before anything is loaded."""
    seed()
    net = nn.Linear(6, 1)
    net(torch.zeros(1, 6))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    done = 0
    saved = load(resume)
    if saved is not None:
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["done"]
        set_streams(saved["streams"])
    for step in range(done + 1, STEPS + 1):
        optimizer.zero_grad()
        net(batch(step)).square().mean().backward()
        optimizer.step()
        if step in save_at:
            torch.save(
                {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "done": step, "streams": streams()},
                folder / f"{step}.pt",
            )
    return ending([net], [optimizer])


def scaled(folder: Path, save_at: set[int], resume: Path | None) -> dict[str, bytes]:
    """A gradient scaler, and a trainer object that holds everything."""
    seed()

    class Trainer:
        def __init__(self) -> None:
            self.model = Net()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
            self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
            self.done = 0

        def step(self) -> None:
            self.done += 1
            self.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = self.model(batch(self.done)).square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

        def save(self, path: Path) -> None:
            parts = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "scaler")}
            torch.save({**parts, "done": self.done, "streams": streams()}, path)

    trainer = Trainer()
    saved = load(resume)
    if saved is not None:
        for name in ("model", "optimizer", "scaler"):
            getattr(trainer, name).load_state_dict(saved[name])
        trainer.done = saved["done"]
        set_streams(saved["streams"])
    while trainer.done < STEPS:
        trainer.step()
        if trainer.done in save_at:
            trainer.save(folder / f"{trainer.done}.pt")
    return ending([trainer.model], [trainer.optimizer])


Program = Callable[[Path, set[int], "Path | None"], dict[str, bytes]]

ALL: tuple[tuple[Program, int, tuple[int, int]], ...] = (
    (scheduled, 3, (3, 0)),
    (adversarial, 3, (3, 0)),
    (accumulating, 7, (2, 1)),
    (accumulating, 9, (3, 0)),
    (with_closure, 3, (3, 0)),
    (without_modules, 3, (3, 0)),
    (at_rest, 3, (3, 0)),
    (tried_first, 3, (3, 0)),
    (scaled, 3, (3, 0)),
)
"""Each with what it saves after, and the position that is."""
