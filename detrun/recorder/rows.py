"""Collects the rows of one boundary: what a piece of state is, its digest, and its bytes while there is room for them.

Digests of device memory stay on the device until the file is written; nothing here waits for one, and nothing of the
program's is held once a moment is over.
"""

from __future__ import annotations

import numbers
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from detrun.fingerprint import device as device_digest
from detrun.fingerprint.byte_digest import digest_bytes, digest_parts
from detrun.fingerprint.host import memory_of
from detrun.fingerprint.tensors import Part, dtype_name, named_parts
from detrun.recorder.pending import DeviceBytes, HostBytes, Waiting, read
from detrun.records.state_row import NOT_KEPT, Component, Standing, StateRow

LONGEST_VALUE = 200
"""Characters of a value that stand in its row; of longer ones the row has a digest."""

_SUM_BYTES = 16
_DEEPEST = 12


class Rows:
    """The rows of a boundary, in the order in which they were added.

    keep: writes bytes and returns where they begin; None keeps none. room: bytes of tensors that may be kept.
    """

    def __init__(self, keep: Callable[[Any], int] | None = None, room: int = 0) -> None:
        self._keep = keep
        self._room = room
        self._rows: list[StateRow] = []
        self._keys: set[tuple[str, str, str]] = set()
        self._where_kept: dict[tuple[str, int], int] = {}
        self._sums: dict[torch.device, list[tuple[int, bytes, Tensor]]] = {}
        self._late: list[tuple[HostBytes | DeviceBytes, list[tuple[int, bytes, int, int]]]] = []
        self._digests: list[tuple[int, Any]] = []

    def tensor(
        self,
        component: Component,
        name: str,
        tensor: Tensor,
        standing: Standing = "hard",
        *,
        zero: bool = False,
    ) -> None:
        """Add a tensor, a row a part. zero: say in its info if all of it is zero."""
        for part in named_parts(tensor):
            self._part(StateRow(component, name, part.name or "", standing), part, zero)

    def as_on_device(self, component: Component, name: str, tensor: Tensor) -> None:
        """Add a host tensor with the digest that it would have on a device, where it will lie."""
        memory = tensor.contiguous()
        shape, dtype = tuple(memory.shape), dtype_name(memory.dtype)
        sums = device_digest.segment_sums([memory])
        raw = b"" if sums is None else bytes(memory_of(sums))
        digest = device_digest.ml128_text(_description(dtype, shape), raw)
        self._add(StateRow(component, name, "", "hard", dtype, shape, memory.numel(), digest, nbytes=memory.nbytes))

    def value(self, component: Component, name: str, value: object, standing: Standing = "hard") -> None:
        """Add a plain value by its canonical text; a tensor or an array as such."""
        if isinstance(value, Tensor):
            self.tensor(component, name, value, standing)
            return
        if isinstance(value, (np.ndarray, np.generic)) and value.ndim:
            self._array(StateRow(component, name, "", standing), np.asarray(value))
            return
        text = canonical(value)
        row = StateRow(component, name, "", standing, dtype=_kind(value), elements=1)
        if len(text) > LONGEST_VALUE:
            self._add(replace(row, digest=digest_bytes(text.encode("utf-8", "surrogatepass"))))
        else:
            self._add(replace(row, value=text))

    def absent(self, component: Component, name: str, dtype: str = "", shape: Sequence[int] = ()) -> None:
        """Add a piece that is not there, such as a gradient that is None."""
        self._add(StateRow(component, name, dtype=dtype, shape=tuple(shape)))

    def row(self, row: StateRow, raw: bytes | None) -> None:
        """Add a row made elsewhere; its bytes are kept whatever room there is."""
        if raw is not None and self._keep is not None:
            row = replace(row, offset=self._keep(raw), nbytes=len(raw))
        self._add(row)

    def digest(self, component: Component, name: str, digest: Any) -> None:
        """Add a piece of which only a digest is known, perhaps later (`Digest` of the step's draft)."""
        self._add(StateRow(component, name))
        self._digests.append((len(self._rows) - 1, digest))

    def rest(self) -> None:
        """A moment is over: fetch what lies on devices, without waiting."""
        for sums in self._sums.values():
            places, first = [], 0
            for index, description, part in sums:
                places.append((index, description, first, len(part)))
                first += len(part)
            self._late.append((read(torch.cat([part for _, _, part in sums])), places))
        self._sums.clear()

    def waits_for(self) -> list[Waiting]:
        return [*(source for source, _ in self._late), *(digest for _, digest in self._digests)]

    def finished(self) -> list[StateRow]:
        """All rows; everything in `waits_for` must be ready."""
        rows = list(self._rows)
        for source, places in self._late:
            raw = source.raw()
            for index, description, first, count in places:
                sums = raw[first * _SUM_BYTES : (first + count) * _SUM_BYTES]
                info = dict(rows[index].info)
                # Of lanes that are all zero the sums are zero, and of others only by a chance of 2^-128.
                if info.pop("zero", False) and not any(sums):
                    info["zero"] = True
                rows[index] = replace(rows[index], digest=device_digest.ml128_text(description, sums), info=info)
        for index, digest in self._digests:
            rows[index] = replace(rows[index], digest=digest.text())
        return rows

    def _part(self, row: StateRow, part: Part, zero: bool) -> None:
        memory = part.memory
        if memory is None:
            self._add(replace(row, info={"memory": False}))
            return
        shape = tuple(memory.shape)
        nbytes = memory.nbytes
        row = replace(row, dtype=dtype_name(memory.dtype), shape=shape, elements=memory.numel(), nbytes=nbytes)
        # Not the part's own description, which has its name in it: what is equal is equal wherever it lies.
        description = _description(row.dtype, shape)
        if not memory.is_cpu:
            sums = device_digest.segment_sums([memory])
            if sums is None:
                row = replace(row, digest=device_digest.ml128_text(description, b""))
            else:
                self._sums.setdefault(memory.device, []).append((len(self._rows), description, sums))
                row = replace(row, info={"zero": True} if zero else {})
            self._add(row)
            return
        if nbytes and memory.data_ptr() == 0:
            self._add(replace(row, info={"memory": False}))
            return
        raw = memory_of(memory) if nbytes else b""
        value = _item(memory) if row.elements == 1 else None
        info = {"zero": True} if zero and not _any(memory) else {}
        row = replace(row, digest=digest_parts(description, raw), value=value, info=info)
        self._add(replace(row, offset=self._kept(raw, row)))

    def _array(self, row: StateRow, array: np.ndarray[Any, Any]) -> None:
        dtype = array.dtype.name if array.dtype.isbuiltin else array.dtype.str
        row = replace(row, dtype=dtype, shape=array.shape, elements=array.size, nbytes=array.nbytes)
        if array.dtype.hasobject:
            self._add(replace(row, value=f"<array of {dtype}>"))
            return
        raw = np.ascontiguousarray(array).tobytes()
        description = _description(dtype, array.shape)
        row = replace(row, digest=digest_parts(description, raw))
        self._add(replace(row, offset=self._kept(raw, row)))

    def _kept(self, raw: Any, row: StateRow) -> int:
        """Where the bytes are kept, NOT_KEPT where they are not. Equal ones are kept once."""
        if self._keep is None or not row.nbytes or row.digest is None:
            return NOT_KEPT
        known = (row.digest, row.nbytes)
        if known not in self._where_kept:
            if row.nbytes > self._room:
                return NOT_KEPT
            self._room -= row.nbytes
            self._where_kept[known] = self._keep(raw)
        return self._where_kept[known]

    def _add(self, row: StateRow) -> None:
        if row.key in self._keys:
            count = 2
            while (row.component, f"{row.name}#{count}", row.part) in self._keys:
                count += 1
            row = replace(row, name=f"{row.name}#{count}")
        self._keys.add(row.key)
        self._rows.append(row)


