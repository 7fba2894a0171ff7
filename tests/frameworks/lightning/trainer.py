"""Lightning's Trainer on a tiny transformer with dropout: DDP over gloo. Lightning starts its own second rank.

trainer.py --out DIR --steps 6 [--save-every 3] [--resume CHECKPOINT] [--keep-rng] [--stateful] [--accumulate 2]
           [--manual] [--precision 16-mixed] [--package lightning.pytorch]
"""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--seed", type=int, default=1234)
parser.add_argument("--save-every", type=int, default=0)
parser.add_argument("--resume")
parser.add_argument("--devices", type=int, default=2)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--precision", default="32-true")
parser.add_argument("--no-clip", action="store_true")
parser.add_argument(
    "--keep-rng", action="store_true", help="a file of random number states a rank, beside the checkpoint"
)
parser.add_argument("--stateful", action="store_true", help="torchdata's loader and sampler, which know where they are")
parser.add_argument("--manual", action="store_true", help="manual optimization with two optimizers")
parser.add_argument("--slurm", help="as in a Slurm job, where SIGUSR1 saves; scontrol lies in this folder")
parser.add_argument("--package", default="pytorch_lightning")
args = parser.parse_args()

pl: Any = importlib.import_module(args.package)


class Tokens(Dataset[Tensor]):
    """64 sequences of 17 tokens, the same in every run."""

    def __init__(self) -> None:
        self.rows = torch.randint(0, 64, (64, 17), generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class Model(pl.LightningModule):  # type: ignore[misc]
    """Next-token prediction. With `--manual` the body and the rest have an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = not args.manual
        self.embedding = nn.Embedding(64, 16)
        self.body = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 64)

    def training_step(self, batch: Tensor, _index: int) -> Tensor:
        x, y = batch[:, :-1], batch[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        logits = self.head(self.body(self.embedding(x), src_mask=mask, is_causal=True))
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        self.log("lm_loss", loss)
        if args.manual:
            optimizers = self.optimizers()
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in optimizers:
                optimizer.step()
        return loss

    def train_dataloader(self) -> Any:
        data = Tokens()
        if not args.stateful:
            return DataLoader(data, batch_size=4, shuffle=True)
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        sampler = StatefulDistributedSampler(data, self.trainer.world_size, self.trainer.global_rank, seed=1)
        return StatefulDataLoader(data, batch_size=4, sampler=sampler)

    def configure_optimizers(self) -> Any:
        if not args.manual:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
        rest = [*self.embedding.parameters(), *self.head.parameters()]
        return torch.optim.AdamW(self.body.parameters(), lr=1e-3), torch.optim.SGD(rest, lr=1e-2)


class KeepRng(pl.Callback):  # type: ignore[misc]
    """Lightning's checkpoints hold no random number state: each rank keeps its own, and sets it last of all."""

    def __init__(self) -> None:
        self.due = bool(args.resume)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if self.due:
            self.due = False
            torch.set_rng_state(torch.load(self.path(trainer)))

    def on_save_checkpoint(self, trainer: Any, *_: Any) -> None:
        torch.save(torch.get_rng_state(), self.path(trainer))

    @staticmethod
    def path(trainer: Any) -> Path:
        folder: Path = args.out / "rng"
        folder.mkdir(exist_ok=True)
        return folder / f"step-{trainer.global_step}.rank{trainer.global_rank}.pt"


def main() -> None:
    pl.seed_everything(args.seed, workers=True)
    strategies = importlib.import_module(f"{args.package}.strategies")
    plugins = []
    if args.slurm:
        environments = importlib.import_module(f"{args.package}.plugins.environments")
        plugins.append(environments.SLURMEnvironment(auto_requeue=True))
        ranks, rank = os.environ["WORLD_SIZE"], os.environ["RANK"]
        os.environ |= {"SLURM_NTASKS": ranks, "SLURM_NTASKS_PER_NODE": ranks, "SLURM_NNODES": "1", "SLURM_JOB_ID": "1"}
        os.environ |= {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": "0", "SLURM_NODELIST": "localhost"}
        os.environ["PATH"] = f"{args.slurm}:{os.environ['PATH']}"
    saves = []
    if args.save_every:
        saver = pl.callbacks.ModelCheckpoint(
            dirpath=args.out / "checkpoints",
            filename="{step}",
            every_n_train_steps=args.save_every * (2 if args.manual else 1),  # each optimizer's step counts
            save_top_k=-1,
        )
        saves.append(saver)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=strategies.DDPStrategy(process_group_backend="gloo"),
        plugins=plugins or None,
        max_steps=args.steps * (2 if args.manual else 1),
        precision=args.precision,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=None if args.manual or args.no_clip else 1.0,
        default_root_dir=args.out / "checkpoints" if args.slurm else args.out,
        logger=False,
        enable_checkpointing=bool(saves),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*saves, *([KeepRng()] if args.keep_rng else [])],
    )
    trainer.fit(Model(), ckpt_path=args.resume)


if __name__ == "__main__":
    for tool in ("nudge", "census"):  # tests/frameworks/tools is on the path
        if tool.upper() in os.environ:
            importlib.import_module(tool).install()
    main()
