"""Pyro: variational inference. It makes an optimizer for each parameter in the first step, in the order of a set; the
guide makes its parameters when it is first called."""

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
for step in range(args.steps):
    part = slice(8 * step, 8 * step + 8)
    inference.step(x[part], y[part])
