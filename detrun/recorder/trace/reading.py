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
from detrun.recorder.trace.fingerprints import digest_of_bytes as _digest
from detrun.recorder.trace.producers import Producers, weak_ref
from detrun.records.trace_row import NO_CONTENT

IN_FLIGHT = "in-flight"
UNINITIALIZED = "uninitialized"
POINTERS = "pointers"


class Reading:
    """Knows the storages of the window. May raise; its caller guards it."""

    def __init__(self) -> None:
        self.producers = Producers()
        self.fingerprints = Fingerprints()
        self._contiguous = self.fingerprints.contiguous
        self._layouts = self.fingerprints.layouts

    def take_inputs(self, draft: Draft, values: Iterable[object]) -> None:
        """Add what an event is given: tensors, None for one that is absent, lists and tuples of these."""
        contiguous, whole, storages = self._contiguous, self.producers.whole, self.producers.storages
        parts, writers, texts = draft.parts, draft.writers, draft.texts
        tensor: Any
        for tensor in values:
            if type(tensor) not in PLAIN:
                self._take_other_input(draft, tensor)
                continue
            try:
                layout = (
                    contiguous[tensor.dtype][tensor.shape]
                    if tensor.is_contiguous()
                    else self._layouts[tensor.dtype, tensor.shape, tensor.stride()]
                )
                if not tensor.is_cpu or layout.quick is None:
                    raise KeyError
                address = tensor.data_ptr()
                identity = tensor.untyped_storage()._cdata
            except (KeyError, RuntimeError):  # seen for the first time, or nothing to be read in a hurry
                self._take_odd_input(draft, tensor)
                continue
            writer = whole.get(identity, -1)
            if address == 0 or (writer < 0 and identity in storages):
                self._take_odd_input(draft, tensor)
                continue
            texts.append(layout.text)
            if layout.wide and pointers.suspicious(tensor):
                draft.marks = (*draft.marks, f"i{len(parts)}:pointers")
            parts.append(_digest(layout.quick(address)))
            writers.append(writer)

    def take_outputs(self, draft: Draft, values: Iterable[object], seq: int, mark: str = "") -> None:
        """Add what an event wrote or returned, as `take_inputs`. seq: the event's place. mark: a flag for all of it."""
        contiguous, whole, refs = self._contiguous, self.producers.whole, self.producers.refs
        parts, texts = draft.parts, draft.texts
        tensor: Any
        for tensor in values:
            if mark or type(tensor) not in PLAIN:
                self._take_other_output(draft, tensor, seq, mark)
                continue
            try:
                layout = (
                    contiguous[tensor.dtype][tensor.shape]
                    if tensor.is_contiguous()
                    else self._layouts[tensor.dtype, tensor.shape, tensor.stride()]
                )
                if not tensor.is_cpu or layout.quick is None:
                    raise KeyError
                address = tensor.data_ptr()
                storage = tensor.untyped_storage()
            except (KeyError, RuntimeError):
                self._take_odd_output(draft, tensor, seq, mark)
                continue
            if address == 0:
                self._take_odd_output(draft, tensor, seq, mark)
                continue
            texts.append(layout.text)
            identity = storage._cdata
            if layout.nbytes == storage.nbytes() and (identity in whole or identity not in refs):
                whole[identity] = seq
                if identity not in refs:
                    refs[identity] = weak_ref(storage)
            else:
                low = tensor.storage_offset() * layout.size
                self.producers.wrote(storage, low, low + layout.span, seq, layout.nbytes)
            if layout.wide and pointers.suspicious(tensor):
                draft.marks = (*draft.marks, f"o{len(parts) - draft.n_inputs}:pointers")
            parts.append(_digest(layout.quick(address)))

    def _take_other_input(self, draft: Draft, value: object) -> None:
        if isinstance(value, (list, tuple)):
            self.take_inputs(draft, value)
        elif value is None:
            draft.texts.append("-")
        elif isinstance(value, Tensor):
            self._take_odd_input(draft, value)

    def _take_other_output(self, draft: Draft, value: object, seq: int, mark: str) -> None:
        if isinstance(value, (list, tuple)):
            self.take_outputs(draft, value, seq, mark)
        elif value is None:
            draft.texts.append("-")
        elif isinstance(value, Tensor):
            self._take_odd_output(draft, value, seq, mark)

    def _take_odd_input(self, draft: Draft, tensor: Tensor) -> None:
        """One that is not plain, or of whose storage more is known than who wrote it."""
        producers = self.producers
        storage = storage_of(tensor)
        if storage is not None:
            producers.settle(storage)
        for text, digest, storage, low, high, _, mark in self.fingerprints.parts(tensor):
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
                draft.marks = (*draft.marks, f"i{len(draft.parts)}:{mark}")
            draft.parts.append(digest)
            draft.writers.append(writer)

    def _take_odd_output(self, draft: Draft, tensor: Tensor, seq: int, mark: str) -> None:
        for text, digest, storage, low, high, nbytes, own in self.fingerprints.parts(tensor):
            draft.texts.append(text)
            if storage is not None:
                self.producers.wrote(storage, low, high, seq, nbytes, mark)
            flag = mark or own
            if not flag and "int64" in text and pointers.suspicious(tensor):
                flag = "pointers"
            if flag:
                draft.marks = (*draft.marks, f"o{len(draft.parts) - draft.n_inputs}:{flag}")
            draft.parts.append(digest)

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
