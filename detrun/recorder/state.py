"""Rolled-up digests of the training state: parameters, gradients, optimizer state, buffers."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from detrun.fingerprint.host import HostHasher
from detrun.recorder.digests import DeviceDigest, HostDigest, seal

UNCOMPARED_BUFFERS: weakref.WeakKeyDictionary[nn.Module, frozenset[str]] = weakref.WeakKeyDictionary()
"""Buffers of which adapters know that nobody reads them: by the module that has them, their names in it."""

UNREAD_KEYS: weakref.WeakKeyDictionary[Optimizer, frozenset[str]] = weakref.WeakKeyDictionary()
"""Entries of an optimizer's groups of which adapters know that it never reads them."""


def tensors_digest(tensors: Iterable[Tensor | None]) -> HostDigest | DeviceDigest:
    """The digest of tensors in order; an absent gradient (None) counts as absent."""
    hasher = HostHasher()
    return seal(hasher, hasher.feed_tensors(tensors))


def gradients_digest(parameters: Sequence[Tensor]) -> HostDigest | DeviceDigest:
    return tensors_digest([parameter.grad for parameter in parameters])


def optimizer_digest(optimizers: Iterable[Optimizer]) -> HostDigest | DeviceDigest:
    """Every state of every parameter, by parameter order and key, and the hyper-parameters of every group."""
    hasher = HostHasher()
    elsewhere: list[Tensor] = []
    for optimizer in optimizers:
        _feed_optimizer(hasher, elsewhere, optimizer)
    return seal(hasher, elsewhere)


def buffers_digest(roots: Iterable[nn.Module]) -> HostDigest | DeviceDigest | None:
    """The buffers of these modules, persistent or not, each once, in module order; None if they have none."""
    buffers = list({id(buffer): buffer for root in roots for buffer in _buffers(root)}.values())
    return tensors_digest(buffers) if buffers else None


def _feed_optimizer(hasher: HostHasher, elsewhere: list[Tensor], optimizer: Optimizer) -> None:
    # The state is a defaultdict: reading a missing key by [] would create it and so change the checkpoint.
    state = optimizer.state
    unread = UNREAD_KEYS.get(optimizer, frozenset())
    grouped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    alone = [key for key in state if isinstance(key, Tensor) and id(key) not in grouped]
    pending: list[Tensor] = []
    keys: tuple[Any, ...] = ()
    order: list[Any] = []
    for group in [*optimizer.param_groups, {"params": alone}] if alone else optimizer.param_groups:
        for key in sorted(group):
            if key != "params" and key not in unread:
                hasher.feed_text(key)
                _feed_value(hasher, elsewhere, group[key])
        for parameter in group["params"]:
            entry = state.get(parameter)
            if not entry:
                hasher.feed_text("<no state>")
                continue
            if tuple(entry) != keys:
                keys = tuple(entry)
                order = sorted(keys, key=str)
                hasher.feed_text(" ".join(map(str, order)))
            for key in order:
                value = entry[key]
                if isinstance(value, Tensor):
                    pending.append(value)
                else:
                    _feed_value(hasher, elsewhere, value)
        elsewhere += hasher.feed_tensors(pending)
        pending.clear()
    # Some optimizers keep what all parameters share under a name.
    shared: dict[Any, Any] = {key: value for key, value in state.items() if not isinstance(key, Tensor)}
    for key in sorted(shared, key=str):
        hasher.feed_text(str(key))
        _feed_value(hasher, elsewhere, shared[key])


def _feed_value(hasher: HostHasher, elsewhere: list[Tensor], value: Any) -> None:
    if isinstance(value, Tensor):
        elsewhere += hasher.feed_tensors([value])
    elif isinstance(value, float):
        hasher.feed_text(value.hex())
    elif value is None or isinstance(value, (bool, int, str, complex, torch.dtype)):
        hasher.feed_text(repr(value))
    elif isinstance(value, (np.ndarray, np.generic)):
        hasher.feed_array(np.asarray(value))
    elif isinstance(value, dict):
        hasher.feed_text(f"<dict {len(value)}>")
        for key in sorted(value, key=str):
            if isinstance(key, (str, int, float)):  # of others the text may be an address
                hasher.feed_text(str(key))
            _feed_value(hasher, elsewhere, value[key])
    elif isinstance(value, (tuple, list)) or type(value).__name__ == "deque":
        hasher.feed_text(f"<{len(value)}>")
        for member in value:
            _feed_value(hasher, elsewhere, member)
    else:
        hasher.feed_text(f"<{type(value).__name__}>")


def _buffers(root: nn.Module) -> Iterator[Tensor]:
    # The walk of nn.Module.buffers() without its bookkeeping of names, which is most of its cost.
    stack, seen = [root], set()
    while stack:
        module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        unread = UNCOMPARED_BUFFERS.get(module, ()) if UNCOMPARED_BUFFERS else ()
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in unread:
                yield buffer
        stack.extend(child for child in reversed(module._modules.values()) if child is not None)
