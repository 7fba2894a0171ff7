"""Reads the tensors of an event: their digests, who wrote them last, and what forbids them to lead.

Nearly all tensors are plain ones in host memory of which nothing is known but who wrote them: for these everything is
done in one place, in as few steps as there can be.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from detrun.fingerprint.tensors import PLAIN
from detrun.recorder.trace import pointers
from detrun.recorder.trace.draft import Draft
from detrun.recorder.trace.fingerprints import Fingerprints
from detrun.recorder.trace.producers import Producers, Storage
from detrun.records.trace_row import NO_CONTENT

IN_FLIGHT = "in-flight"
UNINITIALIZED = "uninitialized"
POINTERS = "pointers"


class Reading:
    """Knows the storages of the window. May raise; its caller guards it."""

    def __init__(self) -> None:
        self.producers = Producers()
        self.fingerprints = Fingerprints()
        self._layouts = self.fingerprints.layouts
        self._quick = self.fingerprints.quick
        self._storages = self.producers.storages

    def take_input(self, draft: Draft, value: object) -> None:
        """Add what an event is given: a tensor, None for one that is absent, lists and tuples of these."""
        if type(value) not in PLAIN:
            if isinstance(value, (list, tuple)):
                for each in value:
                    self.take_input(draft, each)
            elif value is None:
                draft.texts.append("-")
            elif isinstance(value, Tensor):
                self._take_odd_input(draft, value)
            return
        tensor: Any = value
        try:
            layout = self._layouts[tensor.dtype, tensor.shape, tensor.stride()]
            digest = self._quick(tensor, layout)
        except (KeyError, RuntimeError):  # seen for the first time, or without strides
            digest = None
        if digest is None:
            self._take_odd_input(draft, tensor)
            return
        known = self._storages.get(tensor.untyped_storage()._cdata)
        draft.texts.append(layout.text)
        if known is None:
            writer = -1
        elif known.whole is not None and known.pending is None and not known.mark:
            writer = known.whole
        else:
            self._take_odd_input(draft, tensor, told=True)
            return
        if layout.wide and pointers.suspicious(tensor):
            draft.marks = (*draft.marks, f"i{len(draft.inputs)}:pointers")
        draft.inputs.append(digest)
        draft.writers.append(writer)

    def _take_odd_input(self, draft: Draft, tensor: Tensor, told: bool = False) -> None:
        """One that is not plain, or of whose storage more is known than who wrote it. told: its text is there."""
        producers = self.producers
        storage = storage_of(tensor)
        if storage is not None:
            producers.settle(storage)
        for text, digest, storage, low, high, _, mark in self.fingerprints.parts(tensor):
            if not told:
                draft.texts.append(text)
            writer = -1
            known = producers.find(storage) if storage is not None else None
            if known is not None:
                writer = known.writer(low, high)
                mark = known.mark or mark
                if not known.covered(low, high):
                    mark = UNINITIALIZED
                elif mark == IN_FLIGHT:
                    digest = NO_CONTENT
            if not mark and "int64" in text and pointers.suspicious(tensor):
                mark = "pointers"
            if mark:
                draft.marks = (*draft.marks, f"i{len(draft.inputs)}:{mark}")
            draft.inputs.append(digest)
            draft.writers.append(writer)

    def take_output(self, draft: Draft, value: object, seq: int, mark: str = "") -> None:
        """Add what an event wrote or returned. seq: the event's place. mark: a flag for all of it."""
        if type(value) not in PLAIN:
            if isinstance(value, (list, tuple)):
                for each in value:
                    self.take_output(draft, each, seq, mark)
            elif value is None:
                draft.texts.append("-")
            elif isinstance(value, Tensor):
                self._take_odd_output(draft, value, seq, mark)
            return
        tensor: Any = value
        try:
            layout = self._layouts[tensor.dtype, tensor.shape, tensor.stride()]
            digest = None if mark else self._quick(tensor, layout)
        except (KeyError, RuntimeError):
            digest = None
        if digest is None:
            self._take_odd_output(draft, tensor, seq, mark)
            return
        draft.texts.append(layout.text)
        storage = tensor.untyped_storage()
        identity = storage._cdata
        known = self._storages.get(identity)
        if known is None:
            known = self._storages[identity] = Storage(storage)
        if layout.nbytes == known.size:
            known.whole = seq
            known.mark = ""
        else:
            low = tensor.storage_offset() * layout.size
            self.producers.wrote(storage, low, low + layout.span, seq, layout.nbytes)
        if layout.wide and pointers.suspicious(tensor):
            draft.marks = (*draft.marks, f"o{len(draft.outputs)}:pointers")
        draft.outputs.append(digest)

    def _take_odd_output(self, draft: Draft, tensor: Tensor, seq: int, mark: str) -> None:
        for text, digest, storage, low, high, nbytes, own in self.fingerprints.parts(tensor):
            draft.texts.append(text)
            if storage is not None:
                self.producers.wrote(storage, low, high, seq, nbytes, mark)
            flag = mark or own
            if not flag and "int64" in text and pointers.suspicious(tensor):
                flag = "pointers"
            if flag:
                draft.marks = (*draft.marks, f"o{len(draft.outputs)}:{flag}")
            draft.outputs.append(digest)

    def wrote(self, tensor: Tensor) -> None:
        """Something that is no event wrote this tensor."""
        storage = storage_of(tensor)
        if storage is not None:
            low, high, nbytes = self.fingerprints.region(tensor)
            self.producers.settle(storage)
            self.producers.wrote(storage, low, high, -1, nbytes)


def tensors_in(values: Iterable[object]) -> list[Tensor]:
    """All tensors of lists and tuples, in order."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
    return found


def storage_of(tensor: Tensor) -> Any:
    """The storage of a plain tensor with memory."""
    if type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_meta:
        return tensor.untyped_storage()
    return None
