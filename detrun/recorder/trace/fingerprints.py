"""Digests of single tensors, as cheap as they can be: an operator is followed by two or three of them.

A plain tensor on the host is read where it lies: the bytes in memory order where it is dense (contiguous or permuted),
a copy in C order where it is not. A tensor on a device is summed there, and the sums leave with the next flush. Nothing
is remembered of a tensor's content: whoever asks gets what lies in memory now.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

from detrun.fingerprint.device import segment_sums
from detrun.fingerprint.tensors import PLAIN, dtype_name, named_parts, no_dispatch_modes
from detrun.records.trace_row import NO_CONTENT

_digest: Callable[[Any], bytes]
try:
    import xxhash
except ImportError:
    ALGORITHM = "blake2b-128"

    def _digest(raw: Any) -> bytes:
        return blake2b(raw, digest_size=16).digest()
else:
    ALGORITHM, _digest = "xxh3-128", xxhash.xxh3_128_digest

digest_of_bytes = _digest
"""16 bytes for any contiguous buffer."""

_EMPTY = _digest(b"")
_MOST_LAYOUTS = 65_536
NO_MEMORY = "no-memory"


class Layout:
    """What follows from dtype, shape and strides alone. text: as in a signature. read: makes a buffer of the memory at
    an address, None where there is nothing to read; quick: the same where that is the whole content. order: of the
    dimensions in memory, None for C's. dense: whether memory order can be read. span: bytes from the first element to
    behind the last. nbytes: bytes that are the tensor's. size: bytes of an element. simple: no complex numbers, no
    quantization. wide: integers of 64 bits."""

    __slots__ = ("dense", "nbytes", "order", "quick", "read", "simple", "size", "span", "text", "wide")

    def __init__(
        self,
        text: str,
        read: Callable[[int], Any] | None,
        order: tuple[int, ...] | None,
        dense: bool,
        span: int,
        nbytes: int,
        dtype: torch.dtype,
    ) -> None:
        self.text = text
        self.read = read
        self.order = order
        self.dense = dense
        self.span = span
        self.nbytes = nbytes
        self.size = dtype.itemsize
        self.simple = not (dtype.is_complex or dtype in _QUANTIZED)
        self.wide = dtype in _WIDE
        self.quick = read if dense and self.simple else None


_QUANTIZED = frozenset(
    getattr(torch, name) for name in ("qint8", "quint8", "qint32", "quint4x2", "quint2x4") if hasattr(torch, name)
)
_WIDE = frozenset({torch.int64, torch.uint64})


class OnDevice:
    """A digest that is still on a device. `digest` is set by `Fingerprints.fetch`."""

    __slots__ = ("digest", "nbytes", "sums")

    def __init__(self, sums: Tensor, nbytes: int) -> None:
        self.sums: Tensor | None = sums
        self.nbytes = nbytes
        self.digest = NO_CONTENT


class Seen(NamedTuple):
    """A part of a tensor that was read. text: for the signature. digest: 16 bytes, or on a device still. storage, low,
    high: where in which storage it lies, in bytes, None where the program's own memory was not read. nbytes: how many
    of these bytes it has. mark: why it has no content."""

    text: str
    digest: Any
    storage: Any = None
    low: int = 0
    high: int = 0
    nbytes: int = 0
    mark: str = ""


class Fingerprints:
    """Reads tensors. Raises nothing for tensors of any kind that it knows to be odd; what else goes wrong is the
    caller's to catch."""

    def __init__(self) -> None:
        self.layouts: dict[Any, Layout] = {}
        """By (dtype, shape, strides)."""
        self.contiguous: dict[torch.dtype, dict[tuple[int, ...], Layout]] = defaultdict(dict)
        """Of contiguous tensors, by dtype and shape: their strides need not be asked for."""

    def parts(self, tensor: Tensor) -> Sequence[Seen]:
        """The parts of a tensor of any kind in order, read now."""
        if type(tensor) in PLAIN and tensor.layout is torch.strided:
            layout = self.layout(tensor)
            if layout.simple and not tensor.is_neg():
                return (_memory(tensor, layout),)
        return self._odd(tensor)

    def layout(self, tensor: Tensor) -> Layout:
        """That of a plain strided tensor. Raises RuntimeError for one without strides."""
        key = (tensor.dtype, tensor.shape, tensor.stride())
        found = self.layouts.get(key)
        if found is None:
            if len(self.layouts) >= _MOST_LAYOUTS:
                self.layouts.clear()
                self.contiguous.clear()
            found = self.layouts[key] = layout_of(key[0], tuple(key[1]), tuple(key[2]))
            if tensor.is_contiguous():
                self.contiguous[key[0]].setdefault(tuple(key[1]), found)
        return found

    def region(self, tensor: Tensor) -> tuple[int, int, int]:
        """(first byte, byte behind the last, bytes) of a plain tensor in its storage."""
        layout = self.layout(tensor)
        low = int(tensor.storage_offset()) * layout.size
        return low, low + layout.span, layout.nbytes

    def fetch(self, waiting: Iterable[OnDevice]) -> None:
        """Bring digests from their devices, with one copy a device. The only place that waits for one."""
        by_device: dict[torch.device, list[OnDevice]] = {}
        for each in waiting:
            if each.sums is not None:
                by_device.setdefault(each.sums.device, []).append(each)
        for each_device in by_device.values():
            with torch.no_grad(), no_dispatch_modes():
                sums = torch.cat([each.sums for each in each_device if each.sums is not None]).cpu().contiguous()
            width = sums.nbytes // len(each_device)
            address = sums.data_ptr()
            for index, each in enumerate(each_device):
                raw = ctypes.string_at(address + index * width, width)
                each.digest = _digest(raw + each.nbytes.to_bytes(8, "little"))
                each.sums = None

    def _odd(self, tensor: Tensor) -> Sequence[Seen]:
        found = []
        for part in named_parts(tensor):
            name = f"{part.name}:" if part.name else ""
            memory = part.memory
            if memory is None:
                # described as "tag<kind>|dtype|1,2;": the tensor itself where there is nothing inside it
                text = f"{name}{_described(part.description)}"
                found.append(Seen(text, NO_CONTENT, mark=NO_MEMORY))
                continue
            seen = _memory(memory, self.layout(memory))
            storage = None if part.copied else seen.storage
            found.append(seen._replace(text=f"{name}{seen.text}", storage=storage))
        return found


