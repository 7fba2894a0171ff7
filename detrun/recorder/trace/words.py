"""The text of an operator's arguments that are no tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from detrun.recorder.trace.fingerprints import digest_of_bytes

LONGEST = 300


def scalars_text(plain: Sequence[Any], named: Mapping[str, Any]) -> str:
    """`[0, 1], True, alpha=0x1.0p+0`: equal for equal arguments and different for different ones. Never longer than
    300 characters: of a longer one the end is a digest of the whole."""
    words = [_WORDS.get(type(value), _other)(value) for value in plain]
    if not named and len(words) == 1 and len(words[0]) <= LONGEST:
        return words[0]
    if named:
        words += [f"{name}={_WORDS.get(type(value), _other)(value)}" for name, value in named.items()]
    text = ", ".join(words)
    if len(text) <= LONGEST:
        return text
    end = digest_of_bytes(text.encode("utf-8", "backslashreplace")).hex()
    return f"{text[: LONGEST - len(end) - 2]}… {end}"[:LONGEST]


def _sequence(value: Sequence[Any]) -> str:
    return f"[{', '.join([_WORDS.get(type(each), _other)(each) for each in value])}]"


def _other(value: Any) -> str:
    if isinstance(value, torch.Generator):
        return "generator"  # its state is an input of its own
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, (int, float, str, complex, bool)):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return str(value).removeprefix("torch.")
    # Anything else may have an address in its text.
    return type(value).__name__


def _short(value: Any) -> str:
    return str(value).removeprefix("torch.")


_WORDS: dict[type, Callable[[Any], str]] = {
    int: int.__repr__,
    float: float.hex,
    bool: bool.__repr__,
    str: repr,
    type(None): lambda _: "None",
    list: _sequence,
    tuple: _sequence,
    torch.dtype: _short,
    torch.device: str,
    torch.layout: _short,
    torch.memory_format: _short,
    torch.Size: _sequence,
}
