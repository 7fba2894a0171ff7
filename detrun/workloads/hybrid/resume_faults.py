"""Faults that only a save or a resume shows. They take no step: they act at every save or resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from detrun.workloads.hybrid import rng
from detrun.workloads.hybrid.fault import Fault, Option
from detrun.workloads.hybrid.settings import SettingsError

if TYPE_CHECKING:
    from detrun.workloads.hybrid.train import Trainer

LOADER_STREAMS = ("order_generator", "crop_generator")
STREAMS = ("python", "numpy", "torch", "device", *LOADER_STREAMS)


class LoseStream(Fault):
    """One random number stream starts again from the seed."""

    def __init__(self, trainer: Trainer, options: Mapping[str, Option]) -> None:
        super().__init__(trainer, options)
        self.stream = str(options["stream"])
        if self.stream not in STREAMS:
            known = ", ".join(STREAMS)
            raise SettingsError(f"--fault resume-lose-stream: stream={self.stream}: there are {known}")
        self.fresh = {**rng.capture(trainer.ranks.device), **trainer.loader.state_dict()}
        # The loader has drawn its first order already.
        self.fresh["order_generator"] = torch.Generator().manual_seed(trainer.settings.seed).get_state()

    def after_restore(self) -> None:
        if self.stream in LOADER_STREAMS:
            loader = self.trainer.loader
            loader.load_state_dict({**loader.state_dict(), self.stream: self.fresh[self.stream]})
        elif self.stream in self.fresh:
            rng.restore({self.stream: self.fresh[self.stream]}, self.trainer.ranks.device)


class RankZeroStreams(Fault):
    """Every rank gets rank 0's random number streams."""

    def after_restore(self) -> None:
        path = self.trainer.settings.resume
        if path is not None:
            self.trainer.checkpoints.load_streams_of(path, 0)


class DrawAfterRestore(Fault):
    """One draw from torch's CPU stream after it was restored, as building a data iterator makes."""

    def after_restore(self) -> None:
        torch.rand(1)


class LoseMoments(Fault):
    """The optimizer starts with empty moments."""

    def after_restore(self) -> None:
        self.trainer.optimizer.state.clear()


class RestartData(Fault):
    """The loader starts at its beginning."""

    def __init__(self, trainer: Trainer, options: Mapping[str, Option]) -> None:
        super().__init__(trainer, options)
        self.fresh = trainer.loader.state_dict()

    def after_restore(self) -> None:
        self.trainer.loader.load_state_dict(self.fresh)


class ScheduleTwice(Fault):
    """The learning-rate schedule is one step ahead."""

    def after_restore(self) -> None:
        self.trainer.scheduler.step()


class SaveDraws(Fault):
    """Saving draws a random number: a run's result depends on how often it saved."""

    def before_save(self) -> None:
        torch.rand(1)
