"""Sees every operator, in forward, backward and optimizer, below autograd: level 4."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from detrun.fingerprint.tensors import PLAIN as PLAIN_TYPES
from detrun.recorder.trace.facts import CHANGED, PLAIN, READ, REPLACED, Facts, facts_of
from detrun.recorder.trace.generators import generator_state
from detrun.recorder.trace.words import scalars_text

if TYPE_CHECKING:
    from detrun.recorder.trace.draft import Draft
    from detrun.recorder.trace.tracer import Tracer

_NUMBERS = frozenset({int, float, bool, complex})


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lies at the bottom of the stack of modes while the window is open: what the program pushes and pops is above.

    It calls every operator exactly as it was called and returns what it returned. `on`: whether it looks at them; one
    that could not be taken off the stack just passes everything on.
    """

    supports_higher_order_operators = True

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.on = False
        self._tracer = tracer
        self._facts: dict[int, Facts] = {}
        """By the identity of an operator, which each of them keeps alive."""
        self._local = tracer.local

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap the method, which costs as much as the rest of it

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs is None:
            kwargs = {}
        local = self._local
        if not self.on or local.muted or local.aside:
            return func(*args, **kwargs)
        try:
            facts = self._facts.get(id(func)) or self._learn(func)
        except Exception as error:  # noqa: BLE001 - the program's run is worth more than its trace
            self._tracer.fail(error)
            return func(*args, **kwargs)
        if facts.skip:
            if types and any(_takes_apart(kind) for kind in types if kind not in PLAIN_TYPES):
                return NotImplemented
            return self._skipped(func, facts, args, kwargs)
        if types:
            inner = local.inside
            if inner is func:
                local.inside = None  # the second time: now the subclass takes it apart, under this mode
                return NotImplemented
            for kind in types:
                if kind not in PLAIN_TYPES and _takes_apart(kind):
                    return self._wrapped(func, facts, args, kwargs)
        if facts.creator:
            result = func(*args, **kwargs)
            self._created(result)
            return result
        draft = self._begin(func, facts, args, kwargs)
        try:
            result = facts.call(*args, **kwargs)
        except BaseException:
            self._raised(draft)
            raise
        self._end(draft, facts, args, kwargs, result)
        return result

    def _skipped(self, func: Any, facts: Facts, args: Any, kwargs: Any) -> Any:
        tracer = self._tracer
        tracer.coverage.skipped_views += 1
        if tracer.sites is not None:
            try:
                tracer.sites.note()  # its node of the graph may compute something in the backward pass
            except Exception as error:  # noqa: BLE001
                tracer.fail(error)
        return facts.call(*args, **kwargs) if not facts.grower else self._grow(func, args, kwargs)

    def _raised(self, draft: Draft | None) -> None:
        """The operator raised: there is no event."""
        keeper = self._tracer.keeper
        if draft is not None and keeper is not None:
            try:
                keeper.forget(draft)
            except Exception as error:  # noqa: BLE001
                self._tracer.fail(error)

    def _learn(self, func: Any) -> Facts:
        if isinstance(func, torch._ops.OpOverload):
            facts = facts_of(func)
        else:
            name = f"higher_order.{getattr(func, '__name__', type(func).__name__)}"
            self._tracer.not_captured(f"what is inside of {name}")
            facts = Facts(func, func, name, False, False, False, (), {}, (), (), False, None, -1, False, False, False)
        self._facts[id(func)] = facts
        return facts

    def _wrapped(self, func: Any, facts: Facts, args: Any, kwargs: Any) -> Any:
        """An operator on a tensor subclass: it is an event, and what the subclass makes of it are events inside."""
        draft = self._begin(func, facts, args, kwargs)
        local = self._local
        before = local.inside
        local.inside = func
        try:
            with _again(self):
                result = func(*args, **kwargs)
        except BaseException:
            self._raised(draft)
            raise
        finally:
            local.inside = before
        self._end(draft, facts, args, kwargs, result)
        return result

    def _begin(self, func: Any, facts: Facts, args: Any, kwargs: Any) -> Draft | None:
        tracer = self._tracer
        try:
            inputs: list[object] = []
            replaced: list[object] = []
            plain: list[Any] = []
            for value, done in zip(args, facts.places, strict=False):
                if done is PLAIN or type(value) in _NUMBERS:  # a number may be where the schema has a tensor
                    plain.append(value)
                elif done is not REPLACED:
                    inputs.append(value)
                else:
                    replaced.append(value)
            named: dict[str, Any] = {}
            if kwargs:
                words = facts.words
                for name, value in kwargs.items():
                    done = words.get(name, PLAIN)
                    if (done is READ or done is CHANGED) and type(value) not in _NUMBERS:
                        inputs.append(value)
                    elif done is not REPLACED:
                        named[name] = value
                    else:
                        replaced.append(value)
            place = tracer.scopes.place(inputs, replaced)
            scalars = scalars_text(plain, named) if plain or named else ""
            draft = tracer.begin_at(place, "op", facts.name, inputs, scalars, replaced)
            if draft is not None and facts.draws and _draws(facts, args, kwargs):
                draft.rng = generator_state(args, kwargs)
            keeper = tracer.keeper
            if keeper is not None and draft is not None and keeper.wants(draft.key):
                keeper.begin(draft, func, args, kwargs)
            return draft
        except Exception as error:  # noqa: BLE001
            tracer.fail(error)
            return None

    def _end(self, draft: Draft | None, facts: Facts, args: Any, kwargs: Any, result: Any) -> None:
        tracer = self._tracer
        if not tracer.active:
            return
        only = facts.only
        if draft is not None and -1 <= only < len(args):
            outputs: list[object] = [result if only < 0 else args[only]]
            tracer.end(draft, outputs, "", facts.router)
            if tracer.keeper is not None:
                self._kept(draft, outputs)
            return
        try:
            outputs = []
            for position, name in facts.writes:
                if 0 <= position < len(args):
                    outputs.append(args[position])
                elif name in kwargs:
                    outputs.append(kwargs[name])
            if type(result) in PLAIN_TYPES or isinstance(result, Tensor):
                if not outputs or not facts.fresh or facts.fresh[0]:
                    outputs.append(result)
            elif isinstance(result, (tuple, list)):
                if len(facts.fresh) == 1 or all(facts.fresh):
                    if not facts.writes or facts.fresh[0]:
                        outputs += result
                else:
                    fresh = (*facts.fresh, *(True for _ in result))
                    outputs += [value for value, new in zip(result, fresh, strict=False) if new]
            if facts.scratch >= 0:
                self._created(result[facts.scratch])
            if draft is None:
                tracer.wrote(outputs)
                return
            if facts.functional:
                tracer.defer(draft, outputs, _not_yet)
                return
            if facts.waits:
                tracer.settle(outputs, done=True)
            mark = "nonblocking" if facts.copies and _in_flight(args, kwargs, outputs) else ""
            tracer.end(draft, outputs, mark=mark, router=facts.router)
            if tracer.keeper is not None:
                self._kept(draft, outputs)
        except Exception as error:  # noqa: BLE001
            tracer.fail(error)

    def _kept(self, draft: Draft, outputs: list[object]) -> None:
        keeper = self._tracer.keeper
        try:
            if keeper is not None and keeper.wants(draft.key):
                keeper.end(draft, outputs)
        except Exception as error:  # noqa: BLE001
            self._tracer.fail(error)

    def _created(self, result: Any) -> None:
        try:
            if torch.are_deterministic_algorithms_enabled() and _fills():
                return  # torch itself gave it a content
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided and not tensor.is_meta:
                    self._tracer.producers.reserved(tensor)
        except Exception as error:  # noqa: BLE001
            self._tracer.fail(error)

    def _grow(self, func: Any, args: Any, kwargs: Any) -> Any:
        plain = bool(args) and type(args[0]) in PLAIN_TYPES and not args[0].is_meta
        try:
            if plain:
                self._tracer.producers.growing(args[0])
        except Exception as error:  # noqa: BLE001
            self._tracer.fail(error)
        result = func(*args, **kwargs)
        try:
            if plain:
                self._tracer.producers.grown(args[0])
        except Exception as error:  # noqa: BLE001
            self._tracer.fail(error)
        return result


