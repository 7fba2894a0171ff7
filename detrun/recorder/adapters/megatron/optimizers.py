"""Megatron's optimizers: gradient norms, skipped steps, losses before they are scaled, and the names of full-precision
copies and of shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from torch import Tensor

from detrun.recorder.adapters.megatron.known import Arguments, Known
from detrun.recorder.state import UNREAD_KEYS

STEPPING = ("ChainedOptimizer", "MixedPrecisionOptimizer", "FP32Optimizer")
COPIES = (("float16_groups", "fp32_from_float16_groups"),)
SHARDS = (
    ("model_float16_groups", "shard_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
    ("model_float16_groups", "shard_fp32_from_float16_groups"),
)
"""Parallel lists of the model's parameters and of what an optimizer has in their place."""


def clipping(module: ModuleType, known: Known) -> None:
    """Gradients are digested before Megatron clips them."""
    adapter = known.adapter

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        arguments = Arguments(original)

        def clip(*args: Any, **kwargs: Any) -> Any:
            parameters = arguments.read("parameters", args, kwargs)
            if not isinstance(parameters, (list, tuple, Tensor)):
                return original(*args, **kwargs)
            each = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            adapter.run(adapter.observer.clip_begins, each)
            return original(*args, **kwargs)

        return clip

    function = adapter.needs(module, "clip_grad_by_total_norm_fp32")
    if function is not None and adapter.takes(function, "parameters"):
        adapter.wrap(module, "clip_grad_by_total_norm_fp32", around)


def steps(module: ModuleType, known: Known) -> None:
    adapter = known.adapter
    base = adapter.needs(module, "MegatronOptimizer")
    if base is not None:
        adapter.wrap(base, "__init__", _constructing(known))
        adapter.wrap(base, "scale_loss", _scaling(known))
    for name in STEPPING:
        if adapter.needs(module, name) is not None:
            adapter.wrap(module, f"{name}.step", _stepping(known))
    adapter.wrap(module, "Float16OptimizerWithFloat16Params.__init__", _having(known, COPIES))
    adapter.names(lambda: dict(_names(known)))


def shards(module: ModuleType, known: Known) -> None:
    adapter = known.adapter
    adapter.needs(module, "DistributedOptimizer._get_model_param_range_map")
    adapter.wrap(module, "DistributedOptimizer.__init__", _having(known, SHARDS, sharded=True))


def _constructing(known: Known) -> Any:
    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            known.adapter.run(known.optimizers.add, self)

        return init

    return around


def _having(known: Known, lists: tuple[tuple[str, str], ...], *, sharded: bool = False) -> Any:
    """Around the constructor of an optimizer that has such lists. sharded: its ranks hold parts of the parameters, and
    what torch's optimizer has of them is no copy of another rank's."""
    adapter = known.adapter

    def look(optimizer: Any) -> None:
        for model, own in lists:
            adapter.needs(optimizer, model)
            adapter.needs(optimizer, own)
        if sharded:
            adapter.replicas([adapter.session.rank()])
            inner = optimizer.optimizer
            if type(inner).__module__.startswith("torch.optim"):
                # A restore leaves the saved step in the groups, where other libraries' optimizers have theirs.
                UNREAD_KEYS[inner] = frozenset(["step"])

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            # Without parameters, or with Megatron's own fully sharded data parallelism, it has none of the lists.
            fsdp = getattr(getattr(self, "ddp_config", None), "use_megatron_fsdp", False)
            if not getattr(self, "is_stub_optimizer", False) and not fsdp:
                adapter.run(look, self)

        return init

    return around


def _scaling(known: Known) -> Any:
    """The loss is what was there before it was scaled."""
    adapter = known.adapter

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def scale_loss(self: Any, loss: Any) -> Any:
            result = original(self, loss)
            if isinstance(loss, Tensor) and isinstance(result, Tensor):
                adapter.run(adapter.observer.scaled, loss, result)
            return result

        return scale_loss

    return around


def _stepping(known: Known) -> Any:
    """Of optimizers inside one another, the outermost tells: (did it step, gradient norm before clipping, zeros)."""
    adapter = known.adapter

    def begins(optimizer: Any) -> None:
        known.look_once()
        chained = getattr(optimizer, "chained_optimizers", None)
        if chained is not None or adapter.needs(optimizer, "config.clip_grad") > 0:
            adapter.tells("grad_norm")  # else Megatron has none, and what it returns is a placeholder

    def ends(optimizer: Any, calls: int, result: Any) -> None:
        known.tell_sums()
        stepped, norm, zeros = result
        if "grad_norm" in adapter.session.told_by_adapter:
            if norm is not None or not stepped:
                known.norm_told = True
                adapter.metric("grad_norm", math.nan if norm is None else norm)
            for group, value in (getattr(optimizer, "grad_norms_by_group", None) or {}).items():
                adapter.metric(f"grad_norm/{group}", value)
        if not adapter.session.paced:
            if zeros:
                adapter.metric("num_zeros", zeros)
            if not stepped and adapter.observer.optimizer_calls == calls:
                for inner in _inner(optimizer):
                    adapter.observer.skipped(inner)

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls, outermost = adapter.observer.optimizer_calls, not known.stepping
            if outermost:
                adapter.run(begins, self)
            known.stepping += 1
            try:
                result = original(self, *args, **kwargs)
            finally:
                known.stepping -= 1
            if outermost:
                adapter.run(ends, self, calls, result)
                adapter.session.interrupt_closed()
            return result

        return step

    return around


def _inner(optimizer: Any) -> Iterator[Any]:
    """torch's optimizers inside one of Megatron's."""
    for each in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        inner = each.optimizer
        if inner is not None:
            yield inner


def _names(known: Known) -> Iterator[tuple[int, str]]:
    """By id, names of what the optimizers have in place of the model's parameters: a copy has the parameter's own with
    `.master`, a shard also the elements that this rank has of the flattened parameter."""
    called = _model_names(known)
    for optimizer in list(known.optimizers):
        for model, own in (*COPIES, *SHARDS):
            for parameters, mine in zip(getattr(optimizer, model, ()), getattr(optimizer, own, ()), strict=False):
                for parameter, tensor in zip(parameters, mine, strict=False):
                    if tensor is None:
                        continue
                    name = called.get(id(parameter), "?")
                    if model != "float16_groups":
                        part = optimizer._get_model_param_range_map(parameter)["param"]
                        name += f"[{part.start}:{part.end}]"
                    yield id(tensor), name + (".master" if "fp32_from" in own else "")


def _model_names(known: Known) -> Mapping[int, str]:
    names: dict[int, str] = {}
    roots = known.adapter.observer.models.live()
    for number, root in enumerate(roots):
        for name, parameter in root.named_parameters(f"chunk{number}" if len(roots) > 1 else ""):
            names.setdefault(id(parameter), name)
    return names
