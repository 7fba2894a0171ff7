"""How an operation was called, as JSON that a stand-alone script can repeat. The words are those of
`detrun.records.kept_writer`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def describe_call(op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[dict[str, Any], list[Tensor]]:
    """The call, and its tensors in the order of their numbers. A tensor that is given twice has one number."""
    tensors: list[Tensor] = []
    return {
        "op": op,
        "args": [_word(value, tensors) for value in args],
        "kwargs": {name: _word(value, tensors) for name, value in kwargs.items()},
    }, tensors


def _word(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        for number, known in enumerate(tensors):
            if known is value:
                return {"tensor": number}
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, (list, tuple)):
        return [_word(entry, tensors) for entry in value]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, complex):
        return {"complex": [_word(value.real, tensors), _word(value.imag, tensors)]}
    if isinstance(value, torch.Generator):
        return {"generator": str(value.device)}
    for word, kind in _KINDS:
        if isinstance(value, kind):
            return {word: str(value).removeprefix("torch.")}
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return {"repr": str(value)}
    return {"repr": f"<{type(value).__name__}>"}


_KINDS: tuple[tuple[str, Any], ...] = (
    ("dtype", torch.dtype),
    ("device", torch.device),
    ("layout", torch.layout),
    ("memory_format", torch.memory_format),
)
