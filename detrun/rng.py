"""Every random number stream of a process, saved and restored bit for bit, as tensors that any checkpoint can hold.

Needs torch and numpy, and nothing else of detrun: it works in any program, whether detrun started it or not.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

GLOBAL = ("python", "numpy", "torch_cpu", "devices")
"""The process-wide streams: Python's `random`, numpy's legacy generator, torch's on the host, and those of every
accelerator that this process has initialised (`cuda:0`, …)."""

_WORDS = 624
_DEVICES = ("cuda", "xpu")
# The integers that make up a numpy bit generator's state: where they stand, bytes of one, how many.
_Fields = tuple[tuple[tuple[str, ...], int, int], ...]
_REST: _Fields = ((("has_uint32",), 4, 1), (("uinteger",), 4, 1))
_PCG: _Fields = ((("state", "state"), 16, 1), (("state", "inc"), 16, 1), *_REST)
_LAYOUTS: Mapping[str, _Fields] = {
    "PCG64": _PCG,
    "PCG64DXSM": _PCG,
    "MT19937": ((("state", "key"), 4, _WORDS), (("state", "pos"), 4, 1)),
    "Philox": (
        (("state", "counter"), 8, 4),
        (("state", "key"), 8, 2),
        (("buffer",), 8, 4),
        (("buffer_pos",), 4, 1),
        *_REST,
    ),
    "SFC64": ((("state", "state"), 8, 4), *_REST),
}
_KINDS = tuple(_LAYOUTS)


@dataclass(frozen=True)
class _Stream:
    """read: its state as a tensor. write: puts it into a state; what does not fit raises ValueError. Called with
    `dry=True`, write changes nothing."""

    read: Callable[[], Tensor]
    write: Callable[[Tensor, bool], None]


def rng_state(*, include: Collection[str] = GLOBAL, **generators: object) -> dict[str, Tensor]:
    """The state of every stream, now, as a flat dict of host tensors that share no memory with anything.

    include: which of the process-wide streams (`GLOBAL`). generators: the program's own, under names of its choice:
    torch.Generator on any device, numpy Generator, RandomState or BitGenerator, random.Random.

    `python` (and a random.Random): int64 [628]; `numpy` (and a RandomState): int64 [627], the half-used pair of
    gaussians included; torch's: uint8, [5056] on the host, [16] on CUDA; a numpy Generator: uint8, of a size that its
    bit generator fixes. The dict can be given to torch.save, torch.distributed.checkpoint and safetensors as it is, and
    loads with `weights_only`.

    Raises ValueError for an unknown name in `include`, a name that is taken, or a generator of another kind.
    """
    return {name: stream.read() for name, stream in _streams(include, generators).items()}


def set_rng_state(state: Mapping[str, Tensor], *, include: Collection[str] = GLOBAL, **generators: object) -> None:
    """Put every stream into the state that `rng_state` returned: what is drawn next is drawn again, bit for bit.

    To be called last before training goes on: constructing models and loaders draws numbers, too. `include` and the
    names of the generators are those of `rng_state`.

    Raises ValueError, and restores nothing, if a stream is missing from `state`, if `state` has one that is not asked
    for, or if one has another shape, dtype or kind. A process that has not used an accelerator yet initialises it, if
    `state` has a stream of it.
    """
    if "devices" in include:
        _wake_devices(state)
    streams = _streams(include, generators)
    missing, unknown = sorted(set(streams) - set(state)), sorted(set(state) - set(streams))
    if missing:
        raise ValueError(
            f"the saved state has no {_listed(missing)}: nothing was restored. It has {_listed(sorted(state))}. "
            "Save them with detrun.rng_state, or leave them out by `include`"
        )
    if unknown:
        raise ValueError(
            f"the saved state has {_listed(unknown)}, which nobody asked for: nothing was restored. Pass the generator "
            "by that name, widen `include`, or take it out of the state"
        )
    for dry in (True, False):
        for name, stream in streams.items():
            try:
                stream.write(state[name], dry)
            except ValueError as error:
                raise ValueError(f"the saved state of {name!r} does not fit: {error}; nothing was restored") from None


def _streams(include: Collection[str], generators: Mapping[str, object]) -> dict[str, _Stream]:
    strange = sorted(set(include) - set(GLOBAL))
    if strange or isinstance(include, str):
        raise ValueError(f"include names {_listed(strange) or include!r}; known are {_listed(GLOBAL)}")
    streams: dict[str, _Stream] = {}
    if "python" in include:
        streams["python"] = _python(random.getstate, random.setstate)
    if "numpy" in include:
        streams["numpy"] = _legacy(np.random.get_state, np.random.set_state)
    if "torch_cpu" in include:
        streams["torch_cpu"] = _torch(torch.default_generator)
    if "devices" in include:
        streams |= {name: _torch(generator) for name, generator in _device_generators()}
    for name, generator in generators.items():
        if name in streams or name in GLOBAL:
            raise ValueError(f"{name!r} is the name of a process-wide stream; give the generator another one")
        streams[name] = _own(name, generator)
    return streams


def _own(name: str, generator: object) -> _Stream:
    if isinstance(generator, torch.Generator):
        return _torch(generator)
    if isinstance(generator, random.Random) and not isinstance(generator, random.SystemRandom):
        return _python(generator.getstate, generator.setstate)
    if isinstance(generator, np.random.RandomState):
        return _legacy(generator.get_state, generator.set_state)
    if isinstance(generator, np.random.Generator):
        generator = generator.bit_generator
    if isinstance(generator, np.random.BitGenerator):
        kind = type(generator).__name__
        if kind in _LAYOUTS:
            return _bit_generator(generator, kind)
    raise ValueError(
        f"{name!r} is a {type(generator).__name__}; streams of torch.Generator, numpy's Generator, RandomState and "
        f"BitGenerators ({_listed(_KINDS)}) and random.Random can be saved"
    )


def _python(read: Callable[[], tuple[Any, ...]], write: Callable[[tuple[Any, ...]], None]) -> _Stream:
    def get() -> Tensor:
        version, words, gauss = read()
        return torch.tensor([version, *words, int(gauss is not None), _bits(gauss or 0.0)])

    def put(tensor: Tensor, dry: bool) -> None:
        version, *rest = _checked(tensor, torch.int64, _WORDS + 4)
        words, has_gauss, bits = rest[: _WORDS + 1], rest[-2], rest[-1]
        current = read()[0]
        if version != current:
            raise ValueError(f"it is of version {version} of Python's generator, this Python has version {current}")
        _check_twister(words[:_WORDS], words[_WORDS])
        if not dry:
            write((version, tuple(words), _float(bits) if has_gauss else None))

    return _Stream(get, put)


def _legacy(read: Callable[..., Any], write: Callable[[Any], None]) -> _Stream:
    def get() -> Tensor:
        kind, key, position, has_gauss, gauss = _expect_twister(read(legacy=False))
        del kind
        return torch.tensor([*key.tolist(), position, has_gauss, _bits(gauss)])

    def put(tensor: Tensor, dry: bool) -> None:
        *key, position, has_gauss, bits = _checked(tensor, torch.int64, _WORDS + 3)
        kind = _expect_twister(read(legacy=False))[0]
        _check_twister(key, position)
        if not dry:
            write((kind, np.array(key, dtype=np.uint32), position, has_gauss, _float(bits)))

    return _Stream(get, put)


def _expect_twister(state: Mapping[str, Any]) -> tuple[str, Any, int, int, float]:
    kind = state["bit_generator"]
    if kind != "MT19937":
        raise ValueError(f"numpy's legacy generator runs on {kind} here; pass its bit generator by name instead")
    return kind, state["state"]["key"], int(state["state"]["pos"]), int(state["has_gauss"]), float(state["gauss"])


def _torch(generator: torch.Generator) -> _Stream:
    def put(tensor: Tensor, dry: bool) -> None:
        now = generator.get_state()
        _checked(tensor, torch.uint8, now.numel())
        raw = tensor.detach().cpu().contiguous()
        try:
            if dry:  # torch looks at more than the size; a generator of the same device tells
                torch.Generator(device=generator.device).set_state(raw)
            else:
                generator.set_state(raw)
        except RuntimeError as error:
            raise ValueError(str(error).splitlines()[0]) from None

    return _Stream(lambda: generator.get_state().clone(), put)


def _bit_generator(generator: np.random.BitGenerator, kind: str) -> _Stream:
    fields = _LAYOUTS[kind]
    size = 1 + sum(width * count for _, width, count in fields)

    def get() -> Tensor:
        raw = bytearray([_KINDS.index(kind)])
        state: Any = generator.state
        for path, width, count in fields:
            value: Any = state
            for key in path:
                value = value[key]
            for number in np.asarray(value).reshape(-1).tolist() if count > 1 else [int(value)]:
                raw += int(number).to_bytes(width, "little")
        return torch.frombuffer(raw, dtype=torch.uint8).clone()

    def put(tensor: Tensor, dry: bool) -> None:
        raw = bytes(_checked(tensor, torch.uint8, size))
        if raw[0] != _KINDS.index(kind):
            raise ValueError(f"it is of another bit generator than {kind}")
        state: dict[str, Any] = {"bit_generator": kind}
        at = 1
        for path, width, count in fields:
            numbers = [int.from_bytes(raw[at + i * width : at + (i + 1) * width], "little") for i in range(count)]
            at += width * count
            inner = state
            for key in path[:-1]:
                inner = inner.setdefault(key, {})
            inner[path[-1]] = np.array(numbers, dtype=f"u{width}") if count > 1 else numbers[0]
        if not dry:
            generator.state = state

    return _Stream(get, put)


def _checked(tensor: object, dtype: torch.dtype, size: int) -> list[int]:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"it is a {type(tensor).__name__} and no tensor")
    if tensor.dtype is not dtype or tuple(tensor.shape) != (size,):
        raise ValueError(f"it is {tensor.dtype} {list(tensor.shape)} and should be {dtype} [{size}]")
    numbers: list[int] = tensor.detach().cpu().tolist()
    return numbers


def _check_twister(words: list[int], position: int) -> None:
    if not all(0 <= word < 1 << 32 for word in words) or not 0 <= position <= _WORDS:
        raise ValueError("it is no state of a Mersenne Twister")


def _device_generators() -> list[tuple[str, torch.Generator]]:
    found: list[tuple[str, torch.Generator]] = []
    core: Any = torch._C
    for device in _DEVICES:
        module: Any = getattr(torch, device, None)
        if module is not None and module.is_available() and module.is_initialized():
            for index, generator in enumerate(module.default_generators):
                if device != "cuda" or core._cuda_hasPrimaryContext(index):
                    found.append((f"{device}:{index}", generator))
    return found


def _wake_devices(state: Mapping[str, Tensor]) -> None:
    """A resumed process may not have used its accelerator yet."""
    known = {name for name, _ in _device_generators()}
    for name in sorted(set(state) - known):
        device, _, index = name.partition(":")
        if device in _DEVICES and index.isdigit():
            module: Any = getattr(torch, device)
            if not module.is_available() or int(index) >= module.device_count():
                raise ValueError(
                    f"the saved state has the stream of {name}, which this process does not see: nothing was restored. "
                    "Give the process the same devices, or take it out of the state"
                )
            torch.zeros(1, device=name)


def _bits(value: float) -> int:
    number: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return number


def _float(bits: int) -> float:
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value


def _listed(names: Collection[str]) -> str:
    return ", ".join(names)
