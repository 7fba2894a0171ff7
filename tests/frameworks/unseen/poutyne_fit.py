"""Poutyne: `Model.fit` with a checkpoint after each epoch of three batches. It saves no random numbers."""

from __future__ import annotations

from typing import Any

import nudge
import poutyne
import torch
from arguments import arguments
from torch import Tensor, nn

args = arguments()
nudge.install()
poutyne.set_seeds(args.seed)
made = torch.Generator().manual_seed(5)
x, y = torch.randn(12, 8, generator=made), torch.randint(0, 3, (12,), generator=made)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(8, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.dropout(torch.tanh(self.hidden(x)), 0.1, self.training))


net = Net()
model = poutyne.Model(net, torch.optim.Adam(net.parameters(), 1e-2), "cross_entropy")
done = 0


class Save(poutyne.Callback):
    def on_epoch_end(self, epoch: int, _logs: Any) -> None:
        folder = args.checkpoints / f"step-{3 * epoch}"
        folder.mkdir()
        model.save_weights(folder / "weights.pt")
        model.save_optimizer_state(folder / "optimizer.pt")
        if args.keep_rng:
            torch.save(torch.get_rng_state(), folder / "rng.pt")


if args.resume:
    done = int(args.resume.name.removeprefix("step-")) // 3
    model.load_weights(args.resume / "weights.pt")
    model.load_optimizer_state(args.resume / "optimizer.pt")
    if args.keep_rng:
        torch.set_rng_state(torch.load(args.resume / "rng.pt"))
callbacks = [poutyne.ClipNorm(net.parameters(), 1.0), *([Save()] if args.save_every else [])]
epochs = args.steps // 3
model.fit(x, y, initial_epoch=done + 1, epochs=epochs, batch_size=4, verbose=False, callbacks=callbacks)
