"""What a call was given or gave back: its tensors in order, and one text of everything else.

Nothing is called that the program did not call itself: no length of an iterator, no property, no conversion.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from detrun.fingerprint.byte_digest import digest_bytes

if TYPE_CHECKING:
    from detrun.recorder.trace.tracer import Draft, Tracer

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_unwrapped = torch._C._functorch.get_unwrapped

_DEEPEST = 12
_MOST = 10_000
"""Entries of one call that are looked at."""


def leaves_of(*values: Any) -> tuple[list[Tensor], str]:
    """The tensors inside nested tuples, lists, mappings and dataclasses in the order they were given, and the rest as
    text: numbers exactly, arrays by a digest, other objects by the name of their type, tensors as `*`. In strings the
    folder of this arm, which no two arms share, is a word."""
    tensors: list[Tensor] = []
    words: list[str] = []
    for value in values:
        _walk(value, tensors, words, 0)
    return tensors, " ".join(words)


def tensors_of(*values: Any) -> list[Tensor]:
    """The tensors alone."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(_bare(value))
        elif value is not None:
            _walk(value, tensors, None, 0)
    return tensors


def keep_begin(tracer: Tracer, draft: Draft, inputs: Sequence[Any]) -> None:
    """Give the inputs of an event that is no call of an operator to the keeper, if it wants them."""
    keeper = tracer.keeper
    if keeper is not None and keeper.wants(draft.key):
        keeper.begin(draft, None, inputs, {})


def keep_end(tracer: Tracer, draft: Draft, outputs: Sequence[Any]) -> None:
    """The same for its outputs, when its digests are there."""
    if tracer.keeper is not None:
        tracer.keeper.end(draft, outputs)


@contextmanager
def aside(tracer: Tracer) -> Iterator[None]:
    """Inside of this the dispatch mode looks away on this thread: what runs is a piece of one event."""
    local: Any = tracer.local
    local.aside = getattr(local, "aside", False) + 1
    try:
        yield
    finally:
        local.aside -= 1


def _bare(tensor: Tensor) -> Tensor:
    """What a transform of functions (vmap, grad) wrapped has no memory of its own."""
    while _is_wrapped(tensor):
        tensor = _unwrapped(tensor)
    return tensor


def _walk(item: Any, tensors: list[Tensor], words: list[str] | None, depth: int) -> None:
    if isinstance(item, Tensor):
        tensors.append(_bare(item))
        word = "*"
    elif isinstance(item, (list, tuple)):
        if depth > _DEEPEST or len(item) > _MOST:
            word = f"<{len(item)} entries>"
        else:
            if words is not None:
                words.append("(")
            for entry in item:
                _walk(entry, tensors, words, depth + 1)
            word = ")"
    elif isinstance(item, Mapping) and depth <= _DEEPEST:
        if words is not None:
            words.append("{")
        for key in item:
            if words is not None:
                words.append(f"{_shared(str(key))}:" if isinstance(key, (str, int)) else f"<{type(key).__name__}>:")
            _walk(item[key], tensors, words, depth + 1)
        word = "}"
    elif dataclasses.is_dataclass(item) and not isinstance(item, type) and depth <= _DEEPEST:
        if words is not None:
            words.append(f"{type(item).__name__}{{")
        for field in dataclasses.fields(item):
            _walk(getattr(item, field.name, None), tensors, words, depth + 1)
        word = "}"
    else:
        word = "" if words is None else _word(item)
    if words is not None:
        words.append(word)


def _word(item: Any) -> str:
    if isinstance(item, float):
        return float.hex(item)
    if isinstance(item, str):
        return repr(_shared(item))
    if item is None or isinstance(item, (bool, int, complex, bytes)):
        return repr(item)
    if isinstance(item, np.generic):
        return f"{item.dtype}:{item.tobytes().hex()}"
    if isinstance(item, np.ndarray):
        content = "" if item.dtype.hasobject else digest_bytes(np.ascontiguousarray(item).tobytes())
        return f"{item.dtype}{list(item.shape)}:{content}"
    return f"<{type(item).__name__}>"


def _shared(text: str) -> str:
    if "/" not in text:
        return text
    arm = os.path.dirname(os.environ.get("DETRUN_ATTEMPT_DIR", ""))  # noqa: PTH120 - text, many times a step
    return text.replace(f"{arm}/", "{arm}/") if len(arm) > 1 else text
