"""Losses: of each micro-batch, of the routers and of multi-token prediction."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from detrun.recorder.adapters.megatron.known import Arguments, Known, plain

if TYPE_CHECKING:
    from detrun.recorder.adapters.adapter import Kind

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
    """Stands where Megatron's writer of TensorBoard does, or where this rank has none: every scalar is kept as it is,
    and then goes where it would have gone."""

    def __init__(self, known: Known, writer: Any, kind: Kind) -> None:
        self._known = known
        self._writer = writer
        self._kind = kind

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
            return  # a layer's, as a number that was waited for; each layer's own is told exactly
        kind: Kind = "derived" if "cumulative" in tag else self._kind
        self._known.adapter.metric(plain(tag), value, kind)
        if _DEPTH.fullmatch(tag):
            self._known.adapter.metric("mtp_loss", value, kind)


def _reporting(known: Known, tracker: str) -> Any:
    """Around a function that reduces a tracker over the ranks, logs it and clears it. A loop of the user's own may log
    sums over several steps, of which a resumed run has a part: those are derived."""

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        arguments = Arguments(original)

        def report(*args: Any, **kwargs: Any) -> Any:
            steps = known.steps_recorded.pop(tracker, set())
            kind: Kind = "training" if known.adapter.session.paced and len(steps) < 2 else "derived"
            writer = Writer(known, arguments.read("writer", args, kwargs), kind)
            args, kwargs = arguments.put("writer", writer, args, kwargs)
            return original(*args, **kwargs)

        return report

    return around


def _recording(known: Known, tracker: str, value: str, *, first: int = 1, name: str | None = None) -> Any:
    """Around a function by which a layer adds to a tracker. value: the parameter that it adds. first: how it numbers
    the first layer. name: of the loss, where it is no parameter."""
    adapter = known.adapter

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        arguments = Arguments(original)

        def add(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            layer = arguments.read("layer_number", args, kwargs)
            if layer is None or adapter.observer.capturing():
                return
            called = name or str(arguments.read("name", args, kwargs))
            known.add(f"{called}/layer_{int(layer) - first + 1}", arguments.read(value, args, kwargs))
            known.steps_recorded.setdefault(tracker, set()).add(adapter.session.next_step())

        def record(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            adapter.run(add, args, kwargs)
            return result

        return record

    return around


def _track(known: Known, places: tuple[tuple[Any, str, Any, tuple[str, ...]], ...]) -> None:
    """Wraps what there is of (owner, function, around, the parameters that are read)."""
    for owner, function, around, wanted in places:
        found = known.adapter.needs(owner, function)
        if found is not None and known.adapter.takes(found, *wanted):
            known.adapter.wrap(owner, function, around)


def router_losses(module: ModuleType, known: Known) -> None:
    """Load-balancing losses and z-losses, in the tracker of `moe_logging`; before 0.17 in one of `parallel_state`."""
    logging = sys.modules.get("megatron.core.transformer.moe.moe_logging")
    saving, reporting = "save_to_aux_losses_tracker", "track_moe_metrics"
    report = _reporting(known, "moe")
    if logging is not None or not hasattr(module, saving):
        tracker = known.adapter.needs(logging or module, "MoEMetricsTracker")
        if tracker is None:
            return
        record = (tracker, "record", _recording(known, "moe", "value"), ("name", "value", "layer_number"))
        _track(known, (record, (tracker, "report", report, ("writer",))))
    else:
        save = (module, saving, _recording(known, "moe", "loss"), ("name", "loss", "layer_number"))
        _track(known, (save, (module, reporting, report, ("writer",))))


def prediction_losses(module: ModuleType, known: Known) -> None:
    """The losses of multi-token prediction, one a depth, and how often its guesses are accepted."""
    helper = known.adapter.needs(module, "MTPLossLoggingHelper")
    if helper is None:
        return
    older = hasattr(helper, "save_loss_to_tracker")
    name = "save_loss_to_tracker" if older else "save_metrics_to_tracker"
    record = _recording(known, "mtp", "loss", first=0, name="mtp_loss")
    save = (helper, name, record, ("loss", "layer_number"))
    _track(known, (save, (helper, "track_mtp_metrics", _reporting(known, "mtp"), ("writer",))))
