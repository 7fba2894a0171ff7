"""What detrun knows of a framework's inside: one file a framework, run only where that framework is imported.

An adapter is a function `install(module, adapter)`. It is found by its module's name: as an entry point of the group
`detrun.adapters` (an installed package may bring its own), or in `BUILT_IN` where detrun is a plain folder on the path.
The name is that of the module whose import it waits for; the value says `package.module:function`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from types import ModuleType
from typing import TYPE_CHECKING

from detrun.recorder.late import after_import

if TYPE_CHECKING:
    from detrun.recorder.adapters.adapter import Adapter
    from detrun.recorder.observer import Observer
    from detrun.recorder.session import Session

GROUP = "detrun.adapters"

_MEGATRON = (
    "megatron.core.parallel_state",
    "megatron.core.tensor_parallel.random",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.transformer.moe.moe_utils",
    "megatron.core.transformer.multi_token_prediction",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.dist_checkpointing.serialization",
    "megatron.training.checkpointing",
    "megatron.bridge.training.checkpointing",
    "megatron.training.training",
    "megatron.bridge.training.train",
)

BUILT_IN: dict[str, str] = {
    **dict.fromkeys(_MEGATRON, "detrun.recorder.adapters.megatron:install"),
    "torchtitan.trainer": "detrun.recorder.adapters.torchtitan:install",
    "torchtitan.distributed.utils": "detrun.recorder.adapters.torchtitan:distributed",
    "torchtitan.components.metrics": "detrun.recorder.adapters.torchtitan:metrics",
    "torchtitan.components.checkpointer.base": "detrun.recorder.adapters.torchtitan:checkpoints",
    "torchtitan.models.deepseek_v3.mtp": "detrun.recorder.adapters.torchtitan:predictions",
    "transformers.modeling_outputs": "detrun.recorder.adapters.transformers:install_outputs",
    "transformers.trainer": "detrun.recorder.adapters.transformers:install_trainer",
    "accelerate.accelerator": "detrun.recorder.adapters.accelerate:install",
    **{
        f"{package}.{module}": f"detrun.recorder.adapters.lightning:{function}"
        for module, function in (
            ("trainer.trainer", "install_trainer"),
            ("loops.training_epoch_loop", "install_loop"),
            ("core.module", "install_module"),
        )
        for package in ("pytorch_lightning", "lightning.pytorch")
    },
    "lightning_fabric.fabric": "detrun.recorder.adapters.lightning:install_fabric",
    "lightning.fabric.fabric": "detrun.recorder.adapters.lightning:install_fabric",
    "deepspeed.runtime.engine": "detrun.recorder.adapters.deepspeed:install",
}
"""The module waited for: the function that is then called."""


def install(session: Session, observer: Observer) -> None:
    """Wait for the frameworks. Imports no adapter and no framework."""
    adapters: dict[str, Adapter] = {}
    for name, target in _targets():
        after_import(name, _Awaited(target, adapters, session, observer))


def _targets() -> Iterator[tuple[str, str]]:
    """What is built in, then what other packages bring; the same function once."""
    seen = set()
    try:
        others = [(found.name, found.value) for found in entry_points(group=GROUP)]
    except Exception:  # noqa: BLE001 - metadata of some package that cannot be read must not cost the built-in ones
        others = []
    for entry in (*BUILT_IN.items(), *others):
        if entry not in seen:
            seen.add(entry)
            yield entry


class _Awaited:
    """Called with the framework's module once that was imported. Never raises."""

    def __init__(self, target: str, adapters: dict[str, Adapter], session: Session, observer: Observer) -> None:
        self._target = target
        self._adapters = adapters
        self._session = session
        self._observer = observer

    def __call__(self, module: ModuleType) -> None:
        place, _, function = self._target.partition(":")
        name, tried = place.rpartition(".")[2], ()
        try:
            code = importlib.import_module(place)
            name, tried = getattr(code, "ADAPTER", name), tuple(getattr(code, "TRIED", ()))
            getattr(code, function)(module, self._adapter(name, tried))
        except Exception as error:  # noqa: BLE001 - as above
            where = f"as {getattr(module, '__name__', '?')} was imported"
            self._adapter(name, tried).failed(where, error)

    def _adapter(self, name: str, tried: Sequence[str]) -> Adapter:
        """The framework's one, made at the first call."""
        from detrun.recorder.adapters.adapter import Adapter

        if name not in self._adapters:
            self._adapters[name] = Adapter(name, tried, self._session, self._observer)
        return self._adapters[name]


def loaded() -> list[str]:
    """The adapters' own modules that this process has imported."""
    return sorted(name for name in sys.modules if name.startswith(f"{__name__}.") and not name.endswith(".adapter"))
