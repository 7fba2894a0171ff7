"""DeepSpeed with ZeRO 1, 2 or 3 on the CPU with gloo: a tiny language model with dropout, as a user would write it.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 train.py --out DIR [--zero 3] [--steps 6] [--save 3] [--resume]

The loop's own part of a checkpoint, by --keep: `rng` (torch's stream of each rank), `data` (the position), both, or
`nothing`; the engine's is model, optimizer and step.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F

# An extension for inference, which takes half a minute to compile; a process killed in that leaves a lock behind.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class LanguageModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(256, 32)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.body = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(32, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        given, wanted = ids[:, :-1], ids[:, 1:]
        mask = torch.nn.Transformer.generate_square_subsequent_mask(given.shape[1], dtype=self.head.weight.dtype)
        logits = self.head(self.body(self.emb(given), mask=mask, is_causal=True))
        return F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten())


def settings(options: argparse.Namespace) -> dict[str, Any]:
    buckets = {"reduce_bucket_size": options.bucket, "allgather_bucket_size": options.bucket} if options.bucket else {}
    if options.zero == 3:
        buckets["stage3_param_persistence_threshold"] = 0  # else so small a model is not partitioned at all
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": options.accumulation,
        "zero_optimization": {"stage": options.zero, **buckets},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": options.precision == "bf16"},
        "fp16": {"enabled": options.precision == "fp16", "initial_scale_power": options.scale_power},
    }


def train(options: argparse.Namespace) -> None:
    for tool in ("nudge", "census"):  # tests/frameworks/tools is on the path
        if tool.upper() in os.environ:
            importlib.import_module(tool).install()
    torch.manual_seed(options.seed)
    model = LanguageModel()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings(options), dist_init_required=True
    )
    data = torch.randint(0, 256, (512, 33), generator=torch.Generator().manual_seed(7))
    torch.manual_seed(options.seed + RANK)
    out, done, position = Path(options.out), 0, 0
    if options.resume:
        _, client = engine.load_checkpoint(str(out))
        done = client["step"]
        if options.keep in ("data", "both"):
            position = client["position"]
        if options.keep in ("rng", "both"):
            torch.set_rng_state(torch.load(out / f"rng.{RANK}"))
    for step in range(done + 1, options.steps + 1):
        for _ in range(options.accumulation):
            first = (position * WORLD + RANK) * 4 % 512
            position += 1
            loss = engine(data[first : first + 4])
            engine.backward(loss)
            engine.step()
        if options.save and step % options.save == 0:
            engine.save_checkpoint(str(out), tag=f"step-{step}", client_state={"step": step, "position": position})
            torch.save(torch.get_rng_state(), out / f"rng.{RANK}")
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--zero", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--save", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--keep", choices=["rng", "data", "both", "nothing"], default="both")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--scale-power", type=int, default=16)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--bucket", type=int, default=0, help="elements; 0: the default, which is 5e8")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
