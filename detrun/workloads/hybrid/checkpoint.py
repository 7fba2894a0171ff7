"""Saves and restores everything that influences the next step, through torch.distributed.checkpoint.

The state is one flat dictionary of tensors. What replicas share (parameters, optimizer, schedule) has one key
for all ranks; what each rank has of its own (RNG streams, loader) has the rank in its key: under a common key
DCP would keep one rank's copy and give it to all. Only tensors: DCP loads those with `weights_only`, and
anything else without.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from detrun.workloads.hybrid import rng
from detrun.workloads.hybrid.data import ByteLoader
from detrun.workloads.hybrid.parallel import Ranks
from detrun.workloads.hybrid.settings import SettingsError

MOMENTS = ("exp_avg", "exp_avg_sq")


class Checkpointer:
    """Checkpoints of one run in `{out}/checkpoints/step-<k>`."""

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: AdamW,
        scheduler: LambdaLR,
        loader: ByteLoader,
        ranks: Ranks,
    ) -> None:
        self.folder = folder
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.loader = loader
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
        shared, own = self._shared(), self._own(self.ranks.rank)
        self._read({**shared, **own}, path)
        self._restore_shared(shared)
        self._restore_own(own)
        return int(step)

    def load_streams_of(self, path: Path, rank: int) -> None:
        """Restore another rank's RNG streams. Never right; a planted fault uses it."""
        own = self._own(rank)
        self._read(own, path)
        rng.restore(_below(f"rank{rank:05d}.rng.", own), self.ranks.device)

    def _read(self, state: dict[str, Tensor], path: Path) -> None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)  # alone on purpose
                dcp_load(state, storage_reader=FileSystemReader(path), no_dist=not self.ranks.distributed)
        except (CheckpointException, RuntimeError, ValueError) as error:
            reason = next((line for line in reversed(str(error).splitlines()) if line.strip()), "unreadable")
            raise SettingsError(f"--resume {path}: does not fit this model or is damaged ({reason.strip()})") from error

    def _progress(self, step: int) -> dict[str, Tensor]:
        return {"progress": torch.tensor([step, self.ranks.world_size])}

    def _shared(self) -> dict[str, Tensor]:
        """Copies, so that a load that fails half-way leaves the run untouched."""
        state = {f"model.{name}": value.detach().clone() for name, value in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            # Before the first step AdamW has no state; a checkpoint to load from then needs places to load
            # into.
            kept: dict[str, Tensor] = self.optimizer.state.get(parameter, {})
            state[f"optimizer.{name}.step"] = kept.get("step", torch.zeros(())).clone()
            for moment in MOMENTS:
                state[f"optimizer.{name}.{moment}"] = kept.get(moment, torch.zeros_like(parameter)).clone()
        schedule = self.scheduler.state_dict()
        state["scheduler.counts"] = torch.tensor([schedule["last_epoch"], schedule["_step_count"]])
        state["scheduler.rates"] = torch.tensor(schedule["_last_lr"], dtype=torch.float64)
        return state

    def _restore_shared(self, state: dict[str, Tensor]) -> None:
        self.model.load_state_dict(_below("model.", state))
        packed: dict[str, Any] = self.optimizer.state_dict()
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        ordered = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        packed["state"] = {
            index: _below(f"optimizer.{names[parameter]}.", state) for index, parameter in enumerate(ordered)
        }
        rates = state["scheduler.rates"].tolist()
        for group, rate in zip(packed["param_groups"], rates, strict=True):
            group["lr"] = rate
        self.optimizer.load_state_dict(packed)
        epoch, count = state["scheduler.counts"].tolist()
        schedule = self.scheduler.state_dict()
        self.scheduler.load_state_dict({**schedule, "last_epoch": epoch, "_step_count": count, "_last_lr": rates})

    def _own(self, rank: int) -> dict[str, Tensor]:
        streams = {f"rng.{name}": value for name, value in rng.capture(self.ranks.device).items()}
        position = {f"loader.{name}": value for name, value in self.loader.state_dict().items()}
        return {f"rank{rank:05d}.{name}": value for name, value in {**streams, **position}.items()}

    def _restore_own(self, state: dict[str, Tensor]) -> None:
        prefix = f"rank{self.ranks.rank:05d}."
        self.loader.load_state_dict(_below(f"{prefix}loader.", state))
        rng.restore(_below(f"{prefix}rng.", state), self.ranks.device)


def _below(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}
