"""Brings detrun's recorder into a Python process without a change of code. Python imports this at start-up.

Runs the `sitecustomize` that it hides, and, where detrun started the process, waits for torch to be imported and
installs the recorder then. A process that never imports torch pays for this file alone. Standard library only.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def _run_hidden_one() -> None:
    """Run the next `sitecustomize` on the path; this one stands first and hides it."""
    here = os.path.realpath(os.path.dirname(__file__))  # noqa: PTH120 - before anything else is imported
    others = [entry for entry in sys.path if os.path.realpath(entry or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


class _WaitForModules:
    """A finder that finds nothing itself: it lets the others find a module and acts once that has been imported.

    actions: by module name, a function that takes the module.
    """

    def __init__(self, actions: dict[str, Any]) -> None:
        self.actions = actions

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.actions:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec = find(name, path, target)
            if spec is not None:
                self._act_after(name, spec.loader)
                return spec
        return None

    def _act_after(self, name: str, loader: Any) -> None:
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: Any) -> None:
            vars(loader).pop("exec_module", None)
            execute(module)
            act = self.actions.pop(name, None)
            if not self.actions and self in sys.meta_path:
                sys.meta_path.remove(self)
            if act is not None:
                act(module)

        # On this one instance: its class and what else it can do stay as they are.
        loader.exec_module = exec_module


_fresh_rng: dict[str, Any] = {}


def _note_state(module: Any) -> None:
    """Keep what the operating system seeded a generator with, before anybody can have seeded it."""
    try:
        read = getattr(module, "getstate", None)
        _fresh_rng[module.__name__] = read() if read else module.get_state(legacy=False)
    except Exception:  # noqa: BLE001 - never break the program
        _report()


def _install(_torch: Any) -> None:
    try:
        import detrun

        own = os.path.join(os.path.dirname(os.path.abspath(__file__)), "detrun")  # noqa: PTH100, PTH118, PTH120
        if os.path.isdir(own) and detrun.__path__[0] != own:  # noqa: PTH112
            # The program's own folder comes before PYTHONPATH; the recorder that was frozen with the experiment counts.
            detrun.__path__ = [own, *(entry for entry in detrun.__path__ if entry != own)]
        from detrun.recorder import install
    except Exception:  # noqa: BLE001 - never break the program
        _report()
    else:
        install()


def _report() -> None:
    import traceback

    text = traceback.format_exc()
    try:
        folder = os.path.join(os.environ["DETRUN_ATTEMPT_DIR"], "recorder")  # noqa: PTH118
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103
        with open(os.path.join(folder, f"failed-{os.getpid()}.txt"), "w", encoding="utf-8") as file:  # noqa: PTH118, PTH123
            file.write(text)
    except (KeyError, OSError):
        sys.stderr.write(f"detrun: the recorder could not start:\n{text}\n")


try:
    if os.environ.get("DETRUN_ATTEMPT_DIR"):
        # On sys, where the recorder finds it whatever module is called sitecustomize by then.
        sys._detrun_fresh_rng = _fresh_rng  # type: ignore[attr-defined]
        _actions = {"torch": _install, "random": _note_state, "numpy.random.mtrand": _note_state}
        sys.meta_path.insert(0, _WaitForModules(_actions))
finally:
    _run_hidden_one()
