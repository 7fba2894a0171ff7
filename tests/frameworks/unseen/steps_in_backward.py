"""Plain PyTorch that saves the memory of gradients: each parameter has an optimizer that steps inside the backward
pass."""

from __future__ import annotations

import nudge
import torch
from arguments import arguments
from torch import Tensor, nn

args = arguments()
nudge.install()
torch.manual_seed(args.seed)
m = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 4))
optimizers = {name: torch.optim.AdamW([p], lr=1e-2) for name, p in m.named_parameters()}
names = {p: name for name, p in m.named_parameters()}


def step_now(parameter: Tensor) -> None:
    optimizers[names[parameter]].step()
    optimizers[names[parameter]].zero_grad()


for parameter in m.parameters():
    parameter.register_post_accumulate_grad_hook(step_now)
step = 0
if args.resume:
    d = torch.load(args.resume)
    m.load_state_dict(d["m"])
    for name, optimizer in optimizers.items():
        optimizer.load_state_dict(d["o"][name])
    step = d["step"]
    torch.set_rng_state(d["rng"])
while step < args.steps:
    x, y = torch.randn(4, 8), torch.randint(0, 4, (4,))
    nn.functional.cross_entropy(m(x), y).backward()
    step += 1
    if args.save_every and step % args.save_every == 0:
        kept = {name: optimizer.state_dict() for name, optimizer in optimizers.items()}
        state = {"m": m.state_dict(), "o": kept, "step": step, "rng": torch.get_rng_state()}
        torch.save(state, args.checkpoints / f"step-{step}.pt")
