"""How far the arms have agreed so far, while they run: equal lines are equal steps. A comfort, never a verdict."""

from __future__ import annotations

from collections.abc import Sequence

from detrun.records.layout import ExperimentFolder
from detrun.records.metrics_reader import tail_steps

MAX_RANKS = 16


class LiveComparison:
    """Reads what the first two arms append and remembers up to which step all ranks' lines were equal."""

    def __init__(self, folder: ExperimentFolder, arms: Sequence[str], ranks: int) -> None:
        self.folder = folder
        self.arms = tuple(arms[:2])
        self.ranks = range(min(ranks, MAX_RANKS))
        self._positions: dict[tuple[str, int], int] = {}
        self._lines: dict[tuple[str, int], dict[int, list[int]]] = {}
        self.agreed = 0
        self.first_difference: int | None = None

    def look(self, ended: bool = False) -> None:
        """Takes in the lines that have come since the last look. ended: no further line will come."""
        if len(self.arms) < 2 or self.first_difference is not None:
            return
        for arm in self.arms:
            for rank in self.ranks:
                key = (arm, rank)
                tail = tail_steps(self.folder.attempt(arm, 0).metrics(rank), self._positions.get(key, 0))
                self._positions[key] = tail.position
                steps = self._lines.setdefault(key, {})
                for line in tail.lines:
                    if line.step is not None:
                        steps.setdefault(line.step, []).append(hash(line.raw))
        self._advance(ended)

    def _advance(self, ended: bool) -> None:
        first, second = self.arms
        # The last step on disk may still get a supplement line, so only steps with a successor count until the end.
        last = min(max(self._lines[(arm, rank)], default=0) for arm in self.arms for rank in self.ranks)
        whole = last if ended else last - 1
        while self.agreed < whole:
            step = self.agreed + 1
            for rank in self.ranks:
                if self._lines[(first, rank)].pop(step, []) != self._lines[(second, rank)].pop(step, []):
                    self.first_difference = step
                    return
            self.agreed = step
