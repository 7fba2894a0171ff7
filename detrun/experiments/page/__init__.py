"""Reads of an experiment's records what its report draws: metrics over steps, distances, which ranks differ where.

It decides nothing and never fails: what cannot be read is not drawn, and the page says so. Time and memory are
bounded: of a huge experiment some ranks are read, those that the verdict names first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from detrun.compare.attempts import comparable, shifted
from detrun.compare.completeness import Asked
from detrun.compare.folding import ranks_in_words
from detrun.compare.sources import Agreements, compare_streams
from detrun.compare.streams import PairTally, compare_rank
from detrun.compare.streams import Stream as Compared
from detrun.errors import RecordError
from detrun.experiments.arm_files import asked_of
from detrun.experiments.judge_sources import source_of
from detrun.experiments.page.runs import RunFolder, records_of, runs_of
from detrun.experiments.source_files import AttemptStreams, read_written
from detrun.records.jobs import ExperimentFile
from detrun.records.layout import ExperimentFolder
from detrun.records.metrics_line import LineReader
from detrun.records.metrics_reader import RankMetrics, read_rank_metrics
from detrun.records.sources import Stream as SourceStream
from detrun.records.verdict import Verdict
from detrun.report.series import Series

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_RANKS = 256
"""Rows of a map."""

MAX_BYTES = 256 << 20
"""Of records that are read for a page; where there are more, fewer ranks."""

MIN_RANKS = 8
MAX_NAMES = 400
"""Metrics of a run that are looked at; a program may give each of its numbers a new name."""


@dataclass(slots=True)
class Points:
    """A metric of a run on one rank: in which steps, and its numbers there."""

    steps: NDArray[Any]
    values: NDArray[Any]


@dataclass(slots=True)
class Difference:
    """What differs on one rank between the first run and another: steps by stream, and the distance by metric."""

    steps: dict[Compared, NDArray[Any]] = field(default_factory=dict)
    ulp: dict[str, NDArray[Any]] = field(default_factory=dict)
    compared: NDArray[Any] | None = None


@dataclass(slots=True)
class Part:
    """What reading leaves behind: by run and metric, the points of each rank; by run, its differences from the
    first one's by rank, and the steps that were recorded at all."""

    points: list[dict[str, dict[int, Points]]]
    differences: list[dict[int, Difference]]
    recorded: list[dict[int, NDArray[Any]]]


def gather_series(place: ExperimentFolder, experiment: ExperimentFile, verdict: Verdict) -> Series | None:
    """What the report of this verdict draws; None where the experiment left nothing to be drawn."""
    from detrun.experiments.page.series import built

    try:
        found = records_of(place, experiment, verdict)
        if found is None:
            return None
        home, asked_for = found
        asked = asked_of(asked_for)
        runs, left_out = runs_of(home, asked_for, verdict)
        if not runs:
            return None
        if source_of(asked_for) == "recorder":
            ranks = sample(asked.ranks, _named(verdict), runs)
            part = read_ranks(runs, ranks, asked)
        else:
            part = _read_sources(runs, asked_for, asked)
            ranks = sorted({rank for run in part.recorded for rank in run}) or [0]
            asked = replace(asked, ranks=len(ranks))
    except (RecordError, OSError):
        return None
    notes = [f"{left_out} more runs are not shown; the verdict is on all of them"] if left_out else []
    if len(ranks) < asked.ranks:
        notes.append(
            f"{len(ranks):,} of {asked.ranks:,} ranks are drawn, those that the verdict names and others evenly "
            "between; the verdict is on all of them"
        )
    for run, recorded in zip(runs, part.recorded, strict=True):
        without = [rank for rank in ranks if rank not in recorded]
        if without:
            notes.append(f"arm {run.run.label}: no records of {ranks_in_words(without, asked.ranks)}")
    return built(part, [run.run for run in runs], ranks, asked, verdict, notes)


