"""What a report draws of an experiment's records, as plain values: every run's metrics over the steps, how far the runs
are apart, and which stream differs on which rank in which step.

All arrays run along one axis of columns. A column is a step, or a few that follow each other where there are more steps
than a screen has room for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

EQUAL, NOT_RECORDED, NOT_RUN = 0, 254, 255
"""Codes of a map's cells; those between stand for the streams, by their place in `Series.streams` from 1 on."""

MAX_STREAMS = 200


@dataclass(frozen=True, slots=True)
class Run:
    """One attempt of an arm. label: `b`, or `b, attempt 1`. first: its first step. saves: the steps at whose end it
    wrote a checkpoint. facts: short facts on where and how it ran, by name. seconds: from its start to its end."""

    arm: str
    attempt: int
    role: str
    label: str
    first: int = 1
    saves: tuple[int, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Values:
    """A metric of a run: on one rank (`shown`), and the lowest and highest of all ranks (None where all are equal).

    float32 or float64, NaN where there is no finite number. bad: columns that hold a NaN or an infinity on any rank.
    """

    run: int
    metric: str
    rank: int
    shown: NDArray[Any]
    low: NDArray[Any] | None = None
    high: NDArray[Any] | None = None
    bad: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Apart:
    """How far two runs' values of a metric are apart: the largest distance of all ranks in ULP, NaN where they are
    equal. unmeasured: columns in which they differ and no distance is defined (a NaN, another dtype)."""

    metric: str
    ulp: NDArray[Any]
    unmeasured: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """Two runs, by their places in `Series.runs`, held against each other. cells: ranks × columns of uint8, each the
    code of the stream that comes first in causal order among those that differ there."""

    a: int
    b: int
    apart: tuple[Apart, ...]
    cells: NDArray[Any]

    @property
    def differs(self) -> bool:
        """Whether any cell does."""
        return bool(((self.cells != EQUAL) & (self.cells < NOT_RECORDED)).any())

    @property
    def incomplete(self) -> bool:
        """Whether a cell has no record that should have one."""
        return bool((self.cells == NOT_RECORDED).any())


@dataclass(frozen=True, slots=True)
class Series:
    """All of it. columns: the first step of each; width: steps in a column. ranks: those that were read, of `of_ranks`.
    notes: what is not shown, in sentences."""

    columns: NDArray[Any]
    width: int
    ranks: tuple[int, ...]
    of_ranks: int
    runs: tuple[Run, ...]
    metrics: tuple[str, ...]
    values: tuple[Values, ...]
    pairs: tuple[Pair, ...]
    streams: tuple[str, ...]
    notes: tuple[str, ...] = ()
