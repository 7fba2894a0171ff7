"""Everything that tells the tracer of events without a dispatch mode, put in place by level."""

from __future__ import annotations

from typing import TYPE_CHECKING

from detrun.recorder.trace.checkpointing import Checkpointing
from detrun.recorder.trace.collectives import Collectives
from detrun.recorder.trace.compiled import Compiled
from detrun.recorder.trace.keep import Keep
from detrun.recorder.trace.live import UnreadableError, live_against
from detrun.recorder.trace.modules import Modules
from detrun.recorder.trace.steps import OPERATORS, Steps

if TYPE_CHECKING:
    from detrun.recorder.observer import Observer
    from detrun.recorder.trace.tracer import Tracer

MODULES = 3
"""The level at which calls of modules are events."""


def install(tracer: Tracer, observer: Observer) -> None:
    """Called once, before the hooks that close a step are registered."""
    collectives, compiled = Collectives(tracer), Compiled(tracer)
    parts: list[Collectives | Compiled | Modules] = [collectives, compiled]
    if tracer.settings.level == MODULES:
        parts.append(Modules(tracer))
    steps = Steps(tracer)
    steps.install()
    tracer.scopes.batch_begins = steps.batch
    Checkpointing(tracer, own_events=tracer.settings.level < OPERATORS).install()
    compiled.install()
    observer.when_backward_ended.append(collectives.sweep)

    def switched(on: bool) -> None:
        for part in parts:
            if on:
                part.open()
            else:
                part.close()
        if on:
            _keep(tracer)
            steps.open(observer.optimizers.live().values(), observer.models.live())
        else:
            steps.close()

    tracer.listeners.append(switched)


def _keep(tracer: Tracer) -> None:
    """The keeper, if tensors are to be kept; known only now that this process has a rank."""
    settings, session = tracer.settings, tracer.session
    live = None
    if settings.against is not None:
        try:
            live = live_against(settings.against, session.rank())
        except UnreadableError as error:
            tracer.not_captured(f"a comparison with the other arm while this one runs: {error}")
    if live is None and settings.keep is None:
        return
    keep = Keep(tracer, session.attempt, live=live, with_kernels=settings.kernels)
    tracer.keeper = keep
    tracer.listeners.append(lambda on: None if on else keep.close())
