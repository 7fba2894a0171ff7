"""Keeps the bytes of single events: those that were asked for by key, and, where this run is held against a trace of
the other arm while it runs, the first ones that differ from it.

What is kept is copied at once: inputs before the operation, outputs after it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from detrun.fingerprint.tensors import dtype_name, named_parts, no_dispatch_modes
from detrun.recorder.trace.calls import describe_call
from detrun.recorder.trace.kernels import Kernels
from detrun.recorder.trace.leaves import tensors_of
from detrun.recorder.trace.live import Live
from detrun.recorder.trace.window import KeepSettings
from detrun.records.kept_writer import KeptPart, KeptWriter
from detrun.records.trace_row import EventKey

if TYPE_CHECKING:
    from detrun.recorder.trace.tracer import Draft, Tracer


@dataclass
class _Kept:
    """An event that is happening. parts: copies of its inputs, None as long as only the live comparison may want them;
    tensors: the inputs then, those that the operation overwrites as copies."""

    call: dict[str, Any] | None
    tensors: list[Tensor]
    parts: list[KeptPart] | None
    generator: tuple[str, bytes] | None
    grad_enabled: bool
    kernels: Kernels | None = None


@dataclass
class Keep:
    """The tracer's keeper. live: None where this run is compared with nothing. with_kernels: whether the kernels of the
    kept events are listed. What it raises ends the trace, not the program."""

    tracer: Tracer
    attempt: Path
    live: Live | None = None
    with_kernels: bool = False
    _asked: frozenset[EventKey] = frozenset()
    _happening: dict[int, _Kept] = field(default_factory=dict)
    _writer: KeptWriter | None = None

    def __post_init__(self) -> None:
        settings = self.tracer.settings.keep or KeepSettings()
        self._asked = frozenset(EventKey(*key) for key in settings.events)
        self._budget = settings.bytes

    def wants(self, key: EventKey) -> bool:
        return key in self._asked or (self.live is not None and self.live.active)

    def begin(self, draft: Draft, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """`draft` is about to happen. func: the operator, None for an event that is no call of one; then args are its
        inputs."""
        call, tensors = None, []
        if func is None:
            tensors = tensors_of(*args, kwargs)
        else:
            call, tensors = describe_call(draft.op, args, kwargs)
        asked = draft.key in self._asked
        generator = _generator(args, kwargs) if draft.rng is not None else None
        kept = _Kept(call, tensors, None, generator, torch.is_grad_enabled())
        if asked:
            kept.parts = _parts("input", tensors)
            if self.with_kernels:
                kept.kernels = Kernels()
        else:
            kept.tensors = _before(tensors, _written(func, args, kwargs, tensors))
        self._happening[id(draft)] = kept

    def end(self, draft: Draft, outputs: Sequence[object]) -> None:
        """`draft` has happened, and its digests are there."""
        kept = self._happening.pop(id(draft), None)
        if kept is None:
            return
        kernels = kept.kernels.end() if kept.kernels is not None else None
        live = False
        if kept.parts is None:
            if self.live is None or not self.live.differs(draft, self.tracer.fingerprints):
                return
            live = True
            kept.parts = _parts("input", kept.tensors)
        self._write(draft, kept, _parts("output", tensors_of(*outputs)), kernels, live=live)

    def forget(self, draft: Draft) -> None:
        """`draft` ended by an exception."""
        kept = self._happening.pop(id(draft), None)
        if kept is not None and kept.kernels is not None:
            kept.kernels.end()

    def close(self) -> None:
        """The window is over."""
        self._happening.clear()
        if self._writer is not None:
            self._writer.close()

    def _write(self, draft: Draft, kept: _Kept, outputs: list[KeptPart], kernels: Any, *, live: bool) -> None:
        parts = (kept.parts or []) + outputs
        writer = self._writer
        if writer is None:
            writer = KeptWriter(self.attempt, self.tracer.session.rank(), self._budget)
            self._writer = writer
        if not writer.fits(sum(len(part.raw) for part in parts)):
            self.tracer.not_captured(f"the bytes of {draft.op} in {draft.scope or 'no module'}: over the budget")
            return
        line = {
            "key": list(draft.key),
            "seq": draft.seq,
            "live": live,
            "site": draft.site,
            "call": kept.call,
            "rng": draft.rng.hex() if draft.rng is not None else None,
            "grad_enabled": kept.grad_enabled,
            "threads": torch.get_num_threads(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "kernels": kernels,
        }
        writer.write(line, parts, kept.generator)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Tensor]) -> list[Tensor]:
    """The tensors that an operator may write: all, where that is not known."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return tensors
    if not schema.is_mutable:
        return []
    found: list[Tensor] = []
    for at, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            found += tensors_of(value)
    return found


def _before(tensors: list[Tensor], written: list[Tensor]) -> list[Tensor]:
    """The tensors as they will be looked at afterwards: copies of those whose memory is going to be written."""
    if not written:
        return tensors
    storages = {_storage(tensor) for tensor in written}
    with torch.no_grad(), no_dispatch_modes():
        return [tensor.detach().clone() if _storage(tensor) in storages else tensor for tensor in tensors]


def _parts(side: str, tensors: Sequence[Tensor]) -> list[KeptPart]:
    storages: dict[int, int] = {}
    found = []
    for index, tensor in enumerate(tensors):
        storage = storages.setdefault(_storage(tensor), len(storages))
        for part in named_parts(tensor):
            memory = part.memory
            if memory is None:
                continue
            plain = part.name == "" and memory.shape == tensor.shape and tensor.layout is torch.strided
            found.append(
                KeptPart(
                    side=side,
                    index=index,
                    part=part.name or "",
                    dtype=dtype_name(memory.dtype),
                    shape=tuple(memory.shape),
                    strides=tuple(tensor.stride() if plain else memory.stride()),
                    storage=storage,
                    storage_offset=int(tensor.storage_offset()) if plain else 0,
                    device=str(tensor.device),
                    raw=_raw(memory),
                )
            )
    return found


def _raw(memory: Tensor) -> bytes:
    with torch.no_grad(), no_dispatch_modes():
        host = memory if memory.is_cpu else memory.cpu()
        return ctypes.string_at(host.data_ptr(), host.nbytes) if host.nbytes else b""


def _storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # a wrapper without a storage of its own
        return id(tensor)


def _generator(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[str, bytes]:
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
    generator = given[0] if given else None
    if generator is None:
        device = next((tensor.device for tensor in tensors_of(*args, kwargs)), torch.device("cpu"))
        if device.type == "cuda":
            generator = torch.cuda.default_generators[device.index or 0]
        else:
            generator = torch.default_generator
    return str(generator.device), bytes(generator.get_state().tolist())