def _memory(tensor: Tensor, layout: Layout) -> Seen:
    """The one part of a tensor whose memory is its content."""
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # a stand-in
        return Seen(layout.text, NO_CONTENT, mark=NO_MEMORY)
    if tensor.is_meta or (address == 0 and layout.read is not None):
        return Seen(layout.text, NO_CONTENT, mark=NO_MEMORY)
    if layout.read is None:
        return Seen(layout.text, _EMPTY)
    if not tensor.is_cpu:
        digest: Any = _on_device(tensor, layout)
    elif layout.dense:
        digest = _digest(layout.read(address))
    else:
        digest = _digest_of_copy(tensor)
    low = int(tensor.storage_offset()) * layout.size
    return Seen(layout.text, digest, tensor.untyped_storage(), low, low + layout.span, layout.nbytes)


def layout_of(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> Layout:
    """What follows from a plain tensor's dtype, shape and strides (in elements)."""
    size = dtype.itemsize
    elements = 1
    for extent in shape:
        elements *= extent
    text = f"{dtype_name(dtype)}[{','.join(map(str, shape))}]"
    if elements == 0:
        return Layout(text, None, None, True, 0, 0, dtype)
    span = (1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))) * size
    wide = [dim for dim, extent in enumerate(shape) if extent > 1]
    by_stride = sorted(wide, key=lambda dim: -strides[dim])
    expected, dense = 1, True
    for dim in reversed(by_stride):
        dense = dense and strides[dim] == expected
        expected *= shape[dim]
    order: tuple[int, ...] | None = None
    if dense and by_stride != wide:
        order = (*by_stride, *(dim for dim in range(len(shape)) if shape[dim] <= 1))
        text += "@" + ",".join(map(str, order))
    nbytes = min(span, elements * size)
    return Layout(text, (ctypes.c_char * (elements * size)).from_address, order, dense, span, nbytes, dtype)


def _digest_of_copy(tensor: Tensor) -> bytes:
    with torch.no_grad(), no_dispatch_modes():
        copy = tensor.detach().contiguous()
        return _digest((ctypes.c_char * copy.nbytes).from_address(copy.data_ptr()))


def _on_device(tensor: Tensor, layout: Layout) -> OnDevice:
    with torch.no_grad(), no_dispatch_modes():
        memory = tensor.detach()
        if layout.order is not None:
            memory = memory.permute(layout.order)
        sums = segment_sums([memory.contiguous()])
    if sums is None:
        raise RuntimeError(f"no digest of a {layout.text} on {tensor.device}")
    return OnDevice(sums, tensor.nbytes)


def _described(description: bytes) -> str:
    text = description.decode().rstrip(";").split("|")
    return f"{text[-2]}[{text[-1]}]" if len(text) >= 3 else text[0]
