"""A training program that computes something else in some of its launches: a fault that does not always come back.

FILE counts the launches; those that --launches names have another scale in step 2.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--seed", type=int, required=True)
parser.add_argument("--out", required=True)
parser.add_argument("--count", type=Path, required=True, metavar="FILE")
parser.add_argument("--launches", type=int, nargs="*", default=[])
args = parser.parse_args()

launch = int(args.count.read_text()) + 1 if args.count.exists() else 1
args.count.write_text(str(launch))

torch.manual_seed(args.seed)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, args.steps + 1):
    faulty = launch in args.launches and step == 2
    inputs = torch.randn(16, 4) * (1.5 if faulty else 1.0)
    loss = model(inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f}", flush=True)
