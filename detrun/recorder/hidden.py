"""Iterators that run in a loop and have no name: `for batch in batches(data)` keeps its generator where no variable
shows it."""

from __future__ import annotations

import contextlib
import gc
import sys
import types
from itertools import compress
from typing import Any

from detrun.recorder.owned import is_program_file, program_modules

_MANAGERS = (contextlib._GeneratorContextManager, contextlib._AsyncGeneratorContextManager)
_TORCH_ITERATORS = ("_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter")


def hidden_iterators() -> list[tuple[str, Any]]:
    """Suspended generators of the program's functions, iterators of torch's data loaders, and objects of the program's
    module-level classes that have `__next__`, by the name of their function or class. Where several have one name
    nothing tells them apart, and none of them is given."""
    wanted = {types.GeneratorType, *_MANAGERS, *_iterator_types()}
    found: dict[str, list[Any]] = {}
    everything = gc.get_objects()
    # Without a line of Python an object: there may be a million.
    chosen = list(compress(everything, map(wanted.__contains__, map(type, everything))))
    del everything
    # A context manager that was written as a generator stands still in it as well, and gives nothing to a loop.
    managers = {id(item.gen) for item in chosen if type(item) in _MANAGERS}
    for item in chosen:
        if id(item) in managers or type(item) in _MANAGERS:
            continue
        if type(item) is types.GeneratorType:
            if item.gi_frame is not None and not item.gi_running and is_program_file(item.gi_code.co_filename):
                found.setdefault(item.gi_code.co_name.strip("<>"), []).append(item)
        else:
            found.setdefault(type(item).__name__.strip("_"), []).append(item)
    return [(name, items[0]) for name, items in sorted(found.items()) if len(items) == 1]


def _iterator_types() -> set[type]:
    loader = sys.modules.get("torch.utils.data.dataloader")
    kinds = {getattr(loader, name) for name in _TORCH_ITERATORS if loader is not None}
    for _, module in program_modules():
        kinds |= {made for made in list(module.__dict__.values()) if type(made) is type and "__next__" in made.__dict__}
    return kinds
