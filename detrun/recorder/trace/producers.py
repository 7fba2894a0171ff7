"""Which event last wrote a piece of memory, and whether anything did since it was reserved.

A storage is known by its identity, and watched through a weak reference of torch's own, so that another one at the same
address is not taken for it; nothing of the program's is kept alive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

weak_ref = torch.UntypedStorage._weak_ref
_free_weak_ref = torch.UntypedStorage._free_weak_ref
_expired = torch.UntypedStorage._expired

_MOST_REGIONS = 4096
"""Regions of one storage that are told apart; beyond it counts as written by its last writer."""


class Storage:
    """What is known of one storage of which more is known than that one event wrote all of it last. whole: seq of the
    event that did, if nothing wrote a part of it since; None else. regions: where `whole` is None, (first byte, byte
    behind the last, seq of the event that wrote it), in no order, without overlap. blank: whether it was reserved
    without content; then what no region covers is uninitialized. scattered: bytes of it written through views with
    gaps. pending: called before its content is used or replaced: what an event in flight writes. mark: a flag for
    whatever reads it."""

    __slots__ = ("blank", "mark", "pending", "regions", "scattered", "size", "whole")

    def __init__(self, size: int, whole: int | None = None) -> None:
        self.size = size
        self.whole = whole
        self.regions: list[tuple[int, int, int]] = []
        self.blank = False
        self.scattered = 0
        self.pending: Callable[[], None] | None = None
        self.mark = ""

    def writer(self, low: int, high: int) -> int:
        """seq of the last event that wrote into this region, -1 if none is known."""
        if self.whole is not None:
            return self.whole
        regions = self.regions
        return max((seq for first, last, seq in regions if first < high and low < last), default=-1)

    def write(self, low: int, high: int, seq: int) -> None:
        """An event wrote this region whole."""
        if high - low >= self.size:
            self.whole, self.regions = seq, []
            return
        regions = self.regions if self.whole is None else [(0, self.size, self.whole)]
        self.whole = None
        kept = []
        for first, last, by in regions:
            if last <= low or high <= first:
                kept.append((first, last, by))
                continue
            if first < low:
                kept.append((first, low, by))
            if high < last:
                kept.append((high, last, by))
        kept.append((low, high, seq))
        if len(kept) > _MOST_REGIONS:
            kept = [(min(each[0] for each in kept), max(each[1] for each in kept), seq)]
        self.regions = kept

    def covered(self, low: int, high: int) -> bool:
        """Whether all of this region was written since the storage was reserved."""
        if not self.blank or self.whole is not None:
            return True
        for first, last, _ in sorted(self.regions):
            if first > low:
                return False
            low = max(low, last)
            if low >= high:
                return True
        return low >= high


class Producers:
    """All storages that an event of the window wrote, by the identity of an untyped storage, its `_cdata`."""

    def __init__(self) -> None:
        self.whole: dict[int, int] = {}
        """seq of the event that last wrote all of a storage of which nothing else is known: nearly all of them."""
        self.storages: dict[int, Storage] = {}
        """The others."""
        self.refs: dict[int, Any] = {}
        """Weak references to all of these: as long as there is one, no other storage has the identity."""

    def find(self, storage: Any) -> Storage | None:
        """What is known of an untyped storage, None if nothing."""
        identity = storage._cdata
        known = self.storages.get(identity)
        if known is None and identity in self.whole:
            return Storage(storage.nbytes(), self.whole[identity])
        return known

    def wrote(self, storage: Any, low: int, high: int, seq: int, nbytes: int, mark: str = "") -> None:
        """An event (seq; −1 for one that is not recorded) wrote `nbytes` bytes between low and high."""
        known = self._known(storage)
        known.mark = mark
        if nbytes < high - low:
            self._scattered(known, low, high, seq, nbytes)
        else:
            known.write(low, high, seq)
        if known.whole is not None and known.pending is None and not known.mark:
            identity = storage._cdata
            del self.storages[identity]
            self.whole[identity] = known.whole

    def reserved(self, tensor: Tensor) -> None:
        """The storage of this tensor was made without content."""
        storage = tensor.untyped_storage()
        self._refer(storage)
        self.whole.pop(storage._cdata, None)
        known = self.storages[storage._cdata] = Storage(storage.nbytes())
        known.blank = known.size > 0

    def growing(self, tensor: Tensor) -> None:
        """The storage of this tensor is about to be given more room."""
        storage = tensor.untyped_storage()
        if storage._cdata in self.whole:
            self._known(storage)

    def grown(self, tensor: Tensor) -> None:
        """It may have been given more room."""
        storage = tensor.untyped_storage()
        known = self.storages.get(storage._cdata)
        size = storage.nbytes()
        if known is None:
            self.reserved(tensor)
        elif size > known.size:
            if known.whole is not None or not known.blank:
                by = -1 if known.whole is None else known.whole
                known.whole, known.regions = None, known.regions or ([(0, known.size, by)] if known.size else [])
                known.blank = True
            known.size = size

    def pending(self, storage: Any, settle: Callable[[], None]) -> None:
        """Something in flight writes this storage: call `settle` before its content is looked at or replaced."""
        self._known(storage).pending = settle

    def settle(self, storage: Any) -> None:
        """Its content is about to be looked at or replaced."""
        known = self.storages.get(storage._cdata)
        if known is not None and known.pending is not None:
            settle, known.pending = known.pending, None
            settle()

    def purge(self) -> None:
        """Forget the storages that are gone."""
        refs, whole, storages = self.refs, self.whole, self.storages
        for identity in [identity for identity, ref in refs.items() if _expired(ref)]:
            _free_weak_ref(refs.pop(identity))  # type: ignore[no-untyped-call]
            if whole.pop(identity, None) is None:
                storages.pop(identity, None)

    def clear(self) -> None:
        for ref in self.refs.values():
            _free_weak_ref(ref)  # type: ignore[no-untyped-call]
        self.refs.clear()
        self.whole.clear()
        self.storages.clear()

    def _known(self, storage: Any) -> Storage:
        """What is known of it, or the beginning of it."""
        identity = storage._cdata
        known = self.storages.get(identity)
        if known is None:
            self._refer(storage)
            known = self.storages[identity] = Storage(storage.nbytes(), self.whole.pop(identity, None))
        return known

    def _refer(self, storage: Any) -> None:
        identity = storage._cdata
        if identity not in self.refs:
            self.refs[identity] = weak_ref(storage)

    def _scattered(self, known: Storage, low: int, high: int, seq: int, nbytes: int) -> None:
        """Written with gaps: who wrote it is known for the whole, that it was written only once all of it must be."""
        if not known.blank:
            known.write(low, high, seq)
            return
        known.scattered += nbytes
        if known.scattered >= known.size:
            known.write(0, known.size, seq)
            known.blank = False
