"""detrun runs the same training more than once and holds bits against bits.

Importing this package is free: neither torch nor pandas is loaded. Inside a training program `detrun.record` and
`detrun.track` do nothing where the program was not started by detrun; `detrun.rng_state` and `detrun.set_rng_state`
work anywhere.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["__version__", "record", "rng_state", "set_rng_state", "track"]

__version__ = "0.1.0"

# A recorder exported as a plain folder stands first on PYTHONPATH and holds only a part of this package; the rest is
# found in the installed copy behind it.
__path__ = pkgutil.extend_path(__path__, __name__)

_sink: Callable[[int, dict[str, object]], None] | None = None
_looked_for_sink = False


def record(step: int, **metrics: object) -> None:
    """Record metrics of one training step at full precision.

    `step` is the program's own number of the step, counted from 0 or from 1. A metric is a number, a numpy scalar or
    a tensor of one element on any device (it is copied asynchronously, the device is never waited for). Called before
    the step's last optimizer ran, the metrics join that step; called after it, they are added to it. The same metric
    may also have been found by detrun itself: then this one has the plain name.

    Never raises, and does nothing in a process that detrun does not record.
    """
    if _sink is not None:
        _sink(step, metrics)
    elif not _looked_for_sink:
        _find_sink()
        if _sink is not None:
            _sink(step, metrics)


def track(name: str, thing: object) -> None:
    """Count a thing as training state under this name: a resumed run must have it again, bit for bit.

    `thing` is a tensor, an array, a number, a text, a dict or list of these, a generator, anything with `state_dict()`,
    or a function without arguments that returns one of these and is called at a capture. What is a plain number at the
    time of the call stays that number: give a function, or the object that owns it. Modules, tensors and other objects
    are not kept alive, functions, dicts and lists are. A later call with the same name takes the place of the first.

    Never raises, and does nothing in a process that detrun does not record.
    """
    if os.environ.get("DETRUN_ATTEMPT_DIR"):
        try:
            from detrun.recorder import tracking
        except ImportError:  # no torch: nothing is captured
            return
        tracking.track(name, thing)


def rng_state(*, include: Collection[str] | None = None, **generators: object) -> dict[str, Tensor]:
    """The state of every random number stream of this process, and of the generators that are passed by name, as a flat
    dict of tensors of fixed shape. See `detrun.rng.rng_state`. Imports torch and numpy."""
    from detrun import rng

    return rng.rng_state(include=rng.GLOBAL if include is None else include, **generators)


def set_rng_state(state: Mapping[str, Tensor], *, include: Collection[str] | None = None, **generators: object) -> None:
    """Put every stream into the state that `rng_state` returned. Raises ValueError, and restores nothing, if anything
    is missing, unknown or does not fit. See `detrun.rng.set_rng_state`."""
    from detrun import rng

    rng.set_rng_state(state, include=rng.GLOBAL if include is None else include, **generators)


def _find_sink() -> None:
    """A program that never imports torch is recorded from its first `record` call on."""
    global _looked_for_sink
    _looked_for_sink = True
    if os.environ.get("DETRUN_ATTEMPT_DIR"):
        from detrun.recorder import start

        start()
