"""Faults in the random number streams and the data that a run goes on with after a save or a resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

import detrun
from detrun.workloads.hybrid.data import GLOBAL_STREAMS
from detrun.workloads.hybrid.fault import Fault, Option, keep
from detrun.workloads.hybrid.settings import SettingsError

if TYPE_CHECKING:
    from detrun.workloads.hybrid.train import Trainer

LOADER_STREAMS = ("order_generator", "crop_generator")
PROCESS_STREAMS = {"python": "python", "numpy": "numpy", "torch": "torch_cpu", "device": "devices"}
"""The option's word for each, and that of `detrun.rng_state`."""
STREAMS = (*PROCESS_STREAMS, *LOADER_STREAMS)


class LoseStream(Fault):
    """One random number stream starts again from the seed."""

    def __init__(self, trainer: Trainer, options: Mapping[str, Option]) -> None:
        super().__init__(trainer, options)
        self.stream = str(options["stream"])
        there = [stream for stream in STREAMS if stream != "device" or trainer.ranks.device.type != "cpu"]
        if self.stream not in there:
            raise SettingsError(
                f"--fault resume-lose-stream: stream={self.stream}: on this device there are {', '.join(there)}"
            )
        if self.stream == "order_generator":  # the loader has drawn its first order already
            fresh = {self.stream: torch.Generator().manual_seed(trainer.settings.seed).get_state()}
        elif self.stream in LOADER_STREAMS:
            fresh = {self.stream: trainer.loader.state_dict()[self.stream]}
        else:
            fresh = detrun.rng_state(include=[PROCESS_STREAMS[self.stream]])
        self.fresh = keep(fresh)

    def after_restore(self) -> None:
        if self.stream in LOADER_STREAMS:
            loader = self.trainer.loader
            loader.load_state_dict({**loader.state_dict(), **self.fresh()})
        else:
            detrun.set_rng_state(self.fresh(), include=[PROCESS_STREAMS[self.stream]])


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


class RestartData(Fault):
    """The loader starts at its beginning."""

    def __init__(self, trainer: Trainer, options: Mapping[str, Option]) -> None:
        super().__init__(trainer, options)
        self.fresh = keep(trainer.loader.state_dict())

    def after_restore(self) -> None:
        self.trainer.loader.load_state_dict(self.fresh())


class SkipBatch(Fault):
    """The loader's position counts batches that no step used."""

    def after_restore(self) -> None:
        for _ in range(int(self.options["batches"])):
            next(self.trainer.loader)


class CountPrefetched(Fault):
    """The loader's position counts what it had read ahead, which was lost with the process."""

    def __init__(self, trainer: Trainer, options: Mapping[str, Option]) -> None:
        super().__init__(trainer, options)
        if not trainer.settings.prefetch:
            raise SettingsError("--fault resume-count-prefetched: needs --prefetch")

    def after_restore(self) -> None:
        for _ in range(self.trainer.settings.prefetch):
            next(self.trainer.loader)


class RepeatBatch(Fault):
    """The loader's position was taken before the last step's batch was counted.

    No checkpoint holds that position: the loader gets there again from its beginning.
    """

    def __init__(self, trainer: Trainer, options: Mapping[str, Option]) -> None:
        super().__init__(trainer, options)
        self.loader = keep(trainer.loader.state_dict())
        self.streams = keep(detrun.rng_state(include=GLOBAL_STREAMS))

    def after_restore(self) -> None:
        detrun.set_rng_state(self.streams(), include=GLOBAL_STREAMS)
        self.trainer.loader.load_state_dict(self.loader())
        for _ in range(self.trainer.step - 1):
            next(self.trainer.loader)


class SaveDraws(Fault):
    """Saving draws a random number: a run's result depends on how often it saved."""

    def before_save(self) -> None:
        torch.rand(1)
