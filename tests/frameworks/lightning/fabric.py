"""A loop of one's own with Lightning's Fabric: DDP over gloo, a tiny transformer with dropout.

torchrun --nproc-per-node 2 fabric.py --out DIR --steps 6 [--save-every 3] [--resume CHECKPOINT] [--keep-rng]
"""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--seed", type=int, default=1234)
parser.add_argument("--save-every", type=int, default=0)
parser.add_argument("--resume", type=Path)
parser.add_argument(
    "--keep-rng", action="store_true", help="a file of random number states a rank, beside the checkpoint"
)
parser.add_argument("--precision", default="32-true")
parser.add_argument("--package", default="lightning_fabric")
args = parser.parse_args()

lightning: Any = importlib.import_module(args.package)


class Model(nn.Module):
    """Next-token prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.body = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(x)))  # type: ignore[no-any-return]


def main() -> None:
    strategies = importlib.import_module(f"{args.package}.strategies")
    fabric = lightning.Fabric(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy=strategies.DDPStrategy(process_group_backend="gloo"),
        precision=args.precision,
    )
    fabric.launch()
    fabric.seed_everything(args.seed)
    model = Model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    data = torch.randint(0, 64, (64, 17), generator=torch.Generator().manual_seed(7))
    torch.manual_seed(99 + fabric.global_rank)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if args.resume:
        fabric.load(args.resume, state)
        if args.keep_rng:
            torch.set_rng_state(torch.load(rng_file(args.resume, fabric.global_rank)))
    while state["step"] < args.steps:
        first = (state["step"] * fabric.world_size + fabric.global_rank) * 4 % 64
        batch = data[first : first + 4]
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        if args.save_every and state["step"] % args.save_every == 0:
            path = args.out / "checkpoints" / f"step-{state['step']}.ckpt"
            fabric.save(path, state)
            if args.keep_rng:
                torch.save(torch.get_rng_state(), rng_file(path, fabric.global_rank))
    torch.distributed.destroy_process_group()


def rng_file(checkpoint: Path, rank: int) -> Path:
    """Beside the folder of the checkpoints, as it is none."""
    folder = checkpoint.parent.with_name("rng")
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{checkpoint.stem}.rank{rank}.pt"


if __name__ == "__main__":
    for tool in ("nudge", "census"):  # tests/frameworks/tools is on the path
        if tool.upper() in os.environ:
            importlib.import_module(tool).install()
    main()
