"""Values that are on their way from a device to the host, and the queue of lines that wait for them.

A value on the host is read at once. One on a device is copied asynchronously into pinned memory behind an event: the
device is not waited for until a line is more than `MOST_LATE` steps behind.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from detrun.fingerprint import scalar

if TYPE_CHECKING:
    from torch import Tensor

_layouts: dict[object, tuple[str, Any]] = {}

MOST_LATE = 2
"""Steps a line may lag behind the program."""


class Waiting(Protocol):
    """Something that will be known."""

    def ready(self) -> bool: ...

    def wait(self) -> None: ...


class HostBytes:
    """Bytes that are already here."""

    __slots__ = ("_raw",)

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def raw(self) -> bytes:
        return self._raw


class DeviceBytes:
    """Bytes in a pinned host tensor that are complete once `event` has happened."""

    __slots__ = ("_event", "_host")

    def __init__(self, host: Tensor, event: Any) -> None:
        self._host = host
        self._event = event

    def ready(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def raw(self) -> bytes:
        return ctypes.string_at(self._host.data_ptr(), self._host.nbytes)


def read(tensor: Tensor) -> HostBytes | DeviceBytes:
    """The bytes of a small, dense, contiguous tensor as it is now in the order of its device's current stream."""
    if tensor.is_cpu:
        return HostBytes(ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.numel() else b"")
    import torch

    with torch.no_grad():
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        host.copy_(tensor.detach(), non_blocking=True)
        module = torch.get_device_module(tensor.device)
        event = module.Event()
        event.record(module.current_stream(tensor.device))
    return DeviceBytes(host, event)


class Scalar(NamedTuple):
    """A recorded number: its dtype and its bits, or, while `known` is None, where they will come from."""

    dtype: str
    known: int | None
    source: HostBytes | DeviceBytes | None = None

    def ready(self) -> bool:
        return self.source is None or self.source.ready()

    def wait(self) -> None:
        if self.source is not None:
            self.source.wait()

    def bits(self) -> int:
        if self.known is not None:
            return self.known
        return int.from_bytes(self.source.raw(), "little") if self.source is not None else 0

    def value(self) -> float | int:
        return scalar.value_of(self.bits(), self.dtype)


def scalar_from(value: object) -> Scalar | None:
    """A number, numpy scalar or tensor of one element as a Scalar; None if it is none of them.

    Python's float is float64, int is int64 (float64 if it is too large), bool is bool. A distributed tensor gives its
    local part.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _plain_scalar(value, torch) or _tensor_scalar(value)
    if isinstance(value, bool):
        return Scalar("bool", int(value))
    if isinstance(value, int):
        try:
            return number("int64", value)
        except ValueError:
            return number("float64", float(value))
    if isinstance(value, float) and type(value) is float:
        return number("float64", value)
    return _numpy_scalar(value)


def _plain_scalar(tensor: Tensor, torch: Any) -> Scalar | None:
    """The common case, by the shortest way: an ordinary tensor in host memory."""
    if type(tensor) is not torch.Tensor or not tensor.is_cpu or tensor.numel() != 1:
        return None
    layout = _layouts.get(tensor.dtype)
    if layout is None:
        layout = _layout(tensor.dtype)
    if layout[1] is None:
        return None
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # sparse
        return None
    return Scalar(layout[0], layout[1].from_address(address).value) if address else None


def _layout(dtype: object) -> tuple[str, Any]:
    name = str(dtype).removeprefix("torch.")
    words = {8: ctypes.c_uint8, 16: ctypes.c_uint16, 32: ctypes.c_uint32, 64: ctypes.c_uint64}
    entry = _layouts[dtype] = (name, words[scalar.width(name)] if name in scalar.DTYPES else None)
    return entry


def number(dtype: str, value: float | int) -> Scalar:
    return Scalar(dtype, scalar.bits_of(value, dtype))


def _tensor_scalar(tensor: Tensor) -> Scalar | None:
    from detrun.fingerprint.tensors import dtype_name, parts

    pieces = [piece for _, piece in parts(tensor) if piece is not None]
    if len(pieces) != 1 or pieces[0].numel() != 1:
        return None
    piece = pieces[0]
    if dtype_name(piece.dtype) not in scalar.DTYPES:
        if not piece.dtype.is_floating_point:
            return None
        piece = piece.float()  # the eight-bit floats have no name among scalars; widening is exact
    return Scalar(dtype_name(piece.dtype), None, read(piece))


def _numpy_scalar(value: object) -> Scalar | None:
    dtype = getattr(value, "dtype", None)
    raw = getattr(value, "tobytes", None)
    name = getattr(dtype, "name", None)
    if raw is None or name not in scalar.DTYPES or getattr(value, "size", 0) != 1:
        return None
    return Scalar(str(name), int.from_bytes(raw(), sys.byteorder))


class Outbox:
    """Lines in the order of their steps, each written once all it waits for is there."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._queue: deque[tuple[int, Sequence[Waiting], Callable[[], bytes]]] = deque()

    def put(self, step: int, waits_for: Sequence[Waiting], encode: Callable[[], bytes]) -> None:
        """Queue a line of `step`; `encode` is called when everything in `waits_for` is ready."""
        self._queue.append((step, waits_for, encode))
        self.flush(step)

    def flush(self, current: int) -> None:
        """Write what is ready, and wait only for what is more than MOST_LATE steps behind `current`."""
        while self._queue:
            step, waits_for, encode = self._queue[0]
            if step + MOST_LATE < current:
                for value in waits_for:
                    value.wait()
            elif not all(value.ready() for value in waits_for):
                return
            self._queue.popleft()
            self._write(encode())

    def drain(self) -> None:
        """Wait for everything and write it: the process is about to end."""
        while self._queue:
            _, waits_for, encode = self._queue.popleft()
            for value in waits_for:
                value.wait()
            self._write(encode())
