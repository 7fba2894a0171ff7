"""torch.distributed.pipelining: two stages, four micro-batches, one forward and one backward in turn."""

from __future__ import annotations

import os

import nudge
import torch
import torch.distributed as dist
from arguments import arguments
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

args = arguments()
nudge.install()
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(args.seed)


class Part(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inner = nn.Linear(inputs, 16)
        self.outer = nn.Linear(16, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(nn.functional.dropout(torch.tanh(self.inner(x)), 0.1, self.training))


model = [Part(8, 16), Part(16, 4)][rank]
schedule = Schedule1F1B(PipelineStage(model, rank, 2, torch.device("cpu")), 4, nn.functional.mse_loss)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
data = torch.Generator().manual_seed(7)
torch.manual_seed(args.seed + rank)
step = 0
if args.resume:
    state = torch.load(args.resume / f"rank{rank}.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    data.set_state(state["data"])
    torch.set_rng_state(state["rng"])
    step = state["step"]
while step < args.steps:
    x, y = torch.randn(8, 8, generator=data), torch.randn(8, 4, generator=data)
    optimizer.zero_grad()
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=y, losses=[])
    optimizer.step()
    step += 1
    if args.save_every and step % args.save_every == 0:
        folder = args.checkpoints / f"step{step}"
        folder.mkdir(exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save({**state, "data": data.get_state(), "rng": torch.get_rng_state()}, folder / f"rank{rank}.pt")
dist.barrier()
dist.destroy_process_group()
os._exit(0)
