"""The seeds of a process's own random number streams."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_all(seed: int, rank: int) -> None:
    """Give each rank its own streams. Model weights are drawn before, from a seed that all ranks share."""
    random.seed(seed * 100_003 + rank)
    np.random.seed((seed * 100_003 + rank) % 2**32)
    torch.manual_seed(seed * 100_003 + rank)  # every device's stream too
