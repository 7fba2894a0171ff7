"""The canonical text of plain values, so that equal ones are equal wherever they come from."""

from __future__ import annotations

import numbers
from collections import deque
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from detrun.fingerprint.byte_digest import digest_parts
from detrun.fingerprint.host import memory_of
from detrun.fingerprint.tensors import named_parts

_DEEPEST = 12


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
            texts.append(item_of(memory) or "<tensor>")
        else:
            texts.append(digest_parts(part.description, memory_of(memory) if memory.nbytes else b""))
    return " ".join(texts)


def kind_of(value: object) -> str:
    """The name of a plain value's type; a tuple's is list, since files give lists back."""
    if isinstance(value, np.generic):
        return str(value.dtype.name)
    if isinstance(value, tuple):
        return "list"
    return type(value).__name__


def item_of(memory: Tensor) -> str | None:
    """The text of a host tensor of one element; None if it has none."""
    try:
        return canonical(memory.item())
    except (RuntimeError, NotImplementedError):  # a format that packs several numbers into one element
        return None
