"""torchtitan: its trainer's step and number, the local loss before it is reduced over ranks, the norm before clipping.

The trainer's loss is the sum over a rank's tokens divided by the tokens of all ranks, and of several micro-batches
their sum; a chunked loss runs a backward pass a chunk, none of whose losses is the trainer's. What the trainer reduces
and logs itself is taken as well, in steps that it logs.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from detrun.recorder.adapters.adapter import Adapter

ADAPTER = "torchtitan"
TRIED = ("0.3.0",)

_UNBALANCED, _TOKENS = "mtp_layers.", "tokens_per_expert_E"
"""Experts are balanced in `layers` alone (0.3.0): in the layers of further predictions the tokens of each expert are
counted from the process's first step on, and nothing reads the count, nor is it saved."""

_DIMENSIONS = ("pp", "tp", "cp", "ep")
_LOGGED = ("global_avg_loss", "global_max_loss", "extra_metrics")


def install(module: ModuleType, adapter: Adapter) -> None:
    """`torchtitan.trainer`."""
    adapter.version(getattr(sys.modules.get("torchtitan"), "__version__", "unknown"))
    kind = adapter.needs(module, "Trainer")
    if kind is None:
        return
    trainers = _Trainers(adapter)
    adapter.wrap(kind, "__init__", trainers.constructed)
    adapter.wrap(kind, "train_step", trainers.step)
    adapter.wrap(kind, "forward_backward_step", trainers.micro_batch)
    adapter.track("trainer", trainers.state)


def metrics(module: ModuleType, adapter: Adapter) -> None:
    """`torchtitan.components.metrics`: what the trainer logs."""
    kind = adapter.needs(module, "MetricsProcessor")
    if kind is None or adapter.needs(kind, "log") is None or not adapter.takes(kind.log, "step", *_LOGGED):
        return
    signature = inspect.signature(kind.log)

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def tell(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = signature.bind(*args, **kwargs).arguments
            adapter.metric("global_avg_loss", given["global_avg_loss"])
            adapter.metric("global_max_loss", given["global_max_loss"])
            for name, value in (given.get("extra_metrics") or {}).items():
                if isinstance(value, (int, float)):
                    adapter.metric(name, value)

        def log(*args: Any, **kwargs: Any) -> Any:
            adapter.run(tell, args, kwargs)
            return original(*args, **kwargs)

        return log

    adapter.wrap(kind, "log", around)


def distributed(module: ModuleType, adapter: Adapter) -> None:
    """`torchtitan.distributed.utils`: the gradient norm over all ranks, before clipping."""

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def clip(*args: Any, **kwargs: Any) -> Any:
            norm = original(*args, **kwargs)
            adapter.metric("grad_norm", norm)
            return norm

        return clip

    adapter.wrap(module, "clip_grad_norm_", around)


def predictions(module: ModuleType, adapter: Adapter) -> None:
    """`torchtitan.models.deepseek_v3.mtp`: the parts of a loss of several predictions, each the sum over the rank's
    tokens, before they are weighted and divided."""
    kind = adapter.needs(module, "MTPLoss")
    if kind is None:
        return

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(loss: Any, *args: Any, **kwargs: Any) -> Any:
            if adapter.needs(loss, "fn") is None:
                return original(loss, *args, **kwargs)
            compute, parts = loss.fn, []

            def keep(*given: Any, **more: Any) -> Any:
                part = compute(*given, **more)
                parts.append(part.detach())
                return part

            loss.fn = keep
            try:
                return original(loss, *args, **kwargs)
            finally:
                loss.fn = compute
                adapter.run(_tell_parts, adapter, parts)

        return call

    adapter.wrap(kind, "__call__", around)


def checkpoints(module: ModuleType, adapter: Adapter) -> None:
    """`torchtitan.components.checkpointer.base`. Saves go through torch's distributed checkpoint, which is hooked."""

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def load(*args: Any, **kwargs: Any) -> Any:
            with adapter.restoring():
                return original(*args, **kwargs)

        return load

    adapter.wrap(module, "BaseCheckpointManager.load", around)


class _Trainers:
    """The trainer of this process; it is not kept alive."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self._trainer: weakref.ref[Any] | None = None
        self._losses = 0
        self._total: Any = None

    def constructed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
            original(trainer, *args, **kwargs)
            self.adapter.run(self._add, trainer)

        return init

    def step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def train_step(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            self.adapter.run(self._begins, trainer)
            result = original(trainer, *args, **kwargs)
            self.adapter.run(self._ends, trainer)
            self.adapter.step_ends()
            return result

        return train_step

    def micro_batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward_backward_step(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            loss = original(trainer, *args, **kwargs)
            self.adapter.run(self._tell_loss, trainer, loss)
            return loss

        return forward_backward_step

    def _add(self, trainer: Any) -> None:
        adapter = self.adapter
        self._trainer = weakref.ref(trainer)
        for name in ("step", "ntokens_seen", "gradient_accumulation_steps"):
            adapter.needs(trainer, name)
        for part in adapter.needs(trainer, "model_parts") or ():
            for name, layer in part.named_modules():
                if name.startswith(_UNBALANCED) and _TOKENS in layer._buffers:
                    adapter.unread_buffer(layer, _TOKENS)
        dims = adapter.needs(trainer, "parallel_dims")
        if dims is None:
            return
        places = {}
        for name in _DIMENSIONS:
            mesh = dims.get_optional_mesh(name)
            places[name] = 0 if mesh is None else int(mesh.get_local_rank())
        mesh = dims.get_optional_mesh("batch")
        places["dp"] = 0 if mesh is None else int(mesh.get_local_rank())
        adapter.coordinates(**places)
        copies = dims.get_optional_mesh("dp_replicate")
        if copies is not None:
            adapter.replicas([int(rank) for rank in copies.mesh.flatten().tolist()])

    def _begins(self, trainer: Any) -> None:
        self._losses, self._total = 0, None
        self.adapter.paces()
        self.adapter.tells("loss", "grad_norm")
        self.adapter.step_begins(int(trainer.step))

    def _tell_loss(self, trainer: Any, loss: Any) -> None:
        if trainer.parallel_dims.pp_enabled and not trainer.pp_has_last_stage:
            return  # the trainer's placeholder
        adapter = self.adapter
        loss = loss.detach()
        if trainer.gradient_accumulation_steps == 1:
            adapter.metric("loss", loss)
            return
        adapter.metric(f"loss[{self._losses}]", loss)
        self._losses += 1
        # A copy: a captured graph writes the next one into the same memory.
        self._total = loss.clone() if self._total is None else self._total.add_(loss)

    def _ends(self, trainer: Any) -> None:
        if self._total is not None:
            self.adapter.metric("loss", self._total)
            self._total = None
        self.adapter.metric("ntokens_seen", int(trainer.ntokens_seen))

    def state(self) -> dict[str, Any]:
        """What the trainer has in its checkpoint beside model, optimizers, schedulers and loader. The loader's own
        state is a snapshot of some steps ago: of two loaders at the same place it differs."""
        trainer = self._trainer() if self._trainer is not None else None
        if trainer is None:
            return {}
        return {"step": trainer.step, "ntokens_seen": trainer.ntokens_seen}


def _tell_parts(adapter: Adapter, parts: list[Any]) -> None:
    for depth, part in enumerate(parts):
        name = "lm_loss" if depth == 0 else "mtp_loss" if len(parts) == 2 else f"mtp_{depth}_loss"
        adapter.microbatch_metric(name, part)
