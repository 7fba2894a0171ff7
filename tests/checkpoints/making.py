"""Checkpoints as real programs write them, and what is in them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from detrun.checkpoints.entry import Entry
from detrun.checkpoints.read import open_checkpoint


def entries(path: Path) -> dict[str, Entry]:
    """The entries of a checkpoint by name; their content can still be read."""
    with open_checkpoint(path) as checkpoint:
        return {entry.name: entry for entry in checkpoint.entries()}


def training_state(seed: int = 0) -> dict[str, Any]:
    """A model, its optimizer after a step, and what a program keeps beside them."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 10, "rng": torch.get_rng_state()}


def save_dcp(state: dict[str, Any], path: Path) -> Path:
    """Save by torch.distributed.checkpoint, alone."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def cut(path: Path, keep: float = 0.6) -> Path:
    """Cut a file short, as a killed save leaves it."""
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * keep)])
    return path
