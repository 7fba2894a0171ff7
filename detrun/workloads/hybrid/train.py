"""The training loop."""

from __future__ import annotations

import math
import signal
import time

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import detrun
from detrun.workloads.hybrid.checkpoint import Checkpointer, TrainState
from detrun.workloads.hybrid.data import ByteLoader, load_documents
from detrun.workloads.hybrid.ema import WeightAverage
from detrun.workloads.hybrid.faults import FaultSet
from detrun.workloads.hybrid.low_precision import requantize
from detrun.workloads.hybrid.model import HybridModel, Losses
from detrun.workloads.hybrid.moe import balance_experts
from detrun.workloads.hybrid.parallel import GradientReducer, Ranks
from detrun.workloads.hybrid.seeds import seed_all
from detrun.workloads.hybrid.settings import SettingsError, TrainSettings

FINAL_RATE = 0.1
"""Share of the peak learning rate that is left at the last step."""
INITIAL_LOSS_SCALE = 2.0**10
LOSS_SCALE_GROWTH_INTERVAL = 3
"""Steps. Short, so that a run of thirty steps sees the scale grow; torch's own is 2000."""


def learning_rate_factor(steps_done: int, warmup: int, total: int) -> float:
    """Factor on the peak learning rate: linear warm-up, then cosine down to `FINAL_RATE`."""
    if steps_done < warmup:
        return (steps_done + 1) / warmup
    progress = min(1.0, (steps_done - warmup) / max(1, total - warmup))
    return FINAL_RATE + (1.0 - FINAL_RATE) * 0.5 * (1.0 + math.cos(math.pi * progress))


def build_optimizer(model: nn.Module, settings: TrainSettings) -> AdamW:
    """AdamW with decay on matrices only: embedding rows of absent ids stay as they were drawn."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (decayed if parameter.ndim > 1 and "embedding" not in name else plain).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), eps=1e-8, foreach=True)


class Trainer:
    """One rank of a run. After `run`, its attributes hold the final state, which tests look at."""

    def __init__(self, settings: TrainSettings, ranks: Ranks, faults: FaultSet) -> None:
        self.settings = settings
        self.ranks = ranks
        self.faults = faults
        self.step = 0
        self.micro_batch = 0
        self.metrics: dict[str, float] = {}
        torch.manual_seed(settings.seed)  # one seed for all ranks: replicas start alike without a broadcast
        self.model = HybridModel(settings.model).to(ranks.device)
        requantize(self.model, ranks)
        self.optimizer = build_optimizer(self.model, settings)
        self.scheduler = LambdaLR(
            self.optimizer,
            lambda done: learning_rate_factor(done, settings.warmup_steps, settings.steps),
        )
        self.scaler = GradScaler(
            ranks.device.type,
            init_scale=INITIAL_LOSS_SCALE,
            growth_interval=LOSS_SCALE_GROWTH_INTERVAL,
            enabled=settings.loss_scaling,
        )
        self.ema = WeightAverage(self.model, settings.ema)
        self.loader = ByteLoader(
            load_documents(settings.data),
            batch_size=settings.batch_size,
            sequence_length=settings.sequence_length,
            seed=settings.seed,
            rank=ranks.rank,
            world_size=ranks.world_size,
            prefetch=settings.prefetch,
        )
        self.reducer = GradientReducer(self.model, settings.micro_batches, ranks)
        live = TrainState(self.model, self.optimizer, self.scheduler, self.scaler, self.ema, self.loader)
        self.checkpoints = Checkpointer(settings.out / "checkpoints", live, ranks)
        self._stop_requested = False
        seed_all(settings.seed, ranks.rank)
        faults.attach(self)
        resume = faults.change_resume(settings.resume)
        if resume is not None:
            self.step = self.checkpoints.load(resume)
            faults.after_restore()

    def run(self) -> None:
        """Train from the step after the latest one done to the last."""
        self._watch_signals()
        if self.ranks.rank == 0:
            self.settings.out.mkdir(parents=True, exist_ok=True)
            size = sum(parameter.numel() for parameter in self.model.parameters())
            ranks = f"{self.ranks.world_size} ranks on {self.ranks.device.type}"
            self._say(f"{size} parameters, {ranks}, steps {self.step + 1} to {self.settings.steps}")
        while self.step < self.settings.steps:
            started = time.perf_counter()
            metrics = self._train_step()
            self._report(metrics, time.perf_counter() - started)
            if self._save_now():
                break
            self.faults.end_step()
        self.faults.at_exit()

    def _train_step(self) -> dict[str, Tensor]:
        self.step += 1
        self.faults.begin_step()
        tokens = next(self.loader)
        self.faults.change_batch(tokens)
        self.optimizer.zero_grad()
        losses: list[Losses] = []
        count = self.settings.micro_batches
        for self.micro_batch, part in enumerate(tokens.chunk(count)):
            parts: Losses = self.model(part.to(self.ranks.device))
            parts = parts._replace(loss=self.faults.change_loss(parts.loss))
            self.scaler.scale(parts.loss / count).backward()  # type: ignore[no-untyped-call]
            self.reducer.collect(self.micro_batch)
            losses.append(Losses(*(part.detach() for part in parts)))
        self.reducer.reduce()
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
        self.scaler.step(self.optimizer)
        self.scheduler.step()
        scale = self.scaler.get_scale()
        self.scaler.update()
        balance_experts(self.model, self.settings.model.expert_bias, self.ranks)
        requantize(self.model, self.ranks)
        self.ema.update(self.model)
        metrics = {name: torch.stack([getattr(parts, name) for parts in losses]).mean() for name in Losses._fields}
        metrics["grad_norm"] = norm.detach()
        if self.scaler.is_enabled():
            metrics["loss_scale"] = torch.tensor(scale)
        metrics = self.faults.change_metrics(metrics)
        detrun.record(self.step, **metrics)
        return metrics

    def _report(self, metrics: dict[str, Tensor], seconds: float) -> None:
        self.metrics = {name: float(value) for name, value in metrics.items()}
        if self.ranks.rank == 0:
            values = "  ".join(f"{name} {value:.6f}" for name, value in self.metrics.items())
            self._say(f"step {self.step}/{self.settings.steps}  {values}  {1000 * seconds:.0f} ms")

    def _save_now(self) -> bool:
        """Save if it is time to, or if the run is to end here: then true. A signal that comes again changes nothing."""
        every = self.settings.save_every
        signalled = bool(self.settings.save_on_signal) and self.ranks.any(self._stop_requested)
        stop = signalled or self.step == self.settings.exit_at
        if stop or (every and self.step % every == 0):
            self.faults.before_save()
            path = self.checkpoints.save(self.step)
            if self.ranks.rank == 0:
                reason = ", stopping as a signal asked" if signalled else ", stopping as --exit-at asked"
                self._say(f"saved {path}" + (reason if stop else ""))
        return stop

    def _watch_signals(self) -> None:
        def request_stop(*_: object) -> None:
            self._stop_requested = True

        for name in self.settings.save_on_signal:
            number = getattr(signal, f"SIG{name.upper().removeprefix('SIG')}", None)
            if not isinstance(number, signal.Signals):
                raise SettingsError(f"--save-on-signal {name}: there is no such signal here")
            signal.signal(number, request_stop)

    @staticmethod
    def _say(text: str) -> None:
        print(text, flush=True)
