"""What a source's file holds: readings, each with the place it stood at, and what in it could not be taken.

Files of one attempt are put together here. Two files that give one metric of one step with the same number say one
thing twice; with different numbers neither is believed, and the conflict is a problem. Never does the first win.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from detrun.records.files import one_line
from detrun.records.sources.number import Number, same

MAX_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class Part:
    """The bytes of a file that one attempt wrote: from `start` up to `end` (None: to the end of the file)."""

    path: Path
    start: int = 0
    end: int | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """A metric of a step, by the name its source has for it.

    number: None where the program leaves a number out by a rule that its pattern knows (negative or NaN). file, line:
    where it stood; of a binary file the number of the record. first: the first of the steps over which it is the mean;
    the step itself if it is no mean. partial: not all of these steps are in it, and it is not known which.
    """

    name: str
    step: int
    number: Number | None
    file: str
    line: int
    first: int
    partial: bool = False

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def is_mean(self) -> bool:
        return self.first < self.step


@dataclass(frozen=True, slots=True)
class SourceProblem:
    """Something in a source that cannot be taken as it is. `what` reads on behind the file's name."""

    kind: str
    what: str
    file: str
    line: int | None = None
    step: int | None = None


@dataclass(slots=True)
class Found:
    """What one file, or all files of one attempt, hold. names: every metric that is there, wanted or not."""

    readings: list[Reading] = field(default_factory=list)
    problems: list[SourceProblem] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    more_problems: int = 0

    def note(self, kind: str, what: str, file: str, line: int | None = None, step: int | None = None) -> None:
        """Keeps a problem; beyond MAX_PROBLEMS they are only counted."""
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(SourceProblem(kind, one_line(what, 300), file, line, step))
        else:
            self.more_problems += 1


@dataclass(slots=True)
class Stream:
    """One stream of an attempt: by name and step one reading. last: the highest step of any."""

    series: dict[str, dict[int, Reading]] = field(default_factory=dict)
    problems: list[SourceProblem] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    files: list[str] = field(default_factory=list)

    @property
    def last(self) -> int:
        return max((step for steps in self.series.values() for step in steps), default=0)

    @property
    def first(self) -> int:
        return min((step for steps in self.series.values() for step in steps), default=0)

    def of(self, names: Iterable[str]) -> tuple[str, dict[int, Reading]] | None:
        """The series of the first of these names that is there."""
        for name in names:
            if name in self.series:
                return name, self.series[name]
        return None


def merge(files: Iterable[tuple[str, Found]]) -> Stream:
    """The files of one attempt as one stream."""
    stream = Stream()
    conflicts: dict[tuple[str, int], Reading] = {}
    for name, found in files:
        stream.files.append(name)
        stream.problems += found.problems
        stream.names |= found.names
        if found.more_problems:
            stream.problems.append(SourceProblem("invalid", f"has {found.more_problems:,} problems more", name))
        for reading in found.readings:
            steps = stream.series.setdefault(reading.name, {})
            earlier = steps.get(reading.step)
            if earlier is None:
                steps[reading.step] = reading
            elif not _says_the_same(earlier, reading):
                conflicts.setdefault((reading.name, reading.step), reading)
    for (name, step), reading in conflicts.items():
        earlier = stream.series[name].pop(step)
        twice = f"{_shown(reading)} (line {reading.line}), and {earlier.place} as {_shown(earlier)}"
        what = f"gives {one_line(name, 60)} of step {step} as {twice}"
        stream.problems.append(SourceProblem("conflict", what, reading.file, reading.line, step))
    stream.series = {name: steps for name, steps in stream.series.items() if steps}
    return stream


def _says_the_same(a: Reading, b: Reading) -> bool:
    if (a.first, a.partial) != (b.first, b.partial):
        return False
    if a.number is None or b.number is None:
        return a.number is b.number
    return same(a.number, b.number)


def _shown(reading: Reading) -> str:
    number = reading.number
    if number is None:
        return "left out"
    return number.printed if number.printed is not None else repr(number.value)
