"""Lays what was read of many ranks along one axis of steps, for a report to draw."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from detrun.compare.completeness import Asked
from detrun.compare.streams import Stream, is_ignored
from detrun.fingerprint import scalar
from detrun.records.files import printable
from detrun.records.metrics_line import shown_name, stem_of
from detrun.records.verdict import Verdict
from detrun.report.series import (
    EQUAL,
    MAX_STREAMS,
    NOT_RECORDED,
    NOT_RUN,
    Apart,
    Pair,
    Run,
    Series,
    Values,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from detrun.experiments.page import Difference, Part, Points

MAX_COLUMNS = 2000
"""Wider than any screen."""

MAX_METRICS = 24
MAX_POINTS = 500_000
"""Numbers of all lines on a page together; 4 or 8 bytes each."""

MAX_CELLS = 1_000_000
"""Cells of all maps on a page together; a byte each."""

_UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_VIEWS = {"float64": np.float64, "float32": np.float32, "float16": np.float16}
_BIT = {"int8": np.int8, "int16": np.int16, "int32": np.int32, "int64": np.int64}


def decoded(values: Sequence[tuple[str, str]]) -> NDArray[Any]:
    """The numbers of (bits, dtype): float64 where one needs it, else float32."""
    dtypes = {dtype for _, dtype in values}
    if len(dtypes) != 1:
        return np.array([float(scalar.value_of(int(bits, 16), dtype)) for bits, dtype in values], np.float64)
    (dtype,) = dtypes
    raw = np.array([int(bits, 16) for bits, _ in values], _UNSIGNED[scalar.width(dtype)])
    if dtype == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    if dtype in _VIEWS:
        found = raw.view(_VIEWS[dtype])
        return found if dtype != "float16" else found.astype(np.float32)
    return raw.view(_BIT.get(dtype, raw.dtype)).astype(np.float64)


def built(
    part: Part, runs: Sequence[Run], ranks: Sequence[int], asked: Asked, verdict: Verdict, notes: Sequence[str]
) -> Series | None:
    """The series of all that was read; None where no step was recorded."""
    recorded = [steps for run in part.recorded for steps in run.values()]
    if not recorded:
        return None
    axis = np.unique(np.concatenate(recorded))
    metrics, left_out = _metrics(part, asked)
    lines = max(1, 3 * len(metrics) * len(runs) + len(metrics) * (len(runs) - 1))
    most = max(50, min(MAX_COLUMNS, MAX_POINTS // lines, MAX_CELLS // max(1, len(ranks) * (len(runs) - 1))))
    width = -(-len(axis) // most)
    starts = np.arange(0, len(axis), width)
    grid = _Grid(axis, starts)
    leading = verdict.first_divergence.ranks if verdict.first_divergence else []
    values = [
        _values(grid, index, name, part.points[index][name], leading)
        for index in range(len(runs))
        for name in metrics
        if part.points[index].get(name)
    ]
    streams = sorted(
        {stream for run in part.differences for each in run.values() for stream in each.steps},
        key=lambda stream: stream.causal,
    )
    codes = {stream: min(at, MAX_STREAMS) for at, stream in enumerate(streams, 1)}
    pairs = [
        Pair(0, index, _apart(grid, part.differences[index], metrics), _cells(grid, part, runs, index, ranks, codes))
        for index in range(1, len(runs))
        if part.recorded[index] or part.recorded[0]
    ]
    told = list(notes)
    if left_out:
        told.append(f"{left_out:,} more metrics are not drawn")
    if width > 1:
        told.append(f"each point stands for {width} steps: the lowest, the highest and the first of them")
    return Series(
        columns=axis[starts],
        width=width,
        ranks=tuple(ranks),
        of_ranks=asked.ranks,
        runs=tuple(runs),
        metrics=tuple(metrics),
        values=tuple(values),
        pairs=tuple(pairs),
        streams=tuple(shown_name(stream.label) for stream in streams[:MAX_STREAMS]),
        notes=tuple(printable(note) for note in told),
    )


class _Grid:
    """The axis of steps, and where on it each column begins."""

    def __init__(self, axis: NDArray[Any], starts: NDArray[Any]) -> None:
        self.axis = axis
        self.starts = starts

    def at(self, steps: NDArray[Any]) -> NDArray[Any]:
        """Places on the axis of steps that are on it."""
        return np.searchsorted(self.axis, steps)

    @property
    def bins(self) -> bool:
        return len(self.starts) < len(self.axis)


def _metrics(part: Part, asked: Asked) -> tuple[list[str], int]:
    """The metrics to draw, those asked for first, what was derived from others last; and how many are left out."""
    names = dict.fromkeys(name for run in part.points for name in run)
    order = {name: at for at, name in enumerate(asked.required)}
    kept = [name for name in names if not is_ignored(name, frozenset())]
    kept.sort(key=lambda name: (name not in order, stem_of(name) != name, order.get(name, 0)))
    return kept[:MAX_METRICS], max(0, len(kept) - MAX_METRICS)


def _values(grid: _Grid, run: int, name: str, by_rank: Mapping[int, Points], leading: Iterable[int]) -> Values:
    rank = next((each for each in leading if each in by_rank), min(by_rank))
    kind = np.float64 if any(each.values.dtype == np.float64 for each in by_rank.values()) else np.float32
    size = len(grid.axis)
    low = np.full(size, np.inf, kind)
    high = np.full(size, -np.inf, kind)
    shown = np.full(size, np.nan, kind)
    bad = np.zeros(size, bool)
    for each, points in by_rank.items():
        at, numbers = grid.at(points.steps), points.values.astype(kind)
        finite = np.isfinite(numbers)
        bad[at[~finite]] = True
        low[at[finite]] = np.minimum(low[at[finite]], numbers[finite])
        high[at[finite]] = np.maximum(high[at[finite]], numbers[finite])
        if each == rank:
            shown[at[finite]] = numbers[finite]
    if grid.bins:
        shown = _first_of(shown, grid.starts)
        low, high = np.minimum.reduceat(low, grid.starts), np.maximum.reduceat(high, grid.starts)
        bad = np.logical_or.reduceat(bad, grid.starts)
    low[np.isinf(low)], high[np.isinf(high)] = np.nan, np.nan
    columns = tuple(np.flatnonzero(bad).tolist())
    if np.array_equal(low, shown, equal_nan=True) and np.array_equal(high, shown, equal_nan=True):
        return Values(run, name, rank, shown, bad=columns)
    return Values(run, name, rank, shown, low, high, columns)


def _first_of(values: NDArray[Any], starts: NDArray[Any]) -> NDArray[Any]:
    """Of each column the first number that there is."""
    there = np.where(np.isnan(values), len(values), np.arange(len(values)))
    first = np.minimum.reduceat(there, starts)
    return np.append(values, np.nan).astype(values.dtype)[first]


def _apart(grid: _Grid, differences: Mapping[int, Difference], metrics: Sequence[str]) -> tuple[Apart, ...]:
    found = []
    for name in metrics:
        stream = Stream("metric", name)
        ulp = np.full(len(grid.axis), -1.0)
        unmeasured = np.zeros(len(grid.axis), bool)
        for each in differences.values():
            if stream not in each.steps:
                continue
            at, distance = grid.at(each.steps[stream]), each.ulp[name]
            undefined = np.isnan(distance)
            unmeasured[at[undefined]] = True
            ulp[at[~undefined]] = np.maximum(ulp[at[~undefined]], distance[~undefined])
        if grid.bins:
            ulp = np.maximum.reduceat(ulp, grid.starts)
            unmeasured = np.logical_or.reduceat(unmeasured, grid.starts)
        if (ulp >= 0).any() or unmeasured.any():
            ulp[ulp < 0] = np.nan
            found.append(Apart(name, ulp, tuple(np.flatnonzero(unmeasured).tolist())))
    return tuple(found)


def _cells(
    grid: _Grid,
    part: Part,
    runs: Sequence[Run],
    index: int,
    ranks: Sequence[int],
    codes: Mapping[Stream, int],
) -> NDArray[Any]:
    """Ranks × columns: what differs first, or why there is nothing to be said."""
    run = runs[index]
    mine = [part.recorded[index][rank] for rank in ranks if rank in part.recorded[index] and len(part.recorded[index])]
    last = max((int(steps[-1]) for steps in mine if len(steps)), default=0)
    # An attempt covers a part of the steps; an arm is to have all.
    covers = (grid.axis >= run.first) & ((grid.axis <= last) if run.role == "interrupted" else True)
    cells = np.full((len(ranks), len(grid.axis)), NOT_RUN, np.uint8)
    cells[:, covers] = NOT_RECORDED
    for row, rank in enumerate(ranks):
        found = part.differences[index].get(rank)
        if found is None or found.compared is None:
            continue
        cells[row, grid.at(found.compared)] = EQUAL
        for stream in sorted(found.steps, key=lambda each: each.causal, reverse=True):
            cells[row, grid.at(found.steps[stream])] = codes[stream]
    if not grid.bins:
        return cells
    # Of a column's steps the cell shows what comes first of: a difference, a gap, equality.
    weight = cells.astype(np.int16)
    weight[cells == EQUAL] = NOT_RUN + 1
    weight[cells == NOT_RUN] = NOT_RUN + 2
    least = np.minimum.reduceat(weight, grid.starts, axis=1)
    least[least == NOT_RUN + 1] = EQUAL
    least[least == NOT_RUN + 2] = NOT_RUN
    return least.astype(np.uint8)
