"""A training program that knows nothing of detrun: data parallel over gloo, dropout, clipping, saving, resuming."""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

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
parser.add_argument("--save-every", type=int, default=0)
parser.add_argument("--pad", type=float, default=0.0, help="megabytes that a checkpoint is larger by")
parser.add_argument("--resume", help="a checkpoint's folder, or `auto`: the newest in OUT/checkpoints")
parser.add_argument("--leave-on", help="a signal to save and leave at, such as TERM")
parser.add_argument("--ignore", help="a signal to ignore")
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

checkpoints = Path(args.out) / "checkpoints"
asked_to_leave = []
if args.ignore:
    signal.signal(getattr(signal, f"SIG{args.ignore}"), signal.SIG_IGN)
if args.leave_on:
    signal.signal(getattr(signal, f"SIG{args.leave_on}"), lambda number, _frame: asked_to_leave.append(number))


def save(step):
    folder = checkpoints / f"step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "data": data.get_state(),
        "pad": torch.zeros(int(args.pad * 250_000)),
    }
    torch.save(state, folder / f"rank{rank}.pt")


def everybody_is_asked(asked):
    answer = torch.tensor([float(bool(asked))])
    if world > 1:
        dist.all_reduce(answer, dist.ReduceOp.MAX)
    return bool(answer.item())


done = 0
resume = args.resume
if resume == "auto":
    found = sorted(checkpoints.glob("step-*"), key=lambda path: int(path.name[5:]))
    resume = found[-1] if found else None
if resume:
    state = torch.load(Path(resume) / f"rank{rank}.pt", weights_only=True)
    done = state["step"]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    data.set_state(state["data"])

for step in range(done + 1, args.steps + 1):
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
    leaving = bool(args.leave_on) and everybody_is_asked(asked_to_leave)
    if leaving or (args.save_every and step % args.save_every == 0):
        save(step)
    if leaving or (args.do == "leave" and step == args.at):
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
