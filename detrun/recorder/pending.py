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

_names: dict[object, str] = {}

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
    """A recorded number: its dtype and its bytes (little-endian), perhaps still on their way."""

    dtype: str
    source: HostBytes | DeviceBytes

    def ready(self) -> bool:
        return self.source.ready()

    def wait(self) -> None:
        self.source.wait()

    def bits(self) -> int:
        return int.from_bytes(self.source.raw(), "little")

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
        return Scalar("bool", HostBytes(bytes([value])))
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
    dtype = tensor.dtype
    name = _names.get(dtype)
    if name is None:
        name = _names[dtype] = str(dtype).removeprefix("torch.")
    if name not in scalar.DTYPES:
        return None
    try:
        return Scalar(name, HostBytes(ctypes.string_at(tensor.data_ptr(), scalar.width(name) // 8)))
    except RuntimeError:  # sparse
        return None


def number(dtype: str, value: float | int) -> Scalar:
    bits = scalar.bits_of(value, dtype)
    return Scalar(dtype, HostBytes(bits.to_bytes(scalar.width(dtype) // 8, "little")))


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
    return Scalar(dtype_name(piece.dtype), read(piece))


def _numpy_scalar(value: object) -> Scalar | None:
    dtype = getattr(value, "dtype", None)
    raw = getattr(value, "tobytes", None)
    name = getattr(dtype, "name", None)
    if raw is None or name not in scalar.DTYPES or getattr(value, "size", 0) != 1:
        return None
    return Scalar(str(name), HostBytes(raw()))


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
