"""Where the recorder touches torch. Each wrapper passes its arguments and its result on as they are.

The compiler must see torch as it is: a wrapper that is traced begins with a test that is constant there and leads
straight to the original function, and the wrappers' own frames are never compiled.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.amp
import torch.autograd
import torch.nn.utils
import torch.optim.lr_scheduler
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from detrun.recorder import own_calls, pipelines, saves
from detrun.recorder.observer import Observer
from detrun.recorder.session import Session

_OPTIMIZER_FILE = Optimizer.__init__.__code__.co_filename


class _Flags:
    """Where the program is: inside a root module in training, inside one in evaluation mode, inside a backward pass,
    how deep inside optimizers. One object for all threads, on purpose: a backward pass on a device recomputes
    activations on a thread of its own, and replicas run on theirs."""

    __slots__ = ("backward", "forward", "optimizer", "resting")

    def __init__(self) -> None:
        self.forward = False
        self.resting = False
        self.backward = 0
        self.optimizer = 0


def install(session: Session, observer: Observer) -> None:
    """Hook torch, once a process, right after it was imported."""
    flags = _Flags()
    _hook_modules(session, observer, flags)
    _hook_backward(session, observer, flags)
    _hook_clipping(session, observer)
    _hook_optimizers(session, observer, flags)
    _hook_scaler(session, observer)
    _hook_schedulers(session, observer)
    saves.install(session, observer)
    pipelines.install(session, observer)
    _hook_exit(session)


def _hook_modules(session: Session, observer: Observer, flags: _Flags) -> None:
    original: Callable[..., Any] = nn.Module.__call__
    begins = observer.forward_begins
    run = session.run
    training, resting, bare = _TRAINING, _RESTING, _BARE
    is_grad_enabled = torch.is_grad_enabled

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or flags.forward or flags.backward or observer.restoring or not is_grad_enabled():
                return original(self, *args, **kwargs)
            role = _role(self)
            if role is training:
                flags.forward = True
                try:
                    run(begins, self, args, kwargs)
                    if session.interruption is not None:
                        session.interrupt_closed()
                        session.interrupt("forward_begins", *observer.position())
                    result = original(self, *args, **kwargs)
                finally:
                    flags.forward = False
                for action in observer.when_forward_ended:
                    run(action, self, result)
                return result
            if role is resting and not flags.resting:
                flags.resting = True
                try:
                    run(observer.resting_forward_begins, args, kwargs)
                    return original(self, *args, **kwargs)
                finally:
                    flags.resting = False
            if role is bare:
                run(observer.models.add, self)
            result = original(self, *args, **kwargs)
            if role is None and _role(self) is training:  # it makes its parameters when it is first called
                run(observer.models.add, self)
            return result

        _never_compile(call, inner_too=False)
        return call

    call = wrap(original)
    nn.Module.__call__ = call  # type: ignore[method-assign]
    # If the compiler was imported before: it compares a module's __call__ with the one it saw then.
    replace_everywhere("unpatched_nn_module_call", original, call)
    own_calls.hook(session, call, wrap)


def is_trained(module: nn.Module) -> bool:
    """Whether a call of this module from outside any other is a micro-batch: in training mode, with parameters."""
    return _role(module) is _TRAINING


_TRAINING, _RESTING, _BARE = "in training mode", "in evaluation mode", "buffers alone"


def _role(module: nn.Module) -> str | None:
    """What a module that is called from outside any other is: the one that is trained, the same in evaluation mode (as
    in fine-tuning with frozen norms), one in training mode that has buffers but no parameters (running statistics),
    or None: losses, transforms of data or of a weight. Never raises, whatever a subclass has made of its attributes."""
    if type(module).__name__ == "ParametrizationList":
        return None  # a weight that is computed when it is read, wherever that is
    try:
        stack, buffers = [module], False
        while stack:
            part = stack.pop()
            if any(parameter is not None for parameter in part._parameters.values()):
                return _TRAINING if module.training else _RESTING
            buffers = buffers or bool(part._buffers)
            stack.extend(child for child in part._modules.values() if child is not None)
        return _BARE if buffers and module.training else None
    except Exception:  # noqa: BLE001 - a module of its own kind is just not recognised
        return None


def _hook_backward(session: Session, observer: Observer, flags: _Flags) -> None:
    original = torch.autograd.backward
    original_grad = torch.autograd.grad
    begins = observer.backward_begins
    run = session.run

    def enters(tensors: Any) -> bool:
        outermost = not flags.backward
        if outermost:
            run(begins, tensors)
        flags.backward += 1
        return outermost

    def ended() -> None:
        if not session.has_optimizers:
            run(observer.backward_ends)
        if observer.capture.minds_gradients:
            run(observer.capture.backward_ends)
        for action in observer.when_backward_ended:
            run(action)
        if session.interruption is not None:
            session.interrupt("backward_ends", session.backwards)

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return original(*args, **kwargs)
        outermost = enters(args[0] if args else kwargs.get("tensors"))
        try:
            result = original(*args, **kwargs)
        finally:
            flags.backward -= 1
        if outermost:
            ended()
        return result

    @contextlib.contextmanager
    def by_hand(tensors: Any) -> Iterator[None]:
        outermost = enters(tensors)
        try:
            yield
        finally:
            flags.backward -= 1
        if outermost:
            ended()

    observer.backward_by_hand = by_hand

    @functools.wraps(original_grad)
    def grad(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_dynamo_compiling() and not flags.backward and not observer.restoring:
            run(observer.grad_begins, outputs)
        return original_grad(outputs, *args, **kwargs)

    for name, first, wrapper in (("backward", original, backward), ("grad", original_grad, grad)):
        _never_compile(wrapper, inner_too=False)
        replace_everywhere(name, first, wrapper)


def _hook_clipping(session: Session, observer: Observer) -> None:
    run = session.run

    def wrap(original: Callable[..., Any], norm_of: Callable[[tuple[Any, ...], dict[str, Any], Any], object]) -> Any:
        @functools.wraps(original)
        def clip(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                return original(parameters, *args, **kwargs)
            # A generator can be read once only, and the original is to have it.
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            if isinstance(parameters, types.GeneratorType):
                parameters = given or (nothing for nothing in given)
            elif not isinstance(parameters, (Tensor, Sequence)):
                parameters = given
            run(observer.clip_begins, given)
            result = original(parameters, *args, **kwargs)
            run(observer.clip_ends, norm_of(args, kwargs, result))
            return result

        _never_compile(clip, inner_too=False)
        return clip

    def returned(_args: tuple[Any, ...], _kwargs: dict[str, Any], result: Any) -> object:
        return result

    def given_total(args: tuple[Any, ...], kwargs: dict[str, Any], _result: Any) -> object:
        return kwargs.get("total_norm", args[1] if len(args) > 1 else None)

    utils = torch.nn.utils
    for name, norm_of in (("clip_grad_norm_", returned), ("clip_grads_with_norm_", given_total)):
        original = getattr(utils, name)
        replace_everywhere(name, original, wrap(original, norm_of))


def _hook_optimizers(session: Session, observer: Observer, flags: _Flags) -> None:
    run = session.run
    original_init = Optimizer.__init__

    @functools.wraps(original_init)
    def init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        run(observer.constructed, self)

    Optimizer.__init__ = init  # type: ignore[method-assign]

    def begins(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
        if flags.optimizer and _optimizer_depth() <= 1:
            flags.optimizer = 0  # an earlier step raised, and its end was never told
        flags.optimizer += 1
        if flags.optimizer == 1:
            run(observer.optimizer_begins, optimizer, _closure(args, kwargs))
            session.interrupt_closed()

    def ends(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
        flags.optimizer -= 1
        if flags.optimizer == 0:
            run(observer.optimizer_ends, optimizer, _closure(args, kwargs))
            session.interrupt_closed()

    # Inside a compiled function these two are calls that the compiler leaves to Python. torch's own optimizers break
    # the graph at the head of `step` anyway; where nothing else breaks it, neither may the recorder.
    for event in (begins, ends):
        event._torchdynamo_disable = True  # type: ignore[attr-defined]
    own = torch.optim

    def pre(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
        if observer.restoring:
            return
        if is_dynamo_compiling() and not hasattr(own, type(optimizer).__name__):
            return
        begins(optimizer, args, kwargs)

    def post(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
        if observer.restoring:
            return
        if is_dynamo_compiling() and not hasattr(own, type(optimizer).__name__):
            return
        ends(optimizer, args, kwargs)

    for hook in (begins, ends, pre, post):
        _never_compile(hook, inner_too=True)
    _never_compile(init, inner_too=False)
    register_optimizer_step_pre_hook(pre)
    register_optimizer_step_post_hook(post)


def _hook_scaler(session: Session, observer: Observer) -> None:
    scaler = torch.amp.GradScaler
    original_step: Callable[..., Any] = scaler.step
    original_scale: Callable[..., Any] = scaler.scale
    run = session.run
    _tell_constructed(scaler, observer.capture.scalers.add, session)

    @functools.wraps(original_step)
    def step(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        calls = observer.optimizer_calls
        result = original_step(self, optimizer, *args, **kwargs)
        if observer.optimizer_calls == calls and self.is_enabled() and isinstance(optimizer, Optimizer):
            run(observer.skipped, optimizer)
            session.interrupt_closed()
        return result

    @functools.wraps(original_scale)
    def scale(self: Any, outputs: Any) -> Any:
        result = original_scale(self, outputs)
        if isinstance(outputs, Tensor) and isinstance(result, Tensor) and not is_dynamo_compiling():
            run(observer.scaled, outputs, result)
        return result

    for hook in (step, scale):
        _never_compile(hook, inner_too=False)
    scaler.step = step  # type: ignore[method-assign]
    scaler.scale = scale  # type: ignore[method-assign]


def _hook_schedulers(session: Session, observer: Observer) -> None:
    """Every scheduler class of torch's that has a constructor of its own: not all call that of their base."""
    base = torch.optim.lr_scheduler.LRScheduler
    known = observer.capture.schedulers
    for kind in vars(torch.optim.lr_scheduler).values():
        if isinstance(kind, type) and issubclass(kind, base) and "__init__" in vars(kind):
            _tell_constructed(kind, known.add, session)


