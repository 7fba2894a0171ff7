"""The modules that a program calls from outside of any other: its models. None is kept alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import nn


class Models:
    """The root modules of a process that still exist, in the order in which they were first called."""

    def __init__(self, gone: Callable[[weakref.ref[nn.Module]], None]) -> None:
        """gone: called when one of them dies."""
        self._gone = gone
        self._roots: list[weakref.ref[nn.Module]] = []
        self._parts: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()

    def __bool__(self) -> bool:
        return bool(self._roots)

    def add(self, root: nn.Module) -> None:
        if not any(reference() is root for reference in self._roots):
            self._roots = [reference for reference in self._roots if reference() is not None]
            self._roots.append(weakref.ref(root, self._gone))

    def live(self) -> list[nn.Module]:
        return [root for root in (reference() for reference in self._roots) if root is not None]

    def has_part(self, module: nn.Module) -> bool:
        """Whether it is a part of a root module that is now called by itself, behind that one: a head that a loss
        function calls. What it is given was computed, and is no batch."""
        known = self._parts.get(module)
        if known is None:
            known = any(part is module for root in self.live() if root is not module for part in root.modules())
            self._parts[module] = known
        return known
