"""The tracer: which operation, collective or module did what to which bytes, for a window of steps.

It comes in with the recorder and does nothing unless it was asked for. What it cannot see it names.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from detrun.recorder.observer import Observer
    from detrun.recorder.session import Session


def install(session: Session, observer: Observer) -> None:
    """Hook torch once more, for the trace that DETRUN_TRACE asks for; nothing if it asks for none. Called after the
    recorder's own hooks are in place. Raises ValueError for a request that cannot be understood."""
    from detrun.recorder.trace.window import TraceSettings

    settings = TraceSettings.from_environment(os.environ)
    if settings is None:
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    from detrun.recorder import hooks
    from detrun.recorder.trace import scopes as places
    from detrun.recorder.trace import sources
    from detrun.recorder.trace.stack import ModeStack
    from detrun.recorder.trace.tracer import Tracer

    scopes = places.Scopes()
    tracer = Tracer(session, settings, scopes)
    session.muffle = tracer.local
    session.before_end.append(tracer.close)
    stack: ModeStack | None = None
    scopes.names_operators = settings.level >= 4
    if settings.level >= 4:
        from detrun.recorder.trace.mode import OperatorMode

        stack = ModeStack(OperatorMode(tracer))
        tracer.listeners.append(stack.switch)
        scopes.thread_begins, scopes.thread_ends = stack.thread_begins, stack.thread_ends

    def switched(on: bool) -> None:
        scopes.active = on

    tracer.listeners.append(switched)

    def refresh() -> None:
        """Which step is it now?"""
        if observer.capturing():
            return
        tracer.open_for(observer.position()[0] + 1)
        if stack is not None:
            stack.tidy()

    def root_begins(_module: Any) -> None:
        if not session.has_optimizers:
            session.run(observer.updated)
        session.run(refresh)

    def optimizer_begins(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if tracer.active:
            session.run(scopes.optimizer_begins, optimizer)

    def optimizer_ends(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if tracer.active:
            session.run(scopes.optimizer_ends, optimizer)
        session.run(refresh)

    for hook in (optimizer_begins, optimizer_ends):
        hook._torchdynamo_disable = True  # type: ignore[attr-defined]
        hooks._never_compile(hook, inner_too=True)
    scopes.root_begins = root_begins
    places.install(scopes, hooks.is_trained, tracer.fail)
    observer.when_constructed.append(refresh)
    observer.when_step_ended.append(refresh)
    sources.install(tracer, observer)
    register_optimizer_step_pre_hook(optimizer_begins)
    register_optimizer_step_post_hook(optimizer_ends)
