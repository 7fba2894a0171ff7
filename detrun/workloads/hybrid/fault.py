"""What a planted fault is: seams in the training loop, all of them empty, and a way to change single bits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from detrun.workloads.hybrid.train import Trainer

Option = int | float | str
Kept = TypeVar("Kept")


class Fault:
    """One fault on this rank; subclasses override the seams they need. `trainer.step` is under way."""

    def __init__(self, trainer: Trainer, options: Mapping[str, Option]) -> None:
        self.trainer = trainer
        self.options = options
        self.first_step = int(options.get("step", 0))

    @property
    def is_first_step(self) -> bool:
        return self.trainer.step == self.first_step

    @property
    def has_begun(self) -> bool:
        return self.trainer.step >= self.first_step

    def begin_step(self) -> None:
        """Before the step's batch is drawn."""

    def change_batch(self, tokens: Tensor) -> None:
        """May change the step's tokens [batch, T + 2] in place."""

    def change_loss(self, loss: Tensor) -> Tensor:
        """The loss of one micro-batch, before its backward pass."""
        return loss

    def after_optimizer(self) -> None:
        """After the update, before anyone who watches optimizer steps from outside is called."""

    def change_metrics(self, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """What is about to be recorded and printed."""
        return metrics

    def end_step(self) -> None:
        """After the step is recorded, printed and, if it is time to, saved."""

    def before_save(self) -> None:
        """Before a checkpoint's state is collected."""

    def change_resume(self, path: Path) -> Path | None:
        """The checkpoint to resume from instead of the one asked for; None resumes from none."""
        return path

    def after_restore(self) -> None:
        """After a checkpoint was loaded, before its first step."""

    def at_exit(self) -> None:
        """After the last step."""


def keep(value: Kept) -> Callable[[], Kept]:
    """`value` behind a call: who looks through a program's objects for training state finds nothing of a fault's."""
    return lambda: value


def change_bits(tensor: Tensor, index: int, flip: int = 0, add: int = 0) -> None:
    """Change the bit pattern of one float32 element, as a bad memory cell would: bits = (bits ^ flip) + add.

    On the CPU it writes to memory directly, so that no operator is dispatched, no hook called and no version
    counted.

    Args:
        tensor: float32, contiguous.
        index: position of the element in memory order.
        flip: mask of bits to invert.
        add: 1 moves a finite value by one ULP away from zero.
    """
    if tensor.dtype != torch.float32 or not tensor.is_contiguous():
        raise ValueError("bits are changed in contiguous float32 tensors only")
    if tensor.device.type == "cpu":
        word = ctypes.c_int32.from_address(tensor.data_ptr() + 4 * index)
        word.value = (word.value ^ flip) + add
    else:
        words = tensor.data.view(-1).view(torch.int32)
        words[index] = (words[index] ^ flip) + add


def largest(tensor: Tensor) -> int:
    """Memory position of the element of greatest magnitude: its last bit weighs most in later sums. On the CPU it reads
    contiguous float32 memory directly, so that looking for it is no operation of the program."""
    if tensor.device.type == "cpu" and tensor.dtype == torch.float32 and tensor.is_contiguous():
        memory = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
        return int(np.abs(np.ctypeslib.as_array(memory)).argmax())
    return int(tensor.detach().abs().argmax())
