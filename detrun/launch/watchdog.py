"""When an arm whose steps have stopped coming is given up. Pure: time comes in as an argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from detrun.launch.spec import WatchdogLimits


@dataclass
class Watchdog:
    """Watches the last recorded step of every rank.

    A run is stalled when no rank has recorded a step for `multiple` median step times of this run, at
    least `at_least` seconds; before the first step and after the last it has `start` seconds.
    """

    limits: WatchdogLimits
    steps: int
    started: float
    _seen: dict[int, int] = field(default_factory=dict)
    _moved: float | None = None
    _furthest: int = 0
    _furthest_at: float = 0.0
    _durations: list[float] = field(default_factory=list)

    def observe(self, now: float, last_steps: Mapping[int, int]) -> str | None:
        """Takes each rank's last recorded step (0: none yet); a sentence when the run has stalled."""
        if dict(last_steps) != self._seen:
            self._seen = dict(last_steps)
            self._moved = now
            furthest = max(last_steps.values(), default=0)
            if furthest > self._furthest:
                if self._furthest:
                    # Steps that came between two looks share the time between them.
                    self._durations.append((now - self._furthest_at) / (furthest - self._furthest))
                self._furthest, self._furthest_at = furthest, now
        quiet = now - (self._moved if self._moved is not None else self.started)
        if quiet <= self.allowed():
            return None
        if self._furthest == 0:
            return f"no step was recorded within {quiet:.0f} s"
        return f"no step for {quiet:.0f} s{self._usual()}"

    def allowed(self) -> float:
        """Seconds without a step that pass for normal at this point of the run."""
        finished = bool(self._seen) and min(self._seen.values()) >= self.steps
        if self._furthest == 0 or finished:
            return self.limits.start
        usual = median(self._durations) if self._durations else 0.0
        return max(self.limits.at_least, self.limits.multiple * usual)

    def _usual(self) -> str:
        return f" (a step took {median(self._durations):.2g} s before)" if self._durations else ""