def sample(ranks: int, named: Iterable[int], runs: Sequence[RunFolder]) -> list[int]:
    """The ranks to read: all where there is room, else those that a verdict names and others evenly between them."""
    size = _size(runs, ranks)
    most = MAX_RANKS if size <= MAX_BYTES else max(MIN_RANKS, min(MAX_RANKS, MAX_BYTES * ranks // size))
    if ranks <= most:
        return list(range(ranks))
    first = [rank for rank in dict.fromkeys(named) if 0 <= rank < ranks][: most // 2]
    rest = most - len(first)
    even = [at * (ranks - 1) // max(1, rest - 1) for at in range(rest)]
    return sorted({*first, *even})


def _size(runs: Sequence[RunFolder], ranks: int) -> int:
    """A guess of the bytes of all metrics files, by the first rank's and one in the middle."""
    total = 0
    for run in runs:
        sizes = []
        for rank in {0, ranks // 2}:
            try:
                sizes.append(run.folder.metrics(rank).stat().st_size)
            except OSError:
                continue
        total += max(sizes, default=0) * ranks
    return total


def _named(verdict: Verdict) -> list[int]:
    """Ranks that a verdict speaks of, the first divergence's first."""
    found = list(verdict.first_divergence.ranks) if verdict.first_divergence else []
    for finding in verdict.of_severity("divergence", "not-verified"):
        ranks = finding.where.get("ranks")
        rank = finding.where.get("rank")
        found += [each for each in ranks[:16] if isinstance(each, int)] if isinstance(ranks, list) else []
        found += [rank] if isinstance(rank, int) else []
    return found


def _empty(runs: int) -> Part:
    return Part([{} for _ in range(runs)], [{} for _ in range(runs)], [{} for _ in range(runs)])


def read_ranks(runs: Sequence[RunFolder], ranks: Sequence[int], asked: Asked) -> Part:
    """Reads some ranks of all runs, each run's beside the first one's; no more than one rank's lines are in memory."""
    part = _empty(len(runs))
    reader = LineReader()
    for rank in ranks:
        reference: RankMetrics | None = None
        for index, run in enumerate(runs):
            records = read_rank_metrics(run.folder.metrics(rank), reference, reader)
            if not records.steps:
                continue
            if records is reference:
                _repeat(part, index, rank)
                continue
            if run.shift:
                records = shifted(records, run.shift)
            _take(part, index, rank, records)
            if index == 0:
                reference = records
                continue
            if reference is not None:
                began = run.told.microbatch if not run.shift else 0
                both = comparable(reference, records, cut_short=run.cut_short, begins_in=began)
                tally = PairTally(runs[0].run.arm, run.run.arm)
                compare_rank(tally, rank, both.a, both.b, asked.ignore)
                part.differences[index][rank] = _difference(tally, reference.steps.keys() & records.steps.keys())
    return part


def _repeat(part: Part, index: int, rank: int) -> None:
    """A run whose file has the same bytes as the first one's."""
    for name, ranks in part.points[0].items():
        if rank in ranks:
            part.points[index].setdefault(name, {})[rank] = ranks[rank]
    part.recorded[index][rank] = part.recorded[0][rank]
    part.differences[index][rank] = Difference(compared=part.recorded[0][rank])


def _take(part: Part, index: int, rank: int, records: RankMetrics) -> None:
    found: dict[str, tuple[list[int], list[tuple[str, str]]]] = {}
    for step, record in records.steps.items():
        for name, metric in record.contents.metrics.items():
            held = found.get(name)
            if held is None:
                if len(found) >= MAX_NAMES:
                    continue
                held = found[name] = ([], [])
            held[0].append(step)
            held[1].append((metric["bits"], metric["dtype"]))
    _keep(part, index, rank, found, records.steps.keys())


def _keep(
    part: Part,
    index: int,
    rank: int,
    found: dict[str, tuple[list[int], list[tuple[str, str]]]],
    steps: Iterable[int],
) -> None:
    import numpy as np

    from detrun.experiments.page.series import decoded

    points = part.points[index]
    for name, (at, values) in found.items():
        if name not in points and len(points) >= MAX_NAMES:
            continue
        points.setdefault(name, {})[rank] = Points(np.array(at, np.int64), decoded(values))
    part.recorded[index][rank] = np.array(sorted(steps), np.int64)


def _difference(tally: PairTally, compared: Iterable[int]) -> Difference:
    import numpy as np

    found = Difference(compared=np.array(sorted(compared), np.int64))
    for stream, differing in tally.streams.items():
        found.steps[stream] = np.array(list(differing.steps), np.int64)
        if stream.kind == "metric":
            apart = [float("nan") if each.ulp is None else float(each.ulp) for each in differing.steps.values()]
            found.ulp[stream.name] = np.array(apart, np.float64)
    return found


def _read_sources(runs: Sequence[RunFolder], experiment: ExperimentFile, asked: Asked) -> Part:
    """The same of runs without a recorder, as far as what they wrote themselves goes."""
    part = _empty(len(runs))
    read = [_streams_of(run, experiment, asked) for run in runs]
    for index, mine in enumerate(read):
        if mine is None:
            continue
        for rank, stream in sorted(mine.streams.items())[:MAX_RANKS]:
            _take_stream(part, index, rank, mine, stream)
            reference = read[0].streams.get(rank) if read[0] is not None else None
            if index and reference is not None and rank in part.recorded[0]:
                tally = PairTally(runs[0].run.arm, runs[index].run.arm)
                agreements: Agreements = {}
                compare_streams(tally, rank, reference, stream, mine.asked, agreements)
                both = {*part.recorded[0][rank].tolist()} & {*part.recorded[index].get(rank, _nothing()).tolist()}
                part.differences[index][rank] = _difference(tally, both)
    return part


def _nothing() -> NDArray[Any]:
    import numpy as np

    return np.zeros(0, np.int64)


def _take_stream(part: Part, index: int, rank: int, mine: AttemptStreams, stream: SourceStream) -> None:
    found: dict[str, tuple[list[int], list[tuple[str, str]]]] = {}
    steps: set[int] = set()
    for metric in mine.asked.compared:
        _, readings = mine.asked.series(stream, metric) or ("", {})
        numbers = {step: reading.number for step, reading in sorted(readings.items()) if reading.number is not None}
        if numbers:
            found[metric] = (list(numbers), [(hex(number.bits), number.dtype) for number in numbers.values()])
            steps.update(numbers)
    if found:
        _keep(part, index, rank, found, steps)


def _streams_of(run: RunFolder, experiment: ExperimentFile, asked: Asked) -> AttemptStreams | None:
    attempts = run.home.attempts(run.folder.arm)
    index = next((at for at, each in enumerate(attempts) if each.number == run.folder.number), None)
    if index is None:
        return None
    try:
        return read_written(run.home, experiment, asked, attempts, index, 0, run.told.step + 1)
    except (RecordError, OSError):
        return None
