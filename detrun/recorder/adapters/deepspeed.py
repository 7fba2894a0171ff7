"""DeepSpeed: the engine's own step, loss and gradient norm, and ZeRO's flat partitions by the parameters in them.

A step ends where the engine has taken one, at the boundary of accumulation: ZeRO calls the torch optimizer inside it
once a parameter group or sub-group, with other groups each time, and not at all after an overflow. The loss is what the
program gave to `engine.backward`, before it was divided by the accumulation steps and multiplied by the loss scale; the
gradient norm is the one the engine keeps, of all ranks and before clipping.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from detrun.recorder.adapters.adapter import Adapter
    from detrun.recorder.components import Piece

ADAPTER = "deepspeed"
TRIED = ("0.19.8",)

_QUESTIONS: tuple[str, ...] = (
    "get_global_grad_norm",
    "was_step_applied",
    "gradient_accumulation_steps",
    "zero_optimization",
)
_QUESTIONS += ("zero_optimization_stage", "zero_compute_grad_norm", "fp16_enabled", "bfloat16_enabled")

_COUNTERS = ("micro_steps", "tput_timer", "timers", "engine_timers", "summary_events", "losses")
"""Of an engine. `micro_steps` begins at 0 in a resumed process; what of it says where in a step the engine is, is
tracked."""


def install(module: ModuleType, adapter: Adapter) -> None:
    """`deepspeed.runtime.engine`."""
    found = sys.modules.get("deepspeed.git_version_info")
    adapter.version(getattr(found, "version", "unknown"))
    kind = adapter.needs(module, "DeepSpeedEngine")
    if kind is None:
        return
    for name in _QUESTIONS:
        adapter.needs(kind, name)
    if adapter.needs(kind, "save_checkpoint") is not None:
        adapter.takes(kind.save_checkpoint, "save_dir", "tag")
    engines = _Engines(adapter)
    adapter.wrap(kind, "__init__", engines.constructed)
    adapter.wrap(kind, "backward", engines.backward)
    adapter.wrap(kind, "scale", engines.scale)
    adapter.wrap(kind, "_take_model_step", engines.step)
    adapter.wrap(kind, "save_checkpoint", engines.save)
    adapter.wrap(kind, "load_checkpoint", engines.load)
    adapter.wrap(module, "clip_grad_norm_", engines.clip)
    adapter.names(engines.names)
    adapter.track("engine", engines.state)
    adapter.uncompared(kind, *_COUNTERS)
    zero = adapter.needs(module, "ZeROOptimizer")
    if zero is not None:
        adapter.uncompared(zero, "_backward_hook_state")


class _Engines:
    """The engines of this process; holds none of them alive."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self._alive: list[weakref.ref[Any]] = []

    def alive(self) -> list[Any]:
        return [engine for engine in (reference() for reference in self._alive) if engine is not None]

    # Around the engine's methods

    def constructed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def init(engine: Any, *args: Any, **kwargs: Any) -> None:
            original(engine, *args, **kwargs)
            self.adapter.run(self._add, engine)

        return init

    def backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(engine: Any, *args: Any, **kwargs: Any) -> Any:
            loss = args[0] if args else kwargs.get("loss")
            if loss is None:
                self.adapter.lacks("the loss among the arguments of DeepSpeedEngine.backward")
            with self.adapter.backward(loss):
                return original(engine, *args, **kwargs)

        return backward

    def scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """For a program that then calls `backward` of the result itself."""

        def scale(engine: Any, *args: Any, **kwargs: Any) -> Any:
            scaled = original(engine, *args, **kwargs)
            loss = args[0] if args else kwargs.get("loss")
            if scaled is not loss:
                self.adapter.run(self.adapter.observer.scaled, loss, scaled)
            return scaled

        return scale

    def step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def take_model_step(engine: Any, *args: Any, **kwargs: Any) -> Any:
            self.adapter.run(self._begins, engine)
            result = original(engine, *args, **kwargs)
            self.adapter.run(self._tell, engine)
            self.adapter.step_ends(skipped=_skipped(engine))
            return result

        return take_model_step

    def save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def save_checkpoint(engine: Any, save_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
            with self.adapter.saving(_folder(engine, save_dir, tag)):
                return original(engine, save_dir, tag, *args, **kwargs)

        return save_checkpoint

    def load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load_checkpoint(engine: Any, *args: Any, **kwargs: Any) -> Any:
            with self.adapter.restoring():
                return original(engine, *args, **kwargs)

        return load_checkpoint

    def clip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Of an engine without ZeRO, which keeps no norm."""

        def clip(*args: Any, **kwargs: Any) -> Any:
            norm = original(*args, **kwargs)
            self.adapter.metric("grad_norm", norm)
            return norm

        return clip

    # What is told

    def _add(self, engine: Any) -> None:
        self._alive = [reference for reference in self._alive if reference() is not None]
        self._alive.append(weakref.ref(engine))
        import torch.distributed as dist

        adapter = self.adapter
        group = adapter.needs(engine, "data_parallel_group")
        if group is not None and dist.is_initialized():
            adapter.coordinates(dp=dist.get_rank(group))
            if not engine.zero_optimization():
                adapter.replicas(dist.get_process_group_ranks(group))
        for name, place in (("tp", "get_model_parallel_rank"), ("pp", "get_stage_id")):
            where = getattr(getattr(engine, "mpu", None), place, None)
            if callable(where):
                adapter.coordinates(**{name: int(where())})

    def _begins(self, engine: Any) -> None:
        adapter = self.adapter
        adapter.paces()
        resumed = adapter.session.settings.attempt > 0 and len(self.alive()) == 1
        adapter.step_begins(int(engine.global_steps) + 1 if resumed else None)
        if _keeps_norm(engine):
            adapter.tells("grad_norm")
        inner = _torch_optimizer(engine)
        if inner is not None:
            # Here it still has all its groups.
            adapter.observer.capture.optimizer_steps(inner)

    def _tell(self, engine: Any) -> None:
        adapter = self.adapter
        if _keeps_norm(engine):
            norm = engine.get_global_grad_norm()
            if norm is None:
                adapter.lacks("a gradient norm in DeepSpeedEngine.get_global_grad_norm()")
            else:
                adapter.metric("grad_norm", norm)
        if engine.fp16_enabled():
            scale = adapter.needs(engine, "optimizer.loss_scale")
            if scale is not None:
                adapter.metric("loss_scale", scale)

    def names(self) -> dict[int, list[Piece]]:
        """By id of a flat tensor of ZeRO's, what it holds of each parameter: `emb.weight[0:4096]`, counted in the
        parameter's own elements."""
        found: dict[int, list[Piece]] = {}
        for engine in self.alive():
            stage = engine.zero_optimization_stage() if engine.zero_optimization() else 0
            called = {id(parameter): name for name, parameter in engine.named_parameters()}
            if stage in (1, 2):
                found |= self._of_mapped(engine.optimizer, called)
            elif stage == 3:
                found |= self._of_partitioned(engine.optimizer, called)
        return found

    def _of_mapped(self, optimizer: Any, called: dict[int, str]) -> dict[int, list[Piece]]:
        """ZeRO 1 and 2: each parameter knows which part of it lies where in this rank's partition."""
        names = ("single_partition_of_fp32_groups", "bit16_groups")
        if type(optimizer).__name__ == "BF16_Optimizer":
            names = ("fp32_groups_flat_partition", "bf16_groups")
        partitions, groups = (self.adapter.needs(optimizer, name) for name in names)
        found: dict[int, list[Piece]] = {}
        for flat, group in zip(partitions or (), groups or (), strict=False):
            pieces: list[Piece] = []
            for parameter in group:
                mapping = self.adapter.needs(parameter, "_hp_mapping")
                if mapping is not None:
                    there = self.adapter.needs(mapping, "hp_fragment_address")
                    own = self.adapter.needs(mapping, "lp_fragment_address")
                    if there is not None and own is not None:
                        shown = _ranged(called.get(id(parameter), "?"), own.start, own.numel)
                        pieces.append((shown, int(there.start), int(there.numel)))
            if pieces:
                found[id(flat)] = sorted(pieces, key=lambda piece: piece[1])
        return found

    def _of_partitioned(self, optimizer: Any, called: dict[int, str]) -> dict[int, list[Piece]]:
        """ZeRO 3: the partitions of a sub-group's parameters lie one behind the other."""
        flats = self.adapter.needs(optimizer, "fp32_partitioned_groups_flat")
        groups = self.adapter.needs(optimizer, "fp16_groups")
        found: dict[int, list[Piece]] = {}
        for flat, group in zip(flats or (), groups or (), strict=False):
            pieces: list[Piece] = []
            offset = 0
            for parameter in group:
                own = self.adapter.needs(parameter, "ds_tensor.ds_numel")
                if own is None:
                    return {}
                first = _rank_in(parameter) * own
                pieces.append((_ranged(called.get(id(parameter), "?"), first, own), offset, int(own)))
                offset += own
            if offset == flat.numel():
                found[id(flat)] = pieces
        return found

    def state(self) -> dict[str, Any]:
        """Beside what the engine's attributes say: where in a step it is, and this rank's part of each parameter."""
        found: dict[str, Any] = {}
        for number, engine in enumerate(self.alive()):
            own = found.setdefault(str(number), {}) if number else found
            own["microbatches_of_the_step"] = engine.micro_steps % engine.gradient_accumulation_steps()
            own |= dict(_partitions(engine))
        return found


def _partitions(engine: Any) -> Iterator[tuple[str, Any]]:
    """ZeRO 3: a parameter itself is empty where it is not in use."""
    if engine.zero_optimization() and engine.zero_optimization_stage() == 3:
        for name, parameter in engine.named_parameters():
            part = getattr(parameter, "ds_tensor", None)
            if part is not None:
                yield f"partition.{name}", part


def _keeps_norm(engine: Any) -> bool:
    """ZeRO's optimizers and those for 16 bits compute one in each step."""
    if engine.zero_optimization():
        return bool(engine.zero_compute_grad_norm())
    return bool(engine.fp16_enabled() or engine.bfloat16_enabled())


def _skipped(engine: Any) -> bool:
    try:
        return not engine.was_step_applied()
    except AttributeError:  # told as a lack when the engine's module was imported
        return False


def _torch_optimizer(engine: Any) -> Any:
    from torch.optim import Optimizer

    optimizer = engine.optimizer
    for candidate in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(candidate, Optimizer):
            return candidate
    return None


def _rank_in(parameter: Any) -> int:
    import torch.distributed as dist

    group = getattr(parameter, "ds_process_group", None)
    return dist.get_rank(group) if group is not None and dist.is_initialized() else 0


def _ranged(name: str, first: int, count: int) -> str:
    return f"{name}[{first}:{first + count}]"


def _folder(engine: Any, save_dir: Any, tag: Any) -> str | None:
    try:
        place = os.path.join(os.fspath(save_dir), str(f"global_step{engine.global_steps}" if tag is None else tag))  # noqa: PTH118
        return os.path.abspath(place)  # noqa: PTH100 - as text
    except (TypeError, AttributeError):
        return None
