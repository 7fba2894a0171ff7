"""Runs held against each other by what the programs wrote themselves. Pure: streams in, tallies and gaps out.

One program prints one number in one way, so that of two runs of it other digits are another number. A mean of several
steps is held against the same mean, or against what the other run's readings say of its last step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from detrun.compare.bits import looks_equal, ulp_distance
from detrun.compare.completeness import RankSurvey
from detrun.compare.folding import steps_in_words
from detrun.compare.streams import METRIC, Gap, PairTally, StepTally, Stream, StreamTally
from detrun.fingerprint import scalar
from detrun.records.metrics_line import shown_name
from detrun.records.sources.number import Interval, Number, agree, overlap, same
from detrun.records.sources.patterns import Pattern
from detrun.records.sources.reading import Reading
from detrun.records.sources.reading import Stream as SourceStream
from detrun.records.sources.spec import SourceSpec, candidates

Series = Mapping[int, Reading]


@dataclass(frozen=True, slots=True)
class SourceAsked:
    """What is asked of a source. compared: metrics by detrun's names; required: those of them that must be there."""

    spec: SourceSpec
    pattern: Pattern
    steps: int
    compared: tuple[str, ...]
    required: tuple[str, ...]
    requirement: str = "required by the recipe"

    def series(self, stream: SourceStream, metric: str) -> tuple[str, Series] | None:
        """The name and readings that a stream has of a metric; those with a number before those without."""
        there = [name for name in candidates(self.spec, metric, self.pattern.names) if name in stream.series]
        for name in there:
            if _holds_numbers(stream.series[name]):
                return name, stream.series[name]
        return (there[0], stream.series[there[0]]) if there else None

    def due(self, first: int, last: int) -> list[int]:
        """The steps from `first` to `last` of which there has to be a reading."""
        every, offset = self.spec.every, self.spec.first_step - 1
        return [step for step in range(first, last + 1) if (step + offset) % every == 0]


@dataclass(slots=True)
class Agreement:
    """How far the readings of a metric go: the words of the coarsest, in how many steps they were held against each
    other, and the steps in which they could not be."""

    resolution: str = "exact"
    digits: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    apart: list[int] = field(default_factory=list)

    def take(self, *numbers: Number | None) -> None:
        self.steps += 1
        for number in numbers:
            if number is None:
                continue
            if _COARSE[number.resolution] > _COARSE[self.resolution]:
                self.resolution = number.resolution
            self.digits[number.digits()] = self.digits.get(number.digits(), 0) + 1

    def words(self) -> str:
        """`7 significant digits`, `4 to 6 significant digits`, `float32`, `every bit`."""
        counts = sorted(int(text.split()[0]) for text in self.digits if text[0].isdigit())
        if self.resolution != "decimal" or not counts:
            return {"exact": "every bit", "float32": "float32", "decimal": "the digits printed"}[self.resolution]
        span = str(counts[0]) if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
        return f"{span} significant digit{'' if counts[-1] == 1 else 's'}"

    def merge(self, other: Agreement) -> None:
        if _COARSE[other.resolution] > _COARSE[self.resolution]:
            self.resolution = other.resolution
        for text, count in other.digits.items():
            self.digits[text] = self.digits.get(text, 0) + count
        self.steps += other.steps
        self.apart = sorted({*self.apart, *other.apart})


_COARSE = {"exact": 0, "float32": 1, "decimal": 2}

Agreements = dict[str, Agreement]


def survey_stream(
    arm: str,
    rank: int,
    stream: SourceStream,
    asked: SourceAsked,
    first: int = 1,
    *,
    last: int | None = None,
    cut_short: bool = False,
) -> RankSurvey:
    """What a stream lacks of what was asked for, from step `first` on. last: where another stream of the arm went on.
    cut_short: it was ended from outside, so that its tail may be lost and its last line torn."""
    survey = RankSurvey(arm, rank, first=stream.first, last=stream.last)
    for problem in stream.problems:
        if not (cut_short and problem.kind == "torn"):
            what = f"{problem.file} {problem.what}"
            survey.gaps.append(Gap(problem.kind, what, rank, arm, problem.step, problem.line, problem.file))
    if not stream.series:
        survey.unreadable = True
        where = ", ".join(stream.files[:3]) or asked.spec.path or "the arm's logs"
        others = f"; it has {', '.join(sorted(stream.names)[:8])}" if stream.names else ""
        what = f"no metric that was asked for is in {where}{others}"
        survey.gaps.append(Gap("metric", what, rank, arm))
        return survey
    survey.steps = len({step for series in stream.series.values() for step in series})
    found_of = {metric: asked.series(stream, metric) for metric in asked.compared}
    survey.metrics = tuple(metric for metric, found in found_of.items() if found and _holds_numbers(found[1]))
    end = min(stream.last, last if last is not None else asked.steps)
    for metric in asked.required:
        found = found_of.get(metric)
        due = asked.due(first, end)
        if found is None or not _holds_numbers(found[1]):
            others = f"; there are {', '.join(sorted(stream.names)[:8])}" if stream.names else ""
            survey.gaps.append(
                Gap("metric", f"{metric} is missing ({asked.requirement}{others})", rank, arm, first, name=metric)
            )
        elif lacking := [step for step in due if step not in found[1]]:
            what = f"{metric} is missing {steps_in_words(lacking, len(due))} ({asked.requirement})"
            survey.gaps.append(Gap("metric-step", what, rank, arm, lacking[0], name=metric))
    # A source that speaks every tenth step ends at the last such step.
    if stream.last < asked.steps and not asked.due(stream.last + 1, asked.steps):
        survey.last = asked.steps
    return survey


