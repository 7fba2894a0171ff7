from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
import torch

from .observed import Trace, observe

TINY = [
    *("--pattern", "ME*", "--width", "32", "--head-size", "16", "--experts", "4", "--sequence-length", "16"),
    *("--batch-size", "3", "--micro-batches", "3", "--device", "cpu", "--warmup-steps", "2"),
]
STEPS = 5


class Run(Protocol):
    def __call__(self, *arguments: str, steps: int = STEPS, out: Path | None = None) -> Trace: ...


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Training tests compare bits, and share a small machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A tiny run in this process, by default of `STEPS` steps with seed 1."""

    def call(*arguments: str, steps: int = STEPS, out: Path | None = None) -> Trace:
        where = str(out or tmp_path / "out")
        return observe(["--steps", str(steps), "--seed", "1", "--out", where, *TINY, *arguments])

    return call
