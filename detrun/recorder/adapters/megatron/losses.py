"""Losses: of each micro-batch, of the routers and of multi-token prediction."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from detrun.recorder.adapters.megatron.known import Arguments, Known, plain

_DEPTH = re.compile(r"mtp_1 loss")


def backward_passes(module: ModuleType, known: Known) -> None:
    """`custom_backward` calls autograd's engine itself. It is given a gradient on all but the last stage of a pipeline,
    where what it starts from is no loss."""
    adapter = known.adapter

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        arguments = Arguments(original)

        def custom_backward(*args: Any, **kwargs: Any) -> Any:
            starts_here = arguments.read("grad_output", args, kwargs) is None
            with adapter.backward(arguments.read("output", args, kwargs) if starts_here else None):
                return original(*args, **kwargs)

        return custom_backward

    function = adapter.needs(module, "custom_backward")
    if function is not None and adapter.takes(function, "output", "grad_output"):
        adapter.wrap(module, "custom_backward", around)


class Writer:
    """Stands where Megatron's writer of TensorBoard does, or where this rank has none: every scalar is kept as it is, and
    then goes where it would have gone."""

    def __init__(self, known: Known, writer: Any, repeats: bool) -> None:
        self._known = known
        self._writer = writer
        self._repeats = repeats

    def add_scalar(self, tag: str, scalar_value: Any, *args: Any, **kwargs: Any) -> None:
        self._known.adapter.run(self._tell, tag, scalar_value)
        if self._writer is not None:
            self._writer.add_scalar(tag, scalar_value, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if self._writer is None:
            raise AttributeError(name)
        return getattr(self._writer, name)

    def _tell(self, tag: str, value: Any) -> None:
        if tag.startswith("moe/"):
            return  # per layer, after reduction and as numbers that were waited for; each layer's own is told before
        kind: Any = "derived" if self._repeats or "cumulative" in tag else "training"
        self._known.adapter.metric(plain(tag), value, kind)
        if _DEPTH.fullmatch(tag):
            self._known.adapter.metric("mtp_loss", value, kind)


def _reporting(known: Known, tracker: str, values: Callable[[], dict[str, Any]] | None) -> Any:
    """Around a function that reduces a tracker over the ranks, logs it and clears it. values: what the tracker holds, by
    the name of the loss, a vector over layers; None where the tracker is the function's first argument."""
    adapter = known.adapter

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        arguments = Arguments(original)

        def report(*args: Any, **kwargs: Any) -> Any:
            records = known.recorded(tracker)
            # A loop that does not log every step logs sums over several, of which a resumed run may have a part.
            repeats = len(records.steps) > 1
            adapter.run(tell_layers, records, repeats, values or (lambda: _values_of(args[0])))
            records.steps.clear()
            writer = arguments.read("writer", args, kwargs)
            args, kwargs = arguments.put("writer", Writer(known, writer, repeats), args, kwargs)
            return original(*args, **kwargs)

        return report

    def tell_layers(records: Any, repeats: bool, values: Callable[[], dict[str, Any]]) -> None:
        if not records.steps:
            return
        held = values()
        for name, layers in records.layers.items():
            vector = held[name]
            for layer in sorted(layers):
                adapter.metric(f"{name}/layer_{layer}", vector[layer - 1], "derived" if repeats else "training")

    return around


def _recording(known: Known, tracker: str, *, first: int, name: str | None = None) -> Any:
    """Around a function by which a layer adds to a tracker. first: the number of the first layer, as it is given. name:
    of the loss, where it is no parameter."""
    adapter = known.adapter

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        arguments = Arguments(original)

        def record(*args: Any, **kwargs: Any) -> Any:
            layer = arguments.read("layer_number", args, kwargs)
            if layer is not None:
                called = name or str(arguments.read("name", args, kwargs))
                known.recorded(tracker).add(called, int(layer) - first + 1, adapter.session.next_step())
            return original(*args, **kwargs)

        return record

    return around


def _values_of(tracker: Any) -> dict[str, Tensor]:
    return {name: entry.values for name, entry in tracker.metrics.items()}


def router_losses(module: ModuleType, known: Known) -> None:
    """Load-balancing losses and z-losses, in the tracker of `moe_logging`; before 0.17 in one of `parallel_state`."""
    adapter = known.adapter
    logging = sys.modules.get("megatron.core.transformer.moe.moe_logging")
    if logging is not None:
        tracker = adapter.needs(logging, "MoEMetricsTracker")
        if tracker is None or adapter.needs(tracker, "metrics") is None:
            return
        for function, wanted in (("record", ("name", "layer_number")), ("report", ("writer",))):
            found = adapter.needs(tracker, function)
            if found is None or not adapter.takes(found, *wanted):
                return
        adapter.wrap(tracker, "record", _recording(known, "moe", first=1))
        adapter.wrap(tracker, "report", _reporting(known, "moe", None))
        return
    state = sys.modules.get("megatron.core.parallel_state")
    read = adapter.needs(state, "get_moe_layer_wise_logging_tracker")
    save = adapter.needs(module, "save_to_aux_losses_tracker")
    track = adapter.needs(module, "track_moe_metrics")
    if read is None or save is None or track is None:
        return
    if adapter.takes(save, "name", "layer_number") and adapter.takes(track, "writer"):

        def values() -> dict[str, Any]:
            return {name: entry["values"] for name, entry in read().items()}

        adapter.wrap(module, "save_to_aux_losses_tracker", _recording(known, "moe", first=1))
        adapter.wrap(module, "track_moe_metrics", _reporting(known, "moe", values))


def prediction_losses(module: ModuleType, known: Known) -> None:
    """The losses of multi-token prediction, one a depth, and how often its guesses are accepted."""
    adapter = known.adapter
    helper = adapter.needs(module, "MTPLossLoggingHelper")
    if helper is None or adapter.needs(helper, "tracker") is None:
        return
    older = hasattr(helper, "save_loss_to_tracker")
    save, held = ("save_loss_to_tracker", "values") if older else ("save_metrics_to_tracker", "loss_values")
    saving, tracking = adapter.needs(helper, save), adapter.needs(helper, "track_mtp_metrics")
    if saving is None or tracking is None:
        return
    if not (adapter.takes(saving, "layer_number") and adapter.takes(tracking, "writer")):
        return

    def values() -> dict[str, Any]:
        return {"mtp_loss": helper.tracker[held]}

    adapter.wrap(helper, save, _recording(known, "mtp", first=0, name="mtp_loss"))
    adapter.wrap(helper, "track_mtp_metrics", _reporting(known, "mtp", values))