def compare_streams(
    tally: PairTally, rank: int, a: SourceStream, b: SourceStream, asked: SourceAsked, agreements: Agreements
) -> None:
    """Adds to `tally` how two runs' readings of one stream differ in the steps that both hold, and to `agreements` how
    far those reach that do not."""
    steps: set[int] = set()
    for metric in asked.compared:
        mine, theirs = asked.series(a, metric), asked.series(b, metric)
        if mine is None or theirs is None:
            if mine is not None or theirs is not None:
                arm, other = (tally.b, tally.a) if theirs is None else (tally.a, tally.b)
                tally.gaps.append(
                    Gap("one-arm", f"{shown_name(metric)} is missing, arm {other} has it", rank, arm, name=metric)
                )
            continue
        if mine[0] != theirs[0] and not _holds_numbers(theirs[1]) and mine[0] in b.series:
            theirs = mine[0], b.series[mine[0]]
        elif mine[0] != theirs[0] and not _holds_numbers(mine[1]) and theirs[0] in a.series:
            mine = theirs[0], a.series[theirs[0]]
        if not _holds_numbers(mine[1]) and not _holds_numbers(theirs[1]):
            continue
        if mine[0] != theirs[0]:
            called = f"{shown_name(mine[0])} in arm {tally.a}, {shown_name(theirs[0])} in arm {tally.b}"
            what = f"{shown_name(metric)} is called {called}"
            tally.gaps.append(Gap("incomparable", what, rank, name=metric))
            continue
        if asked.pattern.is_derived(mine[0]):
            continue
        agreement = agreements.setdefault(metric, Agreement())
        x, y = singles(mine[1]), singles(theirs[1])
        source = asked.spec.source
        for step in sorted(mine[1].keys() & theirs[1].keys()):
            left, right = mine[1][step], theirs[1][step]
            answer = _alike(left, right, x.get(step), y.get(step))
            if answer is None:
                agreement.apart.append(step)
                continue
            steps.add(step)
            agreement.take(left.number, right.number)
            if not answer:
                _differ(tally, metric, rank, step, left, right, source)
    for step in steps:
        tally.compared[step] = tally.compared.get(step, 0) + 1


def _holds_numbers(series: Series) -> bool:
    return any(reading.number is not None for reading in series.values())


def _alike(a: Reading, b: Reading, x: Interval | None, y: Interval | None) -> bool | None:
    """Whether two readings of a step may be of one number; None where nothing tells."""
    if (a.first, a.partial) == (b.first, b.partial):
        if a.number is None or b.number is None:
            return a.number is b.number
        return same(a.number, b.number)
    if a.number is not None and b.number is not None and same(a.number, b.number):
        return True
    if x is None or y is None:
        return None
    return overlap(x, y)


def singles(series: Series) -> dict[int, Interval]:
    """What the readings say of each step alone: of a mean, what the steps before leave for its last one."""
    known: dict[int, Interval] = {}
    for step in sorted(series):
        reading = series[step]
        interval = reading.number.interval() if reading.number is not None else None
        if interval is None or reading.partial:
            continue
        if not reading.is_mean:
            known[step] = interval
            continue
        before = [known.get(earlier) for earlier in range(reading.first, step)]
        if any(each is None for each in before):
            continue
        count = step - reading.first + 1
        # The program adds up in float32.
        slack = count * max(abs(interval[0]), abs(interval[1])) * Fraction(1, 1 << 23)
        low = count * (interval[0] - slack) - sum((each[1] for each in before if each), Fraction(0))
        high = count * (interval[1] + slack) - sum((each[0] for each in before if each), Fraction(0))
        known[step] = (low, high)
    return known


def _differ(tally: PairTally, metric: str, rank: int, step: int, a: Reading, b: Reading, source: str) -> None:
    left, right = _shown(a, source), _shown(b, source)
    left, right = _narrowed(left, right)
    printed = "printed" in left or "printed" in right
    ulp = None if printed else ulp_distance(left["bits"], right["bits"], left["dtype"])
    stream = Stream(METRIC, metric)
    one = StreamTally(stream, step, [rank], left, right, {step: StepTally(1, ulp, rank)})
    x, y = float(left["value"]), float(right["value"])
    one.visible = {decimals: step for decimals in (6, 4) if not looks_equal(x, y, decimals)}
    if stream in tally.streams:
        tally.streams[stream].merge(one)
    else:
        tally.streams[stream] = one


