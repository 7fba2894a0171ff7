"""What the root module was given: a digest of its arguments, for a shifted or changed data order.

Tensors that require a gradient are products of the training, not data, and only leave a mark.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from detrun.fingerprint.host import HostHasher
from detrun.recorder.digests import DeviceDigest, HostDigest, seal

_DEEPEST = 12
_SIMPLE = (str, bytes, int, float, complex, bool, type(None))


def batch_digest(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> HostDigest | DeviceDigest:
    """The digest of a call's arguments: tensors, arrays, numbers and strings inside nested tuples, lists, mappings
    and dataclasses, in the order they were given. Other objects count by the name of their type. In strings the folder
    of this arm, which no two arms share, counts as a word: samples often carry the path they were read from."""
    hasher = HostHasher()
    elsewhere: list[torch.Tensor] = []
    _feed(hasher, elsewhere, args, 0)
    if kwargs:
        _feed(hasher, elsewhere, kwargs, 0)
    return seal(hasher, elsewhere)


def _feed(hasher: HostHasher, elsewhere: list[torch.Tensor], item: Any, depth: int) -> None:
    if isinstance(item, torch.Tensor):
        if item.requires_grad:
            hasher.feed_text("<requires grad>")
        else:
            elsewhere += hasher.feed_tensors([item])
    elif isinstance(item, str):
        hasher.feed_text(f"str {_shared(item)!r}")
    elif isinstance(item, _SIMPLE):
        hasher.feed_text(item.hex() if isinstance(item, float) else f"{type(item).__name__} {item!r}")
    elif depth > _DEEPEST:
        hasher.feed_text("<too deep>")
    elif isinstance(item, (tuple, list)):
        hasher.feed_text(f"<{len(item)}>")
        for entry in item:
            _feed(hasher, elsewhere, entry, depth + 1)
    elif isinstance(item, Mapping):
        hasher.feed_text(f"<mapping {len(item)}>")
        for key in item:
            hasher.feed_text(_shared(str(key)) if isinstance(key, _SIMPLE) else f"<{type(key).__name__}>")
            _feed(hasher, elsewhere, item[key], depth + 1)
    elif isinstance(item, (np.ndarray, np.generic)):
        hasher.feed_array(np.asarray(item))
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        hasher.feed_text(f"<{type(item).__name__}>")
        for field in dataclasses.fields(item):
            hasher.feed_text(field.name)
            _feed(hasher, elsewhere, getattr(item, field.name, None), depth + 1)
    else:
        hasher.feed_text(f"<{type(item).__name__}>")


def _shared(text: str) -> str:
    """A string without what belongs to this arm alone."""
    if "/" not in text:
        return text
    arm = os.path.dirname(os.environ.get("DETRUN_ATTEMPT_DIR", ""))  # noqa: PTH120 - text, many times a step
    return text.replace(f"{arm}/", "{arm}/") if len(arm) > 1 else text
