"""pytorch-ignite: a supervised trainer whose checkpoint holds the engine's iteration, and no random numbers."""

from __future__ import annotations

import nudge
import torch
from arguments import arguments
from ignite.engine import Engine, Events, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver, global_step_from_engine
from ignite.utils import manual_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

args = arguments()
nudge.install()
manual_seed(args.seed)
made = torch.Generator().manual_seed(5)
data = TensorDataset(torch.randn(32, 8, generator=made), torch.randint(0, 4, (32,), generator=made))
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss())
state = {"model": model, "optimizer": optimizer, "schedule": schedule, "trainer": trainer}


@trainer.on(Events.ITERATION_COMPLETED)
def after_step(engine: Engine) -> None:
    schedule.step()


if args.save_every:
    step = global_step_from_engine(trainer, Events.ITERATION_COMPLETED)
    saver = Checkpoint(
        state, DiskSaver(args.checkpoints, require_empty=False), n_saved=None, global_step_transform=step
    )
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=args.save_every), saver)
if args.resume:
    Checkpoint.load_objects(state, torch.load(args.resume))


@trainer.on(Events.ITERATION_COMPLETED)
def stop(engine: Engine) -> None:
    if engine.state.iteration >= args.steps:
        engine.terminate()


trainer.run(DataLoader(data, batch_size=4, shuffle=True), max_epochs=2)
