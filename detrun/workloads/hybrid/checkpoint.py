"""Saves and restores everything that influences the next step, through torch.distributed.checkpoint.

The state is one flat dictionary of tensors. What replicas share (parameters, buffers, optimizer, schedule, loss scale,
average) has one key for all ranks; what each rank has of its own (RNG streams, loader) has the rank in its key: under a
common key DCP would keep one rank's copy and give it to all. Only tensors: DCP loads those with `weights_only`, and
anything else without. Low-precision copies of weights are not saved: they are made from what is.
"""

from __future__ import annotations

import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import detrun
from detrun.workloads.hybrid.data import ByteLoader
from detrun.workloads.hybrid.ema import WeightAverage
from detrun.workloads.hybrid.low_precision import rebuild
from detrun.workloads.hybrid.parallel import Ranks
from detrun.workloads.hybrid.settings import SettingsError

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class TrainState:
    """The objects of a run that hold what a later step depends on; the process's own streams come beside them."""

    model: nn.Module
    optimizer: AdamW
    scheduler: LambdaLR
    scaler: GradScaler
    ema: WeightAverage
    loader: ByteLoader


class Checkpointer:
    """Checkpoints of one run in `{out}/checkpoints/step-<k>`."""

    def __init__(self, folder: Path, live: TrainState, ranks: Ranks) -> None:
        self.folder = folder
        self.live = live
        self.ranks = ranks

    def save(self, step: int) -> Path:
        """Write `step-<step>`, complete or not at all: its name comes last, by a rename. All ranks call."""
        final = self.folder / f"step-{step}"
        # Hidden and without a step pattern of its own, so that a killed save is never taken for a checkpoint.
        partial, replaced = self.folder / f".saving-{step}", self.folder / f".replaced-{step}"
        if self.ranks.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in (partial, replaced):
                shutil.rmtree(leftover, ignore_errors=True)
        self.ranks.barrier()
        state = {**self._shared(), **self._progress(step), **self._own(self.ranks.rank)}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)  # alone on purpose
            dcp_save(state, storage_writer=FileSystemWriter(partial), no_dist=not self.ranks.distributed)
        self.ranks.barrier()
        if self.ranks.rank == 0:
            if final.exists():
                final.rename(replaced)
            partial.rename(final)
            shutil.rmtree(replaced, ignore_errors=True)
        self.ranks.barrier()
        return final

    def load(self, path: Path) -> int:
        """Restore everything from `path`, RNG streams last so that nothing draws after; returns its step."""
        if not (path / ".metadata").is_file():
            raise SettingsError(f"--resume {path}: no complete checkpoint there")
        progress = self._progress(0)
        self._read(progress, path)
        step, world_size = progress["progress"].tolist()
        if world_size != self.ranks.world_size:
            raise SettingsError(
                f"--resume {path}: was saved by {world_size} ranks and cannot continue on"
                f" {self.ranks.world_size}: each rank's random streams and data position are its own"
            )
        shared, own = self._shared(), self._places(path, self.ranks.rank)
        self._read({**shared, **own}, path)
        self._restore_shared(shared)
        self._restore_own(own)
        return int(step)

    def load_streams_of(self, path: Path, rank: int) -> None:
        """Restore another rank's RNG streams. Never right; a planted fault uses it."""
        own = self._places(path, rank)
        self._read(own, path)
        device = str(self.ranks.device)
        streams = _below(f"rank{rank:05d}.rng.", own).items()
        # The other rank's device has another number.
        detrun.set_rng_state({device if name.startswith("cuda:") else name: value for name, value in streams})

    def _read(self, state: dict[str, Tensor], path: Path) -> None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)  # alone on purpose
                dcp_load(state, storage_reader=FileSystemReader(path), no_dist=not self.ranks.distributed)
        except (CheckpointException, RuntimeError, ValueError) as error:
            reason = next((line for line in reversed(str(error).splitlines()) if line.strip()), "unreadable")
            raise SettingsError(f"--resume {path}: does not fit this model or is damaged ({reason.strip()})") from error

    def _places(self, path: Path, rank: int) -> dict[str, Tensor]:
        """Tensors to load a rank's own state into, under the names that were saved: ranks have different devices."""
        saved = FileSystemReader(path).read_metadata().state_dict_metadata
        prefix = f"rank{rank:05d}."
        places = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in saved.items()
            if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }
        missing = sorted(self._own(rank).keys() - places.keys()) if rank == self.ranks.rank else []
        if missing:
            raise SettingsError(f"--resume {path}: does not fit this run: it has no {', '.join(missing)}")
        return places

    def _progress(self, step: int) -> dict[str, Tensor]:
        return {"progress": torch.tensor([step, self.ranks.world_size])}

    def _shared(self) -> dict[str, Tensor]:
        """Copies, so that a load that fails half-way leaves the run untouched."""
        live = self.live
        state = {f"model.{name}": value.detach().clone() for name, value in live.model.state_dict().items()}
        for name, parameter in live.model.named_parameters():
            # Before the first step AdamW has no state; a checkpoint to load from then needs places to load
            # into.
            kept: dict[str, Tensor] = live.optimizer.state.get(parameter, {})
            state[f"optimizer.{name}.step"] = kept.get("step", torch.zeros(())).clone()
            for moment in MOMENTS:
                state[f"optimizer.{name}.{moment}"] = kept.get(moment, torch.zeros_like(parameter)).clone()
        schedule = live.scheduler.state_dict()
        state["scheduler.counts"] = torch.tensor([schedule["last_epoch"], schedule["_step_count"]])
        state["scheduler.rates"] = torch.tensor(schedule["_last_lr"], dtype=torch.float64)
        scaling = live.scaler.state_dict()
        if scaling:
            state["scaler.scale"] = torch.tensor(scaling["scale"], dtype=torch.float64)
            state["scaler.growth_tracker"] = torch.tensor(scaling["_growth_tracker"])
        state.update({f"ema.{name}": value.clone() for name, value in live.ema.weights.items()})
        return state

    def _restore_shared(self, state: dict[str, Tensor]) -> None:
        live = self.live
        live.model.load_state_dict(_below("model.", state))
        rebuild(live.model)
        packed: dict[str, Any] = live.optimizer.state_dict()
        names = {parameter: name for name, parameter in live.model.named_parameters()}
        ordered = [parameter for group in live.optimizer.param_groups for parameter in group["params"]]
        packed["state"] = {
            index: _below(f"optimizer.{names[parameter]}.", state) for index, parameter in enumerate(ordered)
        }
        rates = state["scheduler.rates"].tolist()
        for group, rate in zip(packed["param_groups"], rates, strict=True):
            group["lr"] = rate
        live.optimizer.load_state_dict(packed)
        epoch, count = state["scheduler.counts"].tolist()
        schedule = live.scheduler.state_dict()
        live.scheduler.load_state_dict({**schedule, "last_epoch": epoch, "_step_count": count, "_last_lr": rates})
        if "scaler.scale" in state:
            scale, tracker = state["scaler.scale"].item(), state["scaler.growth_tracker"].item()
            live.scaler.load_state_dict({**live.scaler.state_dict(), "scale": scale, "_growth_tracker": tracker})
        live.ema.weights.update(_below("ema.", state))

    def _own(self, rank: int) -> dict[str, Tensor]:
        streams = {f"rng.{name}": value for name, value in detrun.rng_state().items()}
        position = {f"loader.{name}": value for name, value in self.live.loader.state_dict().items()}
        return {f"rank{rank:05d}.{name}": value for name, value in {**streams, **position}.items()}

    def _restore_own(self, state: dict[str, Tensor]) -> None:
        prefix = f"rank{self.ranks.rank:05d}."
        self.live.loader.load_state_dict(_below(f"{prefix}loader.", state))
        detrun.set_rng_state(_below(f"{prefix}rng.", state))


def _below(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}