class _again:  # noqa: N801 - reads as a word
    """The mode is set aside while it handles an operator; inside of this it is in place."""

    def __init__(self, mode: OperatorMode) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        torch._C._push_on_torch_dispatch_stack(self._mode)

    def __exit__(self, *_: object) -> None:
        torch._C._pop_torch_dispatch_stack(None)


def _takes_apart(kind: Any) -> bool:
    dispatch = getattr(kind, "__torch_dispatch__", None)
    return dispatch is not None and dispatch is not Tensor.__torch_dispatch__


def _fills() -> bool:
    return bool(getattr(torch.utils.deterministic, "fill_uninitialized_memory", False))


def _not_yet() -> bool:
    return False


def _draws(facts: Facts, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    if facts.silent is None:
        return True
    name, place = facts.silent
    chance = kwargs.get(name, args[place] if place < len(args) else 0.0)
    return bool(chance)


def _in_flight(args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[object]) -> bool:
    """Whether a copy between devices may still be under way."""
    told = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
    if told is not True:
        return False
    source = args[1] if len(args) > 1 and isinstance(args[1], Tensor) else args[0]
    target = outputs[0] if outputs else None
    return isinstance(source, Tensor) and isinstance(target, Tensor) and source.device != target.device


__all__ = ["OperatorMode"]
