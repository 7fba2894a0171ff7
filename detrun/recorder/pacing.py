"""Steps that begin and end where an adapter says so, whatever torch's optimizers do in them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from detrun.recorder.draft import Draft

if TYPE_CHECKING:
    from detrun.recorder.observer import Observer


def step_begins(observer: Observer, number: int | None) -> None:
    """number: the framework's own, 1 for the first step ever; None if it does not say."""
    session = observer.session
    session.in_step = True
    if number is not None and session.numbering.shift is None:
        session.numbering.shift = 0
        if session.held is None and session.closed == session.numbering.first() - 1:
            session.closed = number - 1  # whatever the checkpoint's path said


def continues(observer: Observer, done: int) -> None:
    """So many steps were taken before this process's first one, whatever the checkpoint's path said."""
    session = observer.session
    numbering = session.numbering
    if session.held is None and session.closed == numbering.first() - 1 and numbering.shift is None:
        numbering.done = session.closed = session.told = done


def step_ends(observer: Observer, number: int | None, skipped: bool) -> None:
    """skipped: no optimizer stepped. The state is read all the same: it is the one at the step's end."""
    session = observer.session
    session.in_step = False
    session.join_tail()
    held = session.held
    if held is None:
        held = session.held = session.draft
    else:
        held.absorb(session.draft)
    session.draft = Draft()
    held.skipped = held.skipped or skipped
    if number is not None:
        step_begins(observer, number)
        session.in_step = False
    if not held.end_state and session.state_due(session.closed + 1):
        started = time.thread_time()
        observer.take_state(held)
        session.charge("state", started)
    observer.close()
    session.show("between")
    for action in observer.when_step_ended:
        action()
