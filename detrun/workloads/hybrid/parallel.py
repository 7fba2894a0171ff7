"""Data parallelism: who this rank is, and a gradient sum whose order is written down."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from detrun.workloads.hybrid.operations import ordered_sum
from detrun.workloads.hybrid.settings import SettingsError

GRADIENT_SITE = "gradient_reduction"


@dataclass(frozen=True)
class Ranks:
    """This process among its peers."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def distributed(self) -> bool:
        return self.world_size > 1

    def barrier(self) -> None:
        if self.distributed:
            dist.barrier()

    def any(self, value: bool) -> bool:
        """Whether `value` is true on any rank; every rank must ask."""
        if not self.distributed:
            return value
        return bool(self.maximum(torch.tensor([float(value)], device=self.device)).item())

    def maximum(self, values: Tensor) -> Tensor:
        """Element-wise maximum over the ranks; every rank must ask with the same shape. May return `values`."""
        return self._over_ranks(values, dist.ReduceOp.MAX)

    def total(self, counts: Tensor) -> Tensor:
        """Element-wise sum of int64 `counts` over the ranks: exact, so in no order. May return `counts`."""
        return self._over_ranks(counts, dist.ReduceOp.SUM)

    def _over_ranks(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if not self.distributed:
            return values
        result = values.clone()
        dist.all_reduce(result, op=operation)
        return result


def join(device: str) -> Ranks:
    """Take the place that a launcher's environment gives (RANK, WORLD_SIZE, LOCAL_RANK), or run alone."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    cuda = torch.cuda.is_available() if device == "auto" else device == "cuda"
    if cuda and not torch.cuda.is_available():
        raise SettingsError("--device cuda: torch sees no GPU here")
    place = torch.device("cuda", local_rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(place)
    if world_size > 1:
        # NCCL refuses two ranks on one GPU; gloo does not.
        shared = cuda and int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) > torch.cuda.device_count()
        dist.init_process_group("nccl" if cuda and not shared else "gloo")
    return Ranks(rank, world_size, place)


class GradientReducer:
    """Averages gradients over micro-batches and ranks, in an order that no bucket or topology changes.

    Each micro-batch's gradients are kept as one piece; the pieces of all ranks are gathered and added in the
    order (rank, micro-batch). An all-reduce would leave the order of more than two ranks to the backend, and
    DDP's buckets are laid out anew after its first iteration, which a resumed run repeats at another step.
    """

    def __init__(self, model: nn.Module, micro_batches: int, ranks: Ranks) -> None:
        self.parameters = list(model.parameters())
        self.ranks = ranks
        size = sum(parameter.numel() for parameter in self.parameters)
        self.pieces = torch.zeros(micro_batches, size, device=ranks.device)
        gathered = (ranks.world_size * micro_batches, size)
        self.gathered = torch.zeros(gathered, device=ranks.device) if ranks.distributed else self.pieces

    @property
    def terms(self) -> int:
        """How many pieces the sum has."""
        return self.gathered.shape[0]

    def collect(self, micro_batch: int) -> None:
        """Move the gradients of this micro-batch out of `.grad`."""
        gradients = [torch.zeros_like(p).view(-1) if p.grad is None else p.grad.reshape(-1) for p in self.parameters]
        torch.cat(gradients, out=self.pieces[micro_batch])
        for parameter in self.parameters:
            parameter.grad = None

    def reduce(self) -> None:
        """Put the mean over all pieces into every parameter's `.grad`."""
        if self.ranks.distributed:
            dist.all_gather(list(self.gathered.chunk(self.ranks.world_size)), self.pieces)
        mean: Tensor = ordered_sum(self.gathered, GRADIENT_SITE) / self.terms
        parts = torch.split(mean, [parameter.numel() for parameter in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
