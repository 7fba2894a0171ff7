"""Takes any tensor apart into plain, dense, contiguous ones whose memory can be read.

Distributed tensors give their local shard (no collective), wrapper subclasses their inner tensors, sparse ones their
indices and values. What has no memory (meta and fake tensors) gives no part: only its description enters a digest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

PLAIN = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})
"""Types whose memory is their content."""

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name without "torch."."""
    return str(dtype).removeprefix("torch.")


def describe(tensor: Tensor, tag: str = "") -> bytes:
    """What beside the bytes makes two tensors equal: dtype, shape, and `tag`, which says what part of what this is."""
    return f"{tag}|{dtype_name(tensor.dtype)}|{','.join(map(str, tensor.shape))};".encode()


class Part(NamedTuple):
    """A piece of memory that a tensor is made of.

    name: which part of the tensor it is ("qdata", nested ones joined by "."), "" for the whole; None for what only
    describes a wrapper around other parts. description: what beside the bytes makes two equal. memory: dense,
    contiguous and detached; None where there is none. copied: whether it is a copy, since the original is not.
    """

    name: str | None
    description: bytes
    memory: Tensor | None
    copied: bool = False


def parts(tensor: Tensor, tag: str = "") -> Iterator[tuple[bytes, Tensor | None]]:
    """Yield (description, dense contiguous tensor or None) for each piece of memory `tensor` is made of, in a fixed
    order. The tensor yielded is detached, on the device it was on, and is a copy only where the original is strided.
    """
    with torch.no_grad(), no_dispatch_modes():
        for part in _parts(tensor, tag):
            yield part.description, part.memory


def named_parts(tensor: Tensor) -> list[Part]:
    """The same with the name of each piece, and without what only describes a wrapper."""
    if type(tensor) in PLAIN and tensor.layout is torch.strided and tensor.is_contiguous() and not _is_odd(tensor):
        return [Part("", describe(tensor), tensor.detach())]
    with torch.no_grad(), no_dispatch_modes():
        found = [part for part in _parts(tensor, "") if part.name is not None]
    return [part._replace(name=(part.name or "").removeprefix(".")) for part in found]


def placement_of(tensor: Tensor) -> str:
    """How a distributed tensor's shards lie on its mesh, such as "(Shard(dim=0),)"; "" for any other tensor."""
    placements = getattr(tensor, "placements", None) if type(tensor) not in PLAIN else None
    return "" if placements is None else str(placements)


def no_dispatch_modes() -> Any:
    """Keeps a tracer or a profiler of the user's from seeing the operations of the recorder."""
    if torch._C._len_torch_dispatch_stack() > 0:
        from torch.utils._python_dispatch import _disable_current_modes

        return _disable_current_modes()
    return nullcontext()


def _parts(tensor: Tensor, tag: str) -> Iterator[Part]:
    if hasattr(tensor, "trigger_wait"):  # the result of a functional collective: its user would wait here, too
        tensor = tensor.trigger_wait()
    if type(tensor) not in PLAIN:
        inner = _inner_tensors(tensor)
        if inner is not None:
            yield Part(None, describe(tensor, f"{tag}<{type(tensor).__name__}{placement_of(tensor)}>"), None)
            for name, piece in inner:
                yield from _parts(piece, f"{tag}.{name}")
            return
        if not _has_memory(tensor):
            yield Part(tag, describe(tensor, f"{tag}<{type(tensor).__name__}>"), None)
            return
    if tensor.layout is torch.sparse_coo:
        yield Part(None, describe(tensor, f"{tag}<sparse>"), None)
        yield from _parts(tensor._indices(), f"{tag}.indices")
        yield from _parts(tensor._values(), f"{tag}.values")
    elif tensor.layout in _COMPRESSED:
        yield Part(None, describe(tensor, f"{tag}<{tensor.layout}>"), None)
        for name in _COMPRESSED[tensor.layout]:
            yield from _parts(getattr(tensor, name)(), f"{tag}.{name}")
        yield from _parts(tensor.values(), f"{tag}.values")
    elif tensor.is_meta or tensor.layout is not torch.strided or _is_freed(tensor):
        yield Part(tag, describe(tensor, f"{tag}<no memory>"), None)
    elif tensor.is_quantized:
        yield Part(None, f"{tag}<{tensor.qscheme()}>".encode(), None)
        yield from _parts(tensor.int_repr(), tag)
    else:
        memory = _readable(tensor.detach())
        yield Part(tag, describe(tensor, tag), memory, memory.data_ptr() != tensor.data_ptr())


def _is_odd(tensor: Tensor) -> bool:
    return tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or _is_freed(tensor)


def _inner_tensors(tensor: Tensor) -> list[tuple[str, Tensor]] | None:
    local = getattr(tensor, "_local_tensor", None)
    if isinstance(local, Tensor):
        return [("local", local)]
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return None
    names, _ = flatten()
    return [(name, getattr(tensor, name)) for name in names]


def _has_memory(tensor: Tensor) -> bool:
    """False for a subclass that answers every operation itself: its own storage is a stand-in (fake tensors)."""
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def _is_freed(tensor: Tensor) -> bool:
    """Whether its storage was given back for a while, as sharded training does with gathered parameters."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def _readable(tensor: Tensor) -> Tensor:
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()
