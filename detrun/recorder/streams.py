"""Rows of a state file for random number streams: the process-wide ones and generators that a program made itself.

Reading them draws nothing. What is kept of each is enough to tell by how many draws two of them are apart.
"""

from __future__ import annotations

import json
import random
import struct
import sys
from array import array
from typing import Any

import numpy as np
import torch

from detrun.fingerprint.host import digest_tensors, memory_of
from detrun.recorder.rng import UNSEEDED, RngStreams
from detrun.records.state_row import Standing, StateRow

Row = tuple[StateRow, bytes]

_WORDS = 624
_HOST_STATE = 5056
"""Bytes of a torch generator's state on the host."""
_DEVICE_STATE = 16
"""Bytes of a device's: seed and offset."""
_SYSTEM_ENTROPY = 1 << 64
"""numpy asks the system for 128 bits where nobody gives it a seed; nobody writes such a number as a seed."""
_DEVICES = ("cuda", "xpu")


def global_rows(rng_streams: RngStreams) -> list[Row]:
    """A row and its bytes for `python`, `numpy` (the legacy global one), `torch_cpu`, and `cuda:<i>` for every device
    whose context exists. Their `info`: which generator, and whether nobody ever seeded it."""
    digests = rng_streams.digests()
    found: list[tuple[str, str, bytes]] = [("python", *_python(random.getstate()))]
    if "numpy.random" in sys.modules:
        found.append(("numpy", *_legacy(np.random.get_state(legacy=False))))
    found.append(("torch_cpu", *_torch(torch.default_generator)))
    found += [(name, *_torch(generator)) for name, generator in _device_generators()]
    rows = [_row(name, kind, raw, digests.get(name) == UNSEEDED) for name, kind, raw in found]
    idle = rng_streams.idle()
    for name, read in rng_streams.named.items():
        made = generator_row(name, read(), "soft" if name in idle else "hard")
        if made is not None:
            made[0].info["idle"] = name in idle
            rows.append(made)
    return rows


def generator_row(name: str, generator: object, standing: Standing = "hard") -> Row | None:
    """The row of a torch.Generator, a numpy Generator, RandomState or BitGenerator, a random.Random, or of the saved
    state of a torch generator (a uint8 tensor on the host). None if it is none of these or has no state of its own."""
    read = _read(generator)
    return None if read is None else _row(name, read[0], read[1], _is_unseeded(generator), standing)


def is_generator(kind: type) -> bool:
    """Do objects of this type have a random number stream of their own?"""
    if issubclass(kind, torch.Generator):
        return True
    if issubclass(kind, random.Random):
        return not issubclass(kind, random.SystemRandom)
    made = sys.modules.get("numpy.random")
    return made is not None and issubclass(kind, (made.Generator, made.RandomState, made.BitGenerator))


def stream_of(generator: object) -> object:
    """What holds the state: numpy's generators may share one bit generator."""
    return getattr(generator, "bit_generator", None) or getattr(generator, "_bit_generator", None) or generator


def is_global(generator: object) -> bool:
    """Is it one of the process-wide streams, which have rows of their own?"""
    if generator is torch.default_generator or generator is getattr(random, "_inst", None):
        return True
    if isinstance(generator, torch.Generator):
        return any(generator is known for _, known in _device_generators())
    made = sys.modules.get("numpy.random")
    return made is not None and stream_of(generator) is stream_of(made.mtrand._rand)


def is_saved_state(tensor: torch.Tensor) -> bool:
    """Does it look like the state of a torch generator?"""
    return tensor.dtype is torch.uint8 and tensor.dim() == 1 and tensor.numel() in (_HOST_STATE, _DEVICE_STATE)


def _read(generator: object) -> tuple[str, bytes] | None:
    if isinstance(generator, torch.Generator):
        return _torch(generator)
    if isinstance(generator, torch.Tensor):
        if not is_saved_state(generator) or not generator.is_cpu:
            return None
        kind = "mt19937-torch" if generator.numel() == _HOST_STATE else "philox-cuda"
        return kind, _bytes(generator)
    if isinstance(generator, random.Random):
        if isinstance(generator, random.SystemRandom):
            return None
        return _python(random.Random.getstate(generator))
    made = sys.modules.get("numpy.random")
    if made is None:
        return None
    if isinstance(generator, made.RandomState):
        return _legacy(generator.get_state(legacy=False))
    if isinstance(generator, (made.Generator, made.BitGenerator)):
        return _bit_generator(getattr(stream_of(generator), "state", None))
    return None


def _python(state: tuple[Any, ...]) -> tuple[str, bytes]:
    _, words, gauss = state
    return "mt19937-python", _twister(array("I", words[:_WORDS]).tobytes(), words[_WORDS], gauss)


def _legacy(state: dict[str, Any]) -> tuple[str, bytes]:
    if state["bit_generator"] != "MT19937":
        return _bit_generator(state)
    inner = state["state"]
    gauss = state["gauss"] if state["has_gauss"] else None
    return "mt19937-numpy", _twister(inner["key"].astype("<u4").tobytes(), inner["pos"], gauss)


def _bit_generator(state: Any) -> tuple[str, bytes]:
    text = json.dumps(state, sort_keys=True, default=_plain)
    kind = state.get("bit_generator", "?") if isinstance(state, dict) else "?"
    return f"numpy-{kind}", text.encode()


def _torch(generator: torch.Generator) -> tuple[str, bytes]:
    # The state is a host tensor, a device's too: seed and offset are kept on the host.
    device = generator.device.type
    kind = {"cpu": "mt19937-torch", "cuda": "philox-cuda"}.get(device, f"torch-{device}")
    return kind, _bytes(generator.get_state())


def _twister(words: bytes, position: int, gauss: float | None) -> bytes:
    return words + struct.pack("<I", position) + (b"" if gauss is None else struct.pack("<d", gauss))


def _device_generators() -> list[tuple[str, torch.Generator]]:
    core: Any = torch._C
    found: list[tuple[str, torch.Generator]] = []
    for device in _DEVICES:
        module: Any = getattr(torch, device, None)
        if module is None or not module.is_available() or not module.is_initialized():
            continue
        if device == "cuda" and module.is_current_stream_capturing():
            continue
        for index, generator in enumerate(module.default_generators):
            if device != "cuda" or core._cuda_hasPrimaryContext(index):
                found.append((f"{device}:{index}", generator))
    return found


def _is_unseeded(generator: object) -> bool:
    """Whether the system seeded it, so that its state differs between any two runs. Told for numpy's alone: torch's
    start from a constant, and a random.Random does not say."""
    stream = stream_of(generator)
    sequence = getattr(stream, "seed_seq", None) or getattr(stream, "_seed_seq", None)
    entropy = getattr(sequence, "entropy", None)
    return isinstance(entropy, int) and entropy >= _SYSTEM_ENTROPY


def _row(name: str, kind: str, raw: bytes, unseeded: bool, standing: Standing = "hard") -> Row:
    digest = digest_tensors([torch.frombuffer(bytearray(raw), dtype=torch.uint8)])
    row = StateRow(
        component="rng",
        name=name,
        standing=standing,
        dtype="uint8",
        shape=(len(raw),),
        elements=len(raw),
        digest=digest,
        nbytes=len(raw),
        info={"generator": kind, "unseeded": unseeded},
    )
    return row, raw


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(memory_of(tensor.contiguous()))


def _plain(value: Any) -> Any:
    """What json does not know in a bit generator's state: arrays and numpy's numbers."""
    return value.tolist()
