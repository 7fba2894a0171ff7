"""Every random number stream of a process, seeded, and written as tensors of fixed shape.

Tensors, not pickled tuples: a checkpoint then loads with `weights_only`, and a comparison sees plain bytes.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_all(seed: int, rank: int) -> None:
    """Give each rank its own streams. Model weights are drawn before, from a seed that all ranks share."""
    random.seed(seed * 100_003 + rank)
    np.random.seed((seed * 100_003 + rank) % 2**32)
    torch.manual_seed(seed * 100_003 + rank)  # every device's stream too


def capture(device: torch.device) -> dict[str, Tensor]:
    """State of the global streams: `python` int64 [628], `numpy` int64 [627], `torch`, `device` uint8."""
    streams = {"python": _encode_python(), "numpy": _encode_numpy(), "torch": torch.get_rng_state()}
    if device.type == "cuda":
        streams["device"] = torch.cuda.get_rng_state(device)
    return streams


def restore(streams: dict[str, Tensor], device: torch.device) -> None:
    """Inverse of `capture`; a stream that is not in `streams` is left as it is."""
    if "python" in streams:
        words = streams["python"].tolist()
        gauss = None if not words[626] else _as_float(words[627])
        random.setstate((words[0], tuple(words[1:626]), gauss))
    if "numpy" in streams:
        words = streams["numpy"].tolist()
        key = np.array(words[:624], dtype=np.uint32)
        np.random.set_state(("MT19937", key, words[624], words[625], _as_float(words[626])))
    if "torch" in streams:
        torch.set_rng_state(streams["torch"])
    if "device" in streams:
        torch.cuda.set_rng_state(streams["device"], device)


def encode_pcg64(generator: np.random.Generator) -> Tensor:
    """State of a numpy Generator over PCG64: uint8 [37]."""
    state: dict[str, Any] = dict(generator.bit_generator.state)
    packed = (
        state["state"]["state"].to_bytes(16, "little")
        + state["state"]["inc"].to_bytes(16, "little")
        + bytes([state["has_uint32"]])
        + state["uinteger"].to_bytes(4, "little")
    )
    return torch.tensor(list(packed), dtype=torch.uint8)


def decode_pcg64(generator: np.random.Generator, packed: Tensor) -> None:
    """Put `generator` into the state that `encode_pcg64` wrote."""
    raw = bytes(packed.tolist())
    generator.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": int.from_bytes(raw[:16], "little"), "inc": int.from_bytes(raw[16:32], "little")},
        "has_uint32": raw[32],
        "uinteger": int.from_bytes(raw[33:37], "little"),
    }


def _encode_python() -> Tensor:
    version, words, gauss = random.getstate()
    return torch.tensor([version, *words, int(gauss is not None), _as_bits(gauss or 0.0)])


def _encode_numpy() -> Tensor:
    _, key, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return torch.tensor([*np.asarray(key).tolist(), int(position), int(has_gauss), _as_bits(float(gauss))])


def _as_bits(value: float) -> int:
    return int(np.float64(value).view(np.int64))


def _as_float(bits: int) -> float:
    return float(np.int64(bits).view(np.float64))
