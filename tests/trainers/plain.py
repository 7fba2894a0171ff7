"""A training program of fifty lines that knows nothing of detrun: data parallel over gloo, dropout, clipping."""

import argparse
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--seed", type=int, required=True)
parser.add_argument("--out", required=True)
parser.add_argument("--sleep", type=float, default=0.0)
parser.add_argument("--nudge-at", type=int, default=0)
parser.add_argument("--rank", type=int, default=0)
parser.add_argument("--at", type=int, default=0)
parser.add_argument("--do", choices=["kill", "raise", "hang", "leave", "abort-at-exit"])
args = parser.parse_args()

rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(args.seed)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
if world > 1:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.Generator().manual_seed(args.seed * 100 + rank)
torch.manual_seed(args.seed + 1 + rank)

for step in range(1, args.steps + 1):
    time.sleep(args.sleep)
    if rank == args.rank and step == args.at:
        if args.do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if args.do == "raise":
            raise ValueError("the loss went through the roof")
        if args.do == "hang":
            time.sleep(3600)
    inputs = torch.randn(4, 8, generator=data)
    loss = (model(inputs).squeeze(-1) - inputs.sum(-1).sin()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if step == args.nudge_at and rank == args.rank:
        gradient = next(model.parameters()).grad
        gradient.view(-1)[0] = torch.nextafter(gradient.view(-1)[0], torch.tensor(float("inf")))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.6f}", flush=True)
    if args.do == "leave" and step == args.at:
        break

if world > 1:
    dist.barrier()
    dist.destroy_process_group()
sys.stdout.flush()
if args.do == "abort-at-exit" and rank == args.rank:
    os.abort()
if world > 1:
    # gloo's threads abort one process in a few at the interpreter's own exit.
    os._exit(0)
