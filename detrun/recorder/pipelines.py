"""What a pipeline of `torch.distributed.pipelining` is: its first stages have no loss of their own, and before the
first step each stage runs a micro-batch through its module to learn of shapes, which is no training.

Needs torch's own names: `_PipelineStageBase` with `num_stages` and `group_rank`, and the methods in `_REHEARSALS`.
Without them a rank has no stage, and the loss that it lacks forbids the verdict "identical".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from detrun.recorder.late import after_import
from detrun.recorder.observer import Observer
from detrun.recorder.session import Session

_REHEARSALS = ("_prepare_forward_infra", "_prepare_backward_infra")


def install(session: Session, observer: Observer) -> None:
    """Hook every kind of stage, once its module is imported."""

    def act(module: Any) -> None:
        base = getattr(module, "_PipelineStageBase", None)
        if not isinstance(base, type):
            return
        original: Callable[..., None] = vars(base).get("__init__", object.__init__)

        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            session.run(_made, session, self)

        base.__init__ = init  # type: ignore[misc]
        for kind in list(vars(module).values()):
            if isinstance(kind, type) and issubclass(kind, base):
                for name in set(_REHEARSALS).intersection(vars(kind)):
                    setattr(kind, name, _rehearsing(vars(kind)[name], observer))

    after_import("torch.distributed.pipelining.stage", act)


def _made(session: Session, stage: Any) -> None:
    if stage.num_stages > 1:
        session.told_coordinates.setdefault("pp", int(stage.group_rank))


def _rehearsing(original: Callable[..., Any], observer: Observer) -> Callable[..., Any]:
    @functools.wraps(original)
    def rehearse(*args: Any, **kwargs: Any) -> Any:
        observer.restoring += 1
        try:
            return original(*args, **kwargs)
        finally:
            observer.restoring -= 1

    return rehearse
