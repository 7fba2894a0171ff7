"""Pyro: variational inference. It makes an optimizer for each parameter, in the first step, in the order of a set; the
guide makes its parameters when it is first called; what is saved is the parameter store and the optimizers' state."""

from __future__ import annotations

import nudge
import pyro
import torch
from arguments import arguments
from pyro import distributions
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn

args = arguments()
nudge.install()
pyro.set_rng_seed(args.seed)


class Net(PyroModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.hidden = PyroModule[nn.Linear](4, 8)
        self.hidden.weight = PyroSample(distributions.Normal(0.0, 1.0).expand([8, 4]).to_event(2))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mean = self.head(torch.tanh(self.hidden(x))).squeeze(-1)
        with pyro.plate("data", len(x)):
            return pyro.sample("y", distributions.Normal(mean, 0.5), obs=y)


x = torch.randn(96, 4, generator=torch.Generator().manual_seed(5))
y = x.sum(1).sin()
model = Net()
guide = AutoDiagonalNormal(model)
optimizer = pyro.optim.ClippedAdam({"lr": 1e-2})
inference = SVI(model, guide, optimizer, Trace_ELBO())
step = 0
if args.resume:
    state = torch.load(args.resume, weights_only=False)
    step = state["step"]
    pyro.get_param_store().set_state(state["parameters"])
    guide(x[:8], y[:8])
    optimizer.set_state(state["optimizer"])
    torch.set_rng_state(state["rng"])
while step < args.steps:
    part = slice(8 * step, 8 * step + 8)
    inference.step(x[part], y[part])
    step += 1
    if args.save_every and step % args.save_every == 0:
        state = {"step": step, "parameters": pyro.get_param_store().get_state(), "rng": torch.get_rng_state()}
        torch.save({**state, "optimizer": optimizer.get_state()}, args.checkpoints / f"step-{step}.pyro")
