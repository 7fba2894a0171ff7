"""Acts on a module that may be imported only later, or never. Standard library only."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_actions: dict[str, list[Callable[[Any], None]]] = {}


def after_import(name: str, action: Callable[[Any], None]) -> None:
    """Call `action` with the module: now if it was imported, else right after its import and before whoever imports it
    takes a name from it. `action` must not raise."""
    module = sys.modules.get(name)
    if module is not None and not _is_being_imported(module):
        action(module)
        return
    _actions.setdefault(name, []).append(action)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _is_being_imported(module: Any) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class _Finder:
    """Finds nothing itself: it lets the others find a module and acts once that has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _actions:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec = find(name, path, target)
            if spec is not None:
                _act_after(name, spec.loader)
                return spec
        return None


def _act_after(name: str, loader: Any) -> None:
    execute = getattr(loader, "exec_module", None)
    if execute is None:
        return

    def exec_module(module: Any) -> None:
        vars(loader).pop("exec_module", None)
        execute(module)
        for action in _actions.pop(name, ()):
            action(module)

    # On this one instance: its class and what else it can do stay as they are.
    loader.exec_module = exec_module
