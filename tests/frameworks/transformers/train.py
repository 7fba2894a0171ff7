"""transformers' Trainer on a tiny GPT-2 with dropout (or a tiny Mixtral): DDP over gloo, no hub.

torchrun --nproc-per-node 2 train.py --out DIR --steps 6 [--save-every 3] [--resume] [--workers 2] [--accumulate 2]
         [--model mixtral]
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--seed", type=int, default=1234)
parser.add_argument("--save-every", type=int, default=0)
parser.add_argument("--resume", help="a checkpoint's folder")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--model", choices=["gpt2", "mixtral"], default="gpt2")
parser.add_argument("--no-clip", action="store_true")
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--slow", action="store_true", help="0.8 s a step, as the signal's handler waits 3 s")
parser.add_argument("--jit-checkpoint", action="store_true", help="SIGTERM saves and ends")
parser.add_argument("--abort-at-exit", action="store_true", help="die by SIGABRT when all is done")
parser.add_argument("--leave-at", type=int, help="exit with 0 after this step, too early")
args = parser.parse_args()


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """64 sequences of 16 tokens, the same in every run."""

    def __init__(self) -> None:
        self.rows = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if args.slow:
            time.sleep(0.2)
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def make_model() -> Any:
    if args.model == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2))
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=16,
        output_router_logits=True,
    )
    return MixtralForCausalLM(config)


def main() -> None:
    settings = TrainingArguments(
        output_dir=str(args.out / "checkpoints"),
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=args.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=args.accumulate,
        dataloader_num_workers=args.workers,
        save_strategy="steps" if args.save_every else "no",
        save_steps=args.save_every or 500,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        seed=args.seed,
        bf16=args.bf16,
        max_grad_norm=0.0 if args.no_clip else 1.0,
        **({"enable_jit_checkpoint": True} if args.jit_checkpoint else {}),
    )
    torch.manual_seed(args.seed)
    trainer = Trainer(model=make_model(), args=settings, train_dataset=Tokens())
    if args.leave_at:
        step = trainer.training_step

        def leave(*given: Any, **named: Any) -> torch.Tensor:
            if trainer.state.global_step >= args.leave_at:
                os._exit(0)
            return step(*given, **named)

        trainer.training_step = leave
    trainer.train(resume_from_checkpoint=args.resume)
    if args.abort_at_exit:
        atexit.register(os.abort)


if __name__ == "__main__":
    for tool in ("nudge", "census"):  # tests/frameworks/tools is on the path
        if tool.upper() in os.environ:
            importlib.import_module(tool).install()
    main()
