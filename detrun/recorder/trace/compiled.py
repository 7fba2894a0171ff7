"""What runs where the tracer cannot look inside: compiled regions, replayed device graphs, Triton kernels, and
functions of the program's own that autograd calls.

A region is one event with what goes in and what comes out, where that is known, and is counted under its name in the
trace's coverage.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.compiler import is_dynamo_compiling

from detrun.recorder.late import after_import
from detrun.recorder.trace.leaves import aside, keep_begin, keep_end, leaves_of, tensors_of
from detrun.recorder.trace.steps import OPERATORS

if TYPE_CHECKING:
    from detrun.recorder.trace.tracer import Draft, Tracer

_COMPILED = "torch._inductor.output_code"
_TRITON = "triton"


@dataclass
class Compiled:
    """`install` once, `open` and `close` with the window. Never raises into the program."""

    tracer: Tracer
    _restore: list[Callable[[], None]] = field(default_factory=list)

    def install(self) -> None:
        """What must be in place before the program takes a function by name."""
        after_import(_COMPILED, self._wrap_regions)
        after_import(_TRITON, self._hook_launches)
        if self.tracer.settings.level >= OPERATORS:
            self._wrap_functions()

    def open(self) -> None:
        if torch.cuda.is_available():
            self._patch(torch.cuda.CUDAGraph, "replay", self._replay)

    def close(self) -> None:
        for restore in reversed(self._restore):
            restore()
        self._restore.clear()

    # Compiled regions

    def _wrap_regions(self, module: Any) -> None:
        for name in ("CompiledFxGraph", "CompiledAOTI"):
            kind = getattr(module, name, None)
            if kind is not None and "__call__" in vars(kind):
                kind.__call__ = self._region(kind.__call__)

    def _region(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """One compiled graph, of a forward or of a backward pass. Inside of it the dispatch mode looks away: the
        operators that are left there are pieces of it, on buffers that mean nothing outside."""
        tracer = self.tracer

        @functools.wraps(original)
        def region(this: Any, inputs: Sequence[Any]) -> Any:
            if not tracer.active or _is_muted(tracer):
                return original(this, inputs)
            given = list(inputs)  # the region empties the list it gets
            draft = self._begin("opaque", "compiled", given)
            del given
            with aside(tracer):
                result = original(this, inputs)
            self._end(draft, result, "compiled region")
            return result

        return region

    # Functions of the program's own

    def _wrap_functions(self) -> None:
        """The Python boundary of `torch.autograd.Function`: what it calls beside torch's operators, in C or through a
        compiler of its own, is between its inputs and its outputs."""
        tracer = self.tracer
        original_apply: Any = vars(torch.autograd.Function)["apply"].__func__
        original_backward: Any = BackwardCFunction.apply

        @functools.wraps(original_apply)
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or not tracer.active or _is_torch(cls):
                return original_apply(cls, *args, **kwargs)
            draft = self._begin("op", f"function.{cls.__qualname__}", (args, kwargs))
            result = original_apply(cls, *args, **kwargs)
            self._end(draft, result, None)
            return result

        @functools.wraps(original_backward)
        def apply_backward(this: Any, *args: Any) -> Any:
            kind = this._forward_cls
            if is_dynamo_compiling() or not tracer.active or _is_torch(kind):
                return original_backward(this, *args)
            draft = self._begin("op", f"function.{kind.__qualname__}.backward", args)
            result = original_backward(this, *args)
            self._end(draft, result, None)
            return result

        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
        BackwardCFunction.apply = apply_backward  # type: ignore[method-assign]

    # Device graphs and Triton

    def _replay(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replay(graph: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(graph, *args, **kwargs)
            self._end(self._begin("opaque", "graph.replay", ()), (), "device graph replay")
            return result

        return replay

    def _hook_launches(self, triton: Any) -> None:
        """Triton tells of each launch by a hook; what the kernel reads and writes it does not tell."""
        tracer = self.tracer

        def launched(metadata: Any) -> None:
            if not tracer.active or _is_muted(tracer) or bool(getattr(tracer.local, "aside", False)):
                return
            try:
                tracer.opaque(f"triton {metadata.get()['name']}")
            except Exception as error:  # noqa: BLE001 - the program's run is worth more than its trace
                tracer.fail(error)

        knobs = getattr(triton, "knobs", None)
        chain: Any = getattr(getattr(knobs, "runtime", None), "launch_enter_hook", None)
        if hasattr(chain, "add"):
            chain.add(launched)
        else:
            tracer.not_captured("launches of Triton kernels: this version has no chain of launch hooks")

    # Events

    def _begin(self, kind: str, op: str, given: Any) -> Draft | None:
        tracer = self.tracer
        try:
            tensors, scalars = leaves_of(given)
            draft = tracer.begin(kind, op, tensors, scalars=scalars)
            if draft is not None:
                keep_begin(tracer, draft, tensors)
            return draft
        except Exception as error:  # noqa: BLE001 - as above
            tracer.fail(error)
            return None

    def _end(self, draft: Draft | None, result: Any, counted: str | None) -> None:
        tracer = self.tracer
        try:
            outputs = tensors_of(result)
            if draft is None:
                tracer.wrote(outputs)
                return
            tracer.end(draft, outputs)
            keep_end(tracer, draft, outputs)
            if counted is not None:
                tracer.opaque(counted)
        except Exception as error:  # noqa: BLE001 - as above
            tracer.fail(error)

    def _patch(self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, wrap(original))
        self._restore.append(lambda: setattr(owner, name, original))


def _is_muted(tracer: Tracer) -> bool:
    return bool(getattr(tracer.local, "muted", False))


def _is_torch(function: Any) -> bool:
    """torch's own are made of operators that are seen themselves."""
    return str(function.__module__).startswith("torch.")
