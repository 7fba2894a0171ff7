"""Reads the tensors that were kept of single events (`kept_writer` says what stands in the files)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detrun.errors import RecordError
from detrun.fingerprint.elements import element_bytes
from detrun.records.files import one_line, open_plain, read_plain
from detrun.records.layout import AttemptFolder
from detrun.records.trace_row import EventKey

MAX_LINES_BYTES = 64 << 20
MAX_DIMENSIONS = 64


@dataclass(frozen=True)
class KeptTensor:
    """A part of a tensor of a kept event: where its dense, C-order bytes lie, and how the program had it."""

    side: str
    index: int
    part: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: int
    storage_offset: int
    device: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class KeptEvent:
    """One kept event. live: it was found by holding the other arm's digests, not asked for by its key. call: how the
    operation was called, None where it is no single call. generator: kind, offset and length of its state's bytes.
    launched: the sub-operators and kernels it launched, in order; kernels: those on a device alone; settings: what
    decides which kernel is taken. All None where nobody looked."""

    key: EventKey
    path: Path
    live: bool
    call: Mapping[str, Any] | None
    rng: str | None
    generator: tuple[str, int, int] | None
    threads: int
    deterministic: bool
    launched: tuple[str, ...] | None
    kernels: tuple[str, ...] | None
    settings: Mapping[str, str] | None
    site: str
    tensors: tuple[KeptTensor, ...]

    def bytes_of(self, tensor: KeptTensor) -> bytes:
        """The bytes of one of its tensors. Raises RecordError where they are not all there."""
        return _slice(self.path, tensor.offset, tensor.nbytes)

    def generator_state(self) -> tuple[str, bytes] | None:
        """Kind and state of the generator that it drew from. Raises RecordError."""
        if self.generator is None:
            return None
        kind, offset, nbytes = self.generator
        return kind, _slice(self.path, offset, nbytes)


def read_kept(attempt: AttemptFolder, rank: int) -> list[KeptEvent]:
    """The events that a rank kept, in order; a last line that is cut off is left out.

    Raises RecordError where the file is missing or holds what no recorder writes.
    """
    lines, content = attempt.kept(rank), attempt.kept_bytes(rank)
    raw = read_plain(lines, MAX_LINES_BYTES)
    events = []
    for number, line in enumerate(raw.split(b"\n")[:-1], 1):
        try:
            events.append(_event(json.loads(line), content))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            what = f"has a line {number} that is no kept event ({one_line(str(error), 80)})"
            raise RecordError(what, where=str(lines)) from None
    return events


def _event(document: dict[str, Any], path: Path) -> KeptEvent:
    key = document["key"]
    step, microbatch, phase, scope, op, occurrence = key
    generator = document.get("generator")
    launched, kernels, settings = _launched(document.get("kernels"))
    call = document.get("call")
    return KeptEvent(
        EventKey(_whole(step), _whole(microbatch), _text(phase), _text(scope), _text(op), _whole(occurrence)),
        path,
        bool(document.get("live")),
        call if isinstance(call, dict) else None,
        document.get("rng") if isinstance(document.get("rng"), str) else None,
        (_text(generator["kind"]), _whole(generator["offset"]), _whole(generator["nbytes"])) if generator else None,
        _whole(document.get("threads", 1)),
        bool(document.get("deterministic")),
        launched,
        kernels,
        settings,
        str(document.get("site") or ""),
        tuple(_tensor(each) for each in document["tensors"]),
    )


def _launched(entries: Any) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None, dict[str, str] | None]:
    if entries is None:
        return None, None, None
    launched = tuple(str(each["name"]) for each in entries if each["kind"] in ("op", "kernel"))
    kernels = tuple(str(each["name"]) for each in entries if each["kind"] == "kernel")
    return launched, kernels, {str(each["name"]): str(each["value"]) for each in entries if each["kind"] == "setting"}


def _tensor(document: dict[str, Any]) -> KeptTensor:
    shape = tuple(_whole(size) for size in document["shape"])
    dtype = _text(document["dtype"])
    nbytes = _whole(document["nbytes"])
    if len(shape) > MAX_DIMENSIONS or nbytes != math.prod(shape) * element_bytes(dtype):
        raise ValueError("a tensor's bytes are not what its shape asks for")
    if document["side"] not in ("input", "output"):
        raise ValueError("a tensor is of no side")
    return KeptTensor(
        document["side"],
        _whole(document["index"]),
        _text(document["part"]),
        dtype,
        shape,
        tuple(_whole(stride) for stride in document["strides"]),
        _whole(document["storage"]),
        _whole(document["storage_offset"]),
        _text(document["device"]),
        _whole(document["offset"]),
        nbytes,
    )


def _slice(path: Path, offset: int, nbytes: int) -> bytes:
    with os.fdopen(open_plain(path), "rb") as file:
        size = file.seek(0, 2)
        if offset + nbytes > size:
            raise RecordError(f"ends after {size:,} bytes, {offset + nbytes:,} are spoken of", where=str(path))
        file.seek(offset)
        return bytes(file.read(nbytes))


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError("a number is none")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a text is none")
    return value
