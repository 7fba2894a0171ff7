"""Collects the rows of one boundary: what a piece of state is, its digest, and its bytes while there is room for them.

Digests of device memory stay on the device until the file is written; nothing here waits for one, and nothing of the
program's is held once a moment is over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from detrun.fingerprint import device as device_digest
from detrun.fingerprint.byte_digest import digest_bytes, digest_parts
from detrun.fingerprint.host import memory_of
from detrun.fingerprint.tensors import Part, dtype_name, named_parts
from detrun.recorder.hashing import LARGE, Hashing, Job
from detrun.recorder.pending import DeviceBytes, HostBytes, Waiting, read
from detrun.recorder.values import canonical, item_of, kind_of
from detrun.records.state_row import NOT_KEPT, Component, Standing, StateRow

LONGEST_VALUE = 200
"""Characters of a value that stand in its row; of longer ones the row has a digest."""

_SUM_BYTES = 16


@dataclass(frozen=True)
class _OnDevice:
    """The digest of one row that is on its way: `count` sums behind the first `first` of those fetched together.

    zero: if all are zero, so is the tensor, and its row says so. only_zero: else they say nothing.
    """

    place: int
    description: bytes
    first: int
    count: int
    zero: bool
    only_zero: bool


class Rows:
    """The rows of a boundary, in the order in which they were added. A name that comes twice gets a number.

    keep: writes bytes and returns where they begin; None keeps none. room: bytes of tensors that may be kept.
    """

    def __init__(self, keep: Callable[[Any], int] | None = None, room: int = 0) -> None:
        self._keep = keep
        self._room = room
        self._rows: list[StateRow] = []
        self._places: dict[tuple[str, str, str], int] = {}
        self._where_kept: dict[tuple[int, int], int] = {}
        self._hashing = Hashing()
        self._jobs: list[tuple[int, Job]] = []
        self._sums: dict[torch.device, tuple[list[_OnDevice], list[Tensor]]] = {}
        self._late: list[tuple[HostBytes | DeviceBytes, list[_OnDevice]]] = []
        self._digests: list[tuple[int, Any]] = []
        self._gone: set[int] = set()

    def tensor(
        self, component: Component, name: str, tensor: Tensor, standing: Standing = "hard", *, zero: bool = False
    ) -> None:
        """Add a tensor, a row a part. zero: say in its info if all of it is zero."""
        for part in named_parts(tensor):
            self._part(StateRow(component, name, part.name or "", standing), part, zero)

    def value(self, component: Component, name: str, value: object, standing: Standing = "hard") -> None:
        """Add a plain value by its canonical text; a tensor or an array as such."""
        if isinstance(value, Tensor):
            self.tensor(component, name, value, standing)
            return
        if isinstance(value, np.ndarray) and value.ndim:
            self._array(StateRow(component, name, "", standing), value)
            return
        text = canonical(value)
        row = StateRow(component, name, "", standing, dtype=kind_of(value), elements=1)
        if len(text) > LONGEST_VALUE:
            self._add(replace(row, digest=digest_bytes(text.encode("utf-8", "surrogatepass"))))
        else:
            self._add(replace(row, value=text))

    def absent(self, component: Component, name: str) -> None:
        """Add a piece that is not there, such as a gradient that is None."""
        self._add(StateRow(component, name))

    def row(self, row: StateRow, raw: bytes) -> None:
        """Add a row made elsewhere; its bytes are kept whatever room there is."""
        if self._keep is not None:
            row = replace(row, offset=self._keep(raw), nbytes=len(raw))
        self._add(row)

    def digest(self, component: Component, name: str, digest: Any) -> None:
        """Add a piece of which only a digest is known, perhaps later (`Digest` of the step's draft)."""
        self._digests.append((self._add(StateRow(component, name)), digest))

    def as_on_device(self, component: Component, name: str, tensor: Tensor) -> None:
        """Add a small host tensor with the digest that it will have on a device."""
        description = _description(tensor)
        sums = device_digest.segment_sums([tensor])
        raw = b"" if sums is None else bytes(memory_of(sums))
        self._add(replace(_of(StateRow(component, name), tensor), digest=device_digest.ml128_text(description, raw)))

    def is_zero(self, component: Component, name: str) -> bool:
        """Whether a tensor that was added, of one part, is known to be all zero."""
        place = self._places.get((component, name, ""))
        return place is not None and bool(self._rows[place].info.get("zero"))

    def cleared(self, component: Component, name: str, now: Tensor | None) -> bool:
        """Look again at a tensor that was added, of one part: if it is None by now, or all zero, then that is what its
        row says. False if it is not, or not yet known to be."""
        place = self._places.get((component, name, ""))
        if place is None:
            return False
        row = self._rows[place]
        if now is None:
            self._rows[place] = StateRow(row.component, row.name)
            self._gone.add(place)
            return True
        parts = named_parts(now)
        memory = parts[0].memory if len(parts) == 1 else None
        if memory is None or (_on_host(memory) and (_has_no_memory(memory) or _any(memory))):
            return False
        if not _on_host(memory):
            self._on_device(place, memory, zero=True, only_zero=True)
            return False
        digest = digest_parts(_description(memory), _raw(memory))
        self._rows[place] = replace(row, digest=digest, value=None, offset=NOT_KEPT, info={"zero": True})
        return True

    def rest(self) -> float:
        """A moment is over: finish the digests of host memory, and fetch those of devices without waiting. Returns the
        CPU seconds that other threads took."""
        self._where_kept.clear()
        seconds = self._hashing.finish()
        for place, job in self._jobs:
            self._rows[place] = replace(self._rows[place], digest=job.digest)
        self._jobs.clear()
        for places, sums in self._sums.values():
            self._late.append((read(torch.cat(sums)), places))
        self._sums.clear()
        return seconds

    def waits_for(self) -> list[Waiting]:
        return [*(source for source, _ in self._late), *(digest for _, digest in self._digests)]

    def finished(self) -> list[StateRow]:
        """All rows; everything in `waits_for` must be ready."""
        rows = list(self._rows)
        for source, places in self._late:
            raw = source.raw()
            for late in places:
                if late.place in self._gone:
                    continue
                sums = raw[late.first * _SUM_BYTES : (late.first + late.count) * _SUM_BYTES]
                # Of lanes that are all zero the sums are zero, and of others by a chance of 2^-128.
                if not any(sums) and late.zero:
                    rows[late.place] = replace(rows[late.place], info={"zero": True})
                elif late.only_zero:
                    continue
                digest = device_digest.ml128_text(late.description, sums)
                rows[late.place] = replace(rows[late.place], digest=digest)
        for place, digest in self._digests:
            rows[place] = replace(rows[place], digest=digest.text())
        return rows

    def _part(self, row: StateRow, part: Part, zero: bool) -> None:
        memory = part.memory
        if memory is None or (_on_host(memory) and _has_no_memory(memory)):
            self._add(replace(row, info={"memory": False}))
            return
        row = _of(row, memory)
        if not _on_host(memory):
            place = self._add(row)
            self._on_device(place, memory, zero=zero, only_zero=False)
            return
        raw = _raw(memory)
        info = {"zero": True} if zero and not _any(memory) else {}
        address = None if part.copied else memory.data_ptr()
        row = replace(row, info=info, offset=self._kept(raw, row.nbytes, address))
        if row.nbytes >= LARGE and not part.copied:
            job = self._hashing.add(_description(memory), memory)
            self._jobs.append((self._add(row), job))
            return
        value = item_of(memory) if row.elements == 1 else None
        self._add(replace(row, digest=digest_parts(_description(memory), raw), value=value))

    def _on_device(self, place: int, memory: Tensor, *, zero: bool, only_zero: bool) -> None:
        sums = device_digest.segment_sums([memory])
        description = _description(memory)
        if sums is None:
            self._rows[place] = replace(self._rows[place], digest=device_digest.ml128_text(description, b""))
            return
        places, others = self._sums.setdefault(memory.device, ([], []))
        first = sum(len(other) for other in others[-1:]) + (places[-1].first if places else 0)
        places.append(_OnDevice(place, description, first, len(sums), zero, only_zero))
        others.append(sums)

    def _array(self, row: StateRow, array: np.ndarray[Any, Any]) -> None:
        dtype = array.dtype.name if array.dtype.isbuiltin else array.dtype.str
        row = replace(row, dtype=dtype, shape=array.shape, elements=array.size)
        if array.dtype.hasobject:
            self._add(replace(row, value="<array of objects>"))
            return
        raw = np.ascontiguousarray(array).tobytes()
        description = f"|{dtype}|{','.join(map(str, array.shape))};".encode()
        row = replace(row, digest=digest_parts(description, raw), nbytes=len(raw))
        self._add(replace(row, offset=self._kept(raw, len(raw), None)))

    def _kept(self, raw: Any, nbytes: int, address: int | None) -> int:
        """Where the bytes are kept, NOT_KEPT where they are not. One memory under two names is kept once."""
        if self._keep is None or not nbytes:
            return NOT_KEPT
        known = None if address is None else self._where_kept.get((address, nbytes))
        if known is not None:
            return known
        if nbytes > self._room:
            return NOT_KEPT
        self._room -= nbytes
        offset = self._keep(raw)
        if address is not None:
            self._where_kept[address, nbytes] = offset
        return offset

    def _add(self, row: StateRow) -> int:
        if row.key in self._places:
            count = 2
            while (row.component, f"{row.name}#{count}", row.part) in self._places:
                count += 1
            row = replace(row, name=f"{row.name}#{count}")
        self._places[row.key] = len(self._rows)
        self._rows.append(row)
        return len(self._rows) - 1


def _of(row: StateRow, memory: Tensor) -> StateRow:
    return replace(
        row,
        dtype=dtype_name(memory.dtype),
        shape=tuple(memory.shape),
        elements=memory.numel(),
        nbytes=memory.nbytes,
    )


def _description(memory: Tensor) -> bytes:
    """Not a part's own description, which has its name in it: what is equal is equal wherever it lies."""
    return f"|{dtype_name(memory.dtype)}|{','.join(map(str, memory.shape))};".encode()


def _on_host(memory: Tensor) -> bool:
    return memory.is_cpu


def _raw(memory: Tensor) -> Any:
    return memory_of(memory) if memory.nbytes else b""


def _has_no_memory(memory: Tensor) -> bool:
    """Whether a program has freed it for a while, as sharded training does."""
    return bool(memory.nbytes) and memory.data_ptr() == 0


def _any(memory: Tensor) -> bool:
    """Whether any element of a host tensor is not zero; nearly always the first ones tell."""
    if memory.numel() == 0:
        return False
    flat = memory.reshape(-1)
    if memory.dtype.itemsize == 1:
        flat = flat.view(torch.uint8)
    return bool(flat[:64].any()) or bool(flat.any())
