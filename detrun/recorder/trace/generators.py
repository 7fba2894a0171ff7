"""The state of the random number generator that an operator is about to draw from."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from detrun.recorder.trace.fingerprints import digest_of_bytes


def generator_state(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes | None:
    """The digest of the state: of the generator among the arguments, or of the default one of the device that the
    arguments name or lie on. None where it cannot be read now. Draws nothing and waits for no device."""
    generator = generator_of(args, kwargs)
    if generator is None:
        return None
    try:
        state = generator.get_state()
    except RuntimeError:  # a graph is being captured
        return None
    return digest_of_bytes((ctypes.c_char * state.nbytes).from_address(state.data_ptr()))


def generator_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Generator | None:
    """The generator itself."""
    device: torch.device | None = None
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Generator):
            return value
        if isinstance(value, torch.device):
            device = value
        elif device is None and isinstance(value, Tensor):
            device = value.device
    if device is None or device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return None