def canonical(value: object, depth: int = 0) -> str:
    """One text a plain value, the same wherever it comes from: floats exactly, numpy's numbers like Python's, tuples
    like lists, mappings by sorted keys. Of other objects the name of their type."""
    if value is None or isinstance(value, (bool, str, bytes, torch.dtype, torch.device)):
        return repr(value)
    if isinstance(value, np.generic):
        return canonical(value.item()) if isinstance(value, (np.number, np.bool_)) else f"<{value.dtype} {value!s}>"
    if isinstance(value, float):
        return float.hex(value)
    if isinstance(value, numbers.Integral):
        return repr(int(value))
    if isinstance(value, complex):
        return f"({value.real.hex()}, {value.imag.hex()})"
    if isinstance(value, Tensor):
        return _tensor_text(value)
    if isinstance(value, np.ndarray):
        return f"<array {digest_parts(str(value.dtype).encode(), np.ascontiguousarray(value).tobytes())}>"
    if depth > _DEEPEST:
        return "<too deep>"
    if isinstance(value, Mapping):
        entries = sorted((_key(key), canonical(item, depth + 1)) for key, item in value.items())
        return "{" + ", ".join(f"{key}: {item}" for key, item in entries) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(canonical(item, depth + 1) for item in value)) + "}"
    if isinstance(value, (list, tuple, deque)):
        return "[" + ", ".join([canonical(item, depth + 1) for item in value]) + "]"
    return f"<{type(value).__name__}>"


def _key(key: object) -> str:
    return canonical(key) if isinstance(key, (str, bytes, int, float, tuple, type(None))) else "<key>"


def _tensor_text(tensor: Tensor) -> str:
    texts = []
    for part in named_parts(tensor):
        memory = part.memory
        if memory is None or not memory.is_cpu or (memory.nbytes and not memory.data_ptr()):
            texts.append("<tensor>")  # not to be waited for
        elif memory.numel() == 1:
            texts.append(_item(memory) or "<tensor>")
        else:
            texts.append(digest_parts(part.description, memory_of(memory) if memory.nbytes else b""))
    return " ".join(texts)


def _kind(value: object) -> str:
    if isinstance(value, np.generic):
        return str(value.dtype.name)
    if isinstance(value, tuple):
        return "list"
    return type(value).__name__


def _item(memory: Tensor) -> str | None:
    try:
        return canonical(memory.item())
    except (RuntimeError, NotImplementedError):  # a format that packs several numbers into one element
        return None


def _any(memory: Tensor) -> bool:
    """Whether any element of a host tensor is not zero; nearly always the first ones tell."""
    if memory.numel() == 0:
        return False
    flat = memory.reshape(-1)
    if memory.dtype.itemsize == 1:
        flat = flat.view(torch.uint8)
    return bool(flat[:64].any()) or bool(flat.any())


def _description(dtype: str, shape: Sequence[int]) -> bytes:
    return f"|{dtype}|{','.join(map(str, shape))};".encode()