def _shown(reading: Reading, source: str) -> dict[str, Any]:
    """A reading as a metric of a record."""
    if reading.number is None:
        number = Number(scalar.bits_of(float("nan"), "float64"), "float64", "decimal", "left out: negative or NaN")
        return number.metric(source, reading.place)
    found = reading.number.metric(source, reading.place)
    if reading.is_mean:
        found["mean_of_steps"] = [reading.first, reading.step]
    return found


def _narrowed(a: dict[str, Any], b: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two float64 that both are float32 widened, as float32: their distance is told in that."""
    if a["dtype"] == b["dtype"] == "float64" and "printed" not in a and "printed" not in b:
        values = [scalar.value_of(int(each["bits"], 16), "float64") for each in (a, b)]
        narrow = [scalar.bits_of(value, "float32") for value in values]
        if all(scalar.value_of(bits, "float32") == value for bits, value in zip(narrow, values, strict=True)):
            a, b = (
                {
                    **each,
                    "bits": scalar.format_bits(bits, "float32"),
                    "dtype": "float32",
                    "value": scalar.json_value(bits, "float32"),
                }
                for each, bits in zip((a, b), narrow, strict=True)
            )
    return a, b


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A metric of a step that two sources of one run give differently. main: what the first has, by rank."""

    metric: str
    step: int
    reading: Reading
    main: Mapping[int, Number]


@dataclass(slots=True)
class Held:
    """A second source held against the first: where they contradict each other, and how far they agree."""

    contradictions: list[Contradiction] = field(default_factory=list)
    agreements: Agreements = field(default_factory=dict)


Values = Mapping[str, Mapping[int, Mapping[int, Sequence[Number]]]]
"""What the first source has: by metric, step and rank the numbers that go by that name."""


def hold_against(main: Values, stream: SourceStream, asked: SourceAsked, *, recorder: bool = False) -> Held:
    """Whether a run's second source may speak of the numbers of the first: of any rank's, or of their mean.

    recorder: the first source is the recorder, which may know what the program reports by another name."""
    held = Held()
    for metric in asked.compared:
        found = asked.series(stream, metric)
        known = asked.pattern.recorded.get(metric, metric) if recorder else metric
        if found is None or known not in main or asked.pattern.is_derived(found[0]):
            continue
        by_step = main[known]
        agreement = held.agreements.setdefault(metric, Agreement())
        for step, reading in sorted(found[1].items()):
            ranks = by_step.get(step)
            if not ranks or reading.partial:
                continue
            answer = _fits(reading, by_step)
            if answer is None:
                agreement.apart.append(step)
                continue
            agreement.take(reading.number)
            if not answer:
                first = {rank: numbers[0] for rank, numbers in ranks.items()}
                held.contradictions.append(Contradiction(metric, step, reading, first))
    return held


def _fits(reading: Reading, by_step: Mapping[int, Mapping[int, Sequence[Number]]]) -> bool | None:
    here = by_step[reading.step]
    numbers = [number for each in here.values() for number in each]
    if reading.number is None:  # left out since it is negative or NaN
        return None if reading.is_mean else any(number.is_nan or number.value < 0 for number in numbers)
    if not reading.is_mean and any(agree(reading.number, number) for number in numbers):
        return True
    window = [by_step.get(step) for step in range(reading.first, reading.step + 1)]
    if any(not each for each in window):
        # The newest of several steps alone may be what a program that does reset its means has printed.
        return True if any(agree(reading.number, number) for number in numbers) else None
    ranks = [each for each in window if each]
    common = set.intersection(*(set(each) for each in ranks))
    trials = [[each[rank] for each in ranks] for rank in sorted(common)]
    if reading.is_mean and any(agree(reading.number, number) for number in numbers):
        return True
    if reading.is_mean and any(_is_mean(reading.number, [numbers[0] for numbers in trial]) for trial in trials):
        return True
    everything = [numbers[0] for each in ranks for numbers in each.values()]
    return len(here) > 1 and _is_mean(reading.number, everything)


def _is_mean(number: Number, of: Iterable[Number]) -> bool:
    """Whether it may be the mean of these, computed in float32 in whatever order."""
    values = list(of)
    interval = number.interval()
    parts = [value.interval() for value in values]
    if interval is None or any(part is None for part in parts):
        return False
    known = [part for part in parts if part is not None]
    count = len(known)
    slack = sum((max(abs(low), abs(high)) for low, high in known), Fraction(0)) * Fraction(1, 1 << 22)
    low = (sum((part[0] for part in known), Fraction(0)) - slack) / count
    high = (sum((part[1] for part in known), Fraction(0)) + slack) / count
    return overlap(interval, (low, high))
