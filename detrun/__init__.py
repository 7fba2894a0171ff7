"""detrun runs the same training more than once and holds bits against bits.

Importing this package is free: neither torch nor pandas is loaded. Inside a training program `detrun.record` is the
one call there is, and it does nothing where the program was not started by detrun.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable

__all__ = ["__version__", "record"]

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


def _find_sink() -> None:
    """A program that never imports torch is recorded from its first `record` call on."""
    global _looked_for_sink
    import os

    _looked_for_sink = True
    if os.environ.get("DETRUN_ATTEMPT_DIR"):
        from detrun.recorder import start

        start()
