"""GPyTorch: an exact Gaussian process. Its modules have a `__call__` of their own."""

from __future__ import annotations

import gpytorch
import nudge
import torch
from arguments import arguments
from torch import Tensor

args = arguments()
nudge.install()
torch.manual_seed(args.seed)
x = torch.linspace(0, 1, 30)
y = torch.sin(6.28 * x) + 0.1 * torch.randn(30)


class Process(gpytorch.models.ExactGP):  # type: ignore[misc]
    def __init__(self, likelihood: gpytorch.likelihoods.Likelihood) -> None:
        super().__init__(x, y, likelihood)
        self.mean = gpytorch.means.ConstantMean()
        self.covariance = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.covariance(x))


likelihood = gpytorch.likelihoods.GaussianLikelihood()
model = Process(likelihood)
model.train()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
step = 0
if args.resume:
    state = torch.load(args.resume)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
while step < args.steps:
    optimizer.zero_grad()
    loss = -objective(model(x), y)
    loss.backward()
    optimizer.step()
    step += 1
    if args.save_every and step % args.save_every == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, args.checkpoints / f"gp_{step}.pth")
