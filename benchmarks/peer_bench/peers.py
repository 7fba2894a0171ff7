"""What may stand beside the training program: nothing, an empty dispatch mode, or a tool that happens to be installed.

A peer has `before_step`, `after_step` and `close`, is told of the model, and writes below `out`.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Peer:
    """Nothing."""

    def __init__(self, model: nn.Module, out: Path) -> None:
        self.model, self.out = model, out

    def before_step(self, step: int) -> None:
        pass

    def after_step(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


class _Through(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class EmptyMode(Peer):
    """A dispatch mode that passes everything on: the least that a tracer of operators costs."""

    def before_step(self, step: int) -> None:  # noqa: ARG002
        self._mode = _Through()
        self._mode.__enter__()

    def after_step(self, step: int) -> None:  # noqa: ARG002
        self._mode.__exit__(None, None, None)


class Msprobe(Peer):
    """mindstudio-probe, its checksums of everything that passes through functions (level L1, MD5)."""

    package = "msprobe"

    def __init__(self, model: nn.Module, out: Path) -> None:
        super().__init__(model, out)
        from msprobe.pytorch import PrecisionDebugger  # type: ignore[import-not-found, unused-ignore]

        task = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "md5"}
        config = {
            "task": "statistics", "dump_path": str(out / "trace"), "rank": [], "step": [], "level": "L1",
            "extra_info": True, "statistics": task,
        }  # fmt: skip
        (out / "trace").mkdir(parents=True, exist_ok=True)
        (out / "msprobe.json").write_text(json.dumps(config), encoding="utf-8")
        self._debugger = PrecisionDebugger(config_path=str(out / "msprobe.json"))

    def before_step(self, step: int) -> None:  # noqa: ARG002
        self._debugger.start(model=self.model)

    def after_step(self, step: int) -> None:  # noqa: ARG002
        self._debugger.stop()
        self._debugger.step()


class DebugModeHashes(Peer):
    """torch's own DebugMode with its exclusive-or hash of every output, written out as text."""

    def before_step(self, step: int) -> None:  # noqa: ARG002
        from torch.utils._debug_mode import DebugMode

        self._mode = DebugMode(record_nn_module=True)
        self._mode.__enter__()
        self._hashes = DebugMode.log_tensor_hashes(hash_fn="hash_tensor")
        self._hashes.__enter__()

    def after_step(self, step: int) -> None:
        self._hashes.__exit__(None, None, None)
        self._mode.__exit__(None, None, None)
        folder = self.out / "trace"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"step{step}.txt").write_text(self._mode.debug_string(), encoding="utf-8")


PEERS: dict[str, type[Peer]] = {
    "untraced": Peer, "empty mode": EmptyMode, "debug mode": DebugModeHashes, "msprobe md5": Msprobe,
}  # fmt: skip


def missing(name: str) -> str | None:
    """The package that a peer needs and that is not installed; None if it can run."""
    package = getattr(PEERS[name], "package", None)
    return package if package is not None and importlib.util.find_spec(package) is None else None
