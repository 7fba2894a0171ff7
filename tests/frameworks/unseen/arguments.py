"""What every driver in this folder is told."""

from __future__ import annotations

import argparse
from pathlib import Path


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--resume", type=Path, help="a checkpoint")
    parser.add_argument("--keep-rng", action="store_true", help="save random number states beside the framework's own")
    args = parser.parse_args()
    args.checkpoints = args.out / "ckpt"
    args.checkpoints.mkdir(parents=True, exist_ok=True)
    return args