def _tell_constructed(kind: type, tell: Callable[[Any], None], session: Session) -> None:
    original: Callable[..., None] = vars(kind)["__init__"]
    run = session.run

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        run(tell, self)

    _never_compile(init, inner_too=False)
    kind.__init__ = init  # type: ignore[misc]


def _hook_exit(session: Session) -> None:
    original = os._exit

    @functools.wraps(original)
    def leave(status: int) -> None:
        session.leave()
        original(status)

    os._exit = leave  # type: ignore[assignment]


def _closure(args: tuple[Any, ...], kwargs: dict[Any, Any]) -> object:
    return args[1] if len(args) > 1 else kwargs.get("closure")


def _optimizer_depth() -> int:
    """How many optimizer steps are being executed on this thread: an optimizer may wrap another one, and one that
    raised leaves no trace. torch's own wrapper around each `step` is counted on the stack."""
    depth = 0
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "wrapper" and code.co_filename == _OPTIMIZER_FILE:
            depth += 1
        frame = frame.f_back
    return depth


def replace_everywhere(name: str, original: Callable[..., Any], wrapper: Callable[..., Any]) -> None:
    """Replace a function in every module that has it under its name, also where it was imported by name."""
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", None)
        if isinstance(namespace, dict) and namespace.get(name) is original:
            setattr(module, name, wrapper)


def _never_compile(function: Callable[..., Any], *, inner_too: bool) -> None:
    """Keep the compiler's frame evaluation off a wrapper's frame, without importing the compiler.

    The names are torch's private ones. Without them the compiler sees the wrapper, whose first test leads it past.
    """
    try:
        from torch._C._dynamo import eval_frame

        skip, default = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
        strategy = eval_frame._FrameExecStrategy(skip, skip if inner_too else default)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
    except (ImportError, AttributeError, TypeError):
        return
