"""Runs a program with a trace and reads back its events, with nothing of the project's own reader."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import nn

from detrun.records.trace_row import TraceEvent
from tests.recorder.harness import Run, run


def trace(program: Callable[[], Any], attempt: Path, *, level: int = 4, steps: tuple[int, int] = (1, 2), **more: Any):
    """Run it in a forked child under DETRUN_TRACE."""
    request = json.dumps({"level": level, "steps": list(steps), **more})
    return run(program, attempt, DETRUN_TRACE=request, DETRUN_STATE_EVERY="0")


def events(made: Run | Path, rank: int = 0) -> list[TraceEvent]:
    attempt = made.attempt if isinstance(made, Run) else made
    found = []
    with pa.ipc.open_stream((attempt / "trace" / f"rank{rank:05d}.arrow").read_bytes()) as stream:
        for batch in stream:
            for row in batch.to_pylist():
                inputs = row.pop("n_inputs")
                parts = row.pop("parts")
                lists = {"inputs": tuple(parts[:inputs]), "outputs": tuple(parts[inputs:])}
                lists["producers"] = tuple(row.pop("producers"))
                rows = row.pop("rows")
                found.append(TraceEvent(**row, **lists, rows=None if rows is None else tuple(rows)))
    return found


def index(made: Run, rank: int = 0) -> list[dict[str, Any]]:
    text = (made.attempt / "trace" / f"rank{rank:05d}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def files(made: Run) -> list[bytes]:
    return [path.read_bytes() for path in sorted((made.attempt / "trace").iterdir())]


class Net(nn.Module):
    """Two blocks, one of them with a child, and a loss outside of all modules."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 8), nn.GELU())
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.first(x)))


def train(steps: int = 2, microbatches: int = 1, net: Callable[[], nn.Module] = Net, lr: float = 0.1) -> str:
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)
    for step in range(steps):
        for part in range(microbatches):
            x = torch.full((3, 4), float(step + part + 1))
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return " ".join(float(p.detach().sum()).hex() for p in model.parameters())


def find(made: Run | Path, op: str, **where: Any) -> list[TraceEvent]:
    return [e for e in events(made) if e.op == op and all(getattr(e, name) == value for name, value in where.items())]
