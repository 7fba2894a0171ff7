"""Digests of tensors in host memory, read where it lies, through its address.

Never through `.numpy()`: that marks the storage as not resizable for good, and sharded training then dies when it
frees its gathered parameters, so that the recorder would have changed the run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from detrun.fingerprint.byte_digest import ByteHasher
from detrun.fingerprint.tensors import PLAIN, describe, parts

_ABSENT = b"absent;"
_NO_MEMORY = b"no memory;"
_layouts: dict[tuple[torch.dtype, torch.Size], tuple[bytes, Any]] = {}
_MOST_LAYOUTS = 65_536


class HostHasher(ByteHasher):
    """A running 128-bit digest of tensors, beside bytes and text."""

    __slots__ = ()

    def feed_tensors(self, tensors: Iterable[Tensor | None]) -> list[Tensor]:
        """Add tensors in order: dtype, shape and bytes of each; None counts as absent.

        Returns the pieces that do not lie in host memory, in order; a mark for each of them is in this digest, their
        content is not (`detrun.fingerprint.device` takes it).
        """
        update = self._state.update
        elsewhere: list[Tensor] = []
        # The loop is the cost of a state digest on a model of many small tensors: nothing in it that can be kept.
        for tensor in tensors:
            if tensor is None:
                update(_ABSENT)
                continue
            if type(tensor) in PLAIN and tensor.is_cpu and tensor.layout is torch.strided:
                dtype = tensor.dtype
                if tensor.is_contiguous() and not dtype.is_complex:
                    key = (dtype, tensor.shape)
                    layout = _layouts.get(key)
                    if layout is None:
                        layout = _layout(tensor)
                    update(layout[0])
                    if layout[1] is not None:
                        try:
                            address = tensor.data_ptr()
                        except RuntimeError:  # a transform's wrapper (vmap, grad) passes for a plain tensor
                            address = 0
                        # At 0 a program has freed the memory for a while, as sharded training does: not to be read.
                        update(layout[1](address) if address else _NO_MEMORY)
                    continue
            self._feed_parts(tensor, elsewhere)
        return elsewhere

    def feed_array(self, array: np.ndarray[Any, Any]) -> None:
        """Add a numpy array: dtype, shape and bytes."""
        self.feed_text(f"{array.dtype.str} {array.shape}")
        if array.dtype.hasobject:
            return  # addresses: they differ between equal runs
        flat = np.ascontiguousarray(array).reshape(-1)
        self.feed_bytes(flat.view(np.uint8).data if flat.nbytes else b"")

    def _feed_parts(self, tensor: Tensor, elsewhere: list[Tensor]) -> None:
        for description, piece in parts(tensor):
            self._state.update(description)
            if piece is None or piece.numel() == 0:
                continue
            if piece.is_cpu:
                self._state.update(memory_of(piece))
            else:
                self._state.update(b"device;")
                elsewhere.append(piece)


def digest_tensors(tensors: Iterable[Tensor | None]) -> str:
    """The rolled-up digest of tensors that lie in host memory. Raises ValueError if one does not."""
    hasher = HostHasher()
    if hasher.feed_tensors(tensors):
        raise ValueError("a tensor is not in host memory: use detrun.fingerprint.device")
    return hasher.text()


def memory_of(tensor: Tensor) -> Any:
    """A ctypes buffer over the memory of a contiguous host tensor. Valid while the tensor lives and is not resized."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())


def _layout(tensor: Tensor) -> tuple[bytes, Any]:
    if len(_layouts) >= _MOST_LAYOUTS:
        _layouts.clear()
    size = tensor.nbytes
    entry = (describe(tensor), (ctypes.c_char * size).from_address if size else None)
    _layouts[tensor.dtype, tensor.shape] = entry
    return entry
