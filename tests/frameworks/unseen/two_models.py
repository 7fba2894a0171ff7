"""DDP by hand: a generator and its judge, each with an optimizer, behind one gradient scaler, in bfloat16."""

from __future__ import annotations

import os

import nudge
import torch
import torch.distributed as dist
from arguments import arguments
from torch import nn
from torch.nn.parallel import DistributedDataParallel

args = arguments()
nudge.install()
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(args.seed)
maker = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8)))
judge = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1)))
of_maker = torch.optim.Adam(maker.parameters(), 1e-3)
of_judge = torch.optim.SGD(judge.parameters(), 1e-2, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
kept = {"maker": maker, "judge": judge, "of_maker": of_maker, "of_judge": of_judge, "scaler": scaler}
torch.manual_seed(args.seed + 1 + rank)
step = 0
if args.resume:
    state = torch.load(args.resume / f"rank{rank}.pt")
    for name, thing in kept.items():
        thing.load_state_dict(state[name])
    step = state["step"]
    torch.set_rng_state(state["rng"])
while step < args.steps:
    of_judge.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = judge(torch.randn(4, 8)).mean() - judge(maker(torch.randn(4, 4)).detach()).mean()
    scaler.scale(loss).backward()
    scaler.unscale_(of_judge)
    nn.utils.clip_grad_norm_(judge.parameters(), 1.0)
    scaler.step(of_judge)
    of_maker.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = judge(maker(torch.randn(4, 4))).mean()
    scaler.scale(loss).backward()
    scaler.step(of_maker)
    scaler.update()
    step += 1
    if args.save_every and step % args.save_every == 0:
        folder = args.checkpoints / f"step{step}"
        folder.mkdir(exist_ok=True)
        state = {name: thing.state_dict() for name, thing in kept.items()}
        torch.save({**state, "step": step, "rng": torch.get_rng_state()}, folder / f"rank{rank}.pt")
dist.barrier()
dist.destroy_process_group()
os._exit(0)
