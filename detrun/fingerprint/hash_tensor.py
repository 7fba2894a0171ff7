"""`torch.hash_tensor` of a tensor's parts: only to hold a trace against one that somebody else's tool has written.

It is no evidence. It is an exclusive or of the elements widened to 64 bits: it does not see elements or rows in another
order, nor equal changes in an even number of elements, and it ignores dtype and shape; of 8-bit formats, which it does
not take itself, the values widened to float64 are used, as other tools do. No verdict rests on it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from detrun.fingerprint.tensors import named_parts

ALGORITHM = "torch.hash_tensor"
"""What it is called wherever it is shown, so that nobody takes it for a digest."""


def xor_hashes(tensor: Tensor) -> dict[str, int | None]:
    """The exclusive or of each part of a tensor, by the part's name ("" for a plain tensor): an unsigned integer of 64
    bits. None for a part that has no memory or no elements, or of a dtype that has no values to widen.

    Waits for the device.
    """
    return {part.name or "": None if part.memory is None else _xor(part.memory) for part in named_parts(tensor)}


def _xor(memory: Tensor) -> int | None:
    if memory.numel() == 0:
        return None
    try:
        return int(torch.hash_tensor(memory).item())
    except (NotImplementedError, RuntimeError):
        pass
    try:
        return int(torch.hash_tensor(memory.double()).item())
    except (NotImplementedError, RuntimeError):  # numbers of 4 bits
        return None
