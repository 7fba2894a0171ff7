"""All that a verdict on a group of arms rests on, as plain data: what the reading side hands to the deciding side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from detrun.compare.completeness import ArmEnd, Asked, RankSurvey
from detrun.compare.environment import EnvironmentTally, InitialDifference
from detrun.compare.streams import Gap, PairTally
from detrun.records.jobs import JobFile, Role
from detrun.records.verdict import Finding

ENDED_BADLY = frozenset({"failed", "stalled", "cancelled", "lost"})


@dataclass(slots=True)
class CostTally:
    """CPU seconds of recorders by part, and of their processes, over `ranks` ranks."""

    ranks: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    process: float = 0.0

    def merge(self, other: CostTally) -> None:
        """Adds other ranks."""
        self.ranks += other.ranks
        self.process += other.process
        for part, seconds in other.parts.items():
            self.parts[part] = self.parts.get(part, 0.0) + seconds


@dataclass(slots=True)
class ArmEvidence:
    """One arm: its job's end, its ranks' surveys, and everything that was wrong with its files.

    remarks: recorders' own warnings with the ranks that gave them. stages: each rank's pipeline stage. replicas:
    each rank's declared group. hosts: where the ranks ran.
    """

    id: str
    role: Role
    attempt: int = 0
    job: JobFile | None = None
    surveys: list[RankSurvey] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    remarks: dict[str, list[int]] = field(default_factory=dict)
    stages: dict[int, str] = field(default_factory=dict)
    replicas: dict[int, tuple[int, ...] | None] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    cost: CostTally = field(default_factory=CostTally)

    @property
    def end(self) -> ArmEnd:
        """How its job ended."""
        if self.job is None:
            return ArmEnd(None, False)
        code = self.job.exit_code
        return ArmEnd(code if code is not None else 0, self.job.state == "done" and code in (0, None))

    @property
    def ended_by_plan(self) -> bool:
        """Whether it was interrupted as it was asked to be, whatever code that left."""
        return self.job is not None and self.job.state == "interrupted" and self.job.interruption is not None

    def is_complete(self, asked: Asked) -> bool:
        """Whether every rank recorded its last step."""
        return len(self.surveys) == asked.ranks and all(survey.last >= asked.steps for survey in self.surveys)

    @property
    def nodes(self) -> list[str]:
        """The hosts it ran on: its job's, else those that the ranks named."""
        if self.job and self.job.nodes:
            return list(self.job.nodes)
        return list(dict.fromkeys(self.hosts[rank] for rank in sorted(self.hosts)))


@dataclass(slots=True)
class PairEvidence:
    """Two arms held against each other."""

    streams: PairTally
    environment: EnvironmentTally
    initial: dict[str, InitialDifference] = field(default_factory=dict)

    @property
    def arms(self) -> list[str]:
        return [self.streams.a, self.streams.b]

    @property
    def initial_differences(self) -> list[InitialDifference]:
        """Components of the state before the first step that differ, parameters first."""
        found = [difference for difference in self.initial.values() if difference.comparable]
        return sorted(found, key=lambda item: (not item.component.startswith("parameters"), item.component))

    def merge(self, streams: PairTally, environment: EnvironmentTally, initial: dict[str, InitialDifference]) -> None:
        """Adds what was found on other ranks."""
        self.streams.merge(streams)
        self.environment.merge(environment)
        for name, difference in initial.items():
            if name in self.initial:
                self.initial[name].ranks.extend(difference.ranks)
            else:
                self.initial[name] = difference

    @property
    def diverged(self) -> bool:
        return bool(self.streams.streams) or bool(self.initial_differences)


@dataclass(slots=True)
class Evidence:
    """Everything about one experiment that compares arms step by step.

    notes: findings of what the programs wrote themselves. source: where the metrics come from; resolution: how far
    those of another source than the recorder reach, by metric."""

    asked: Asked
    arms: Sequence[ArmEvidence]
    pairs: Sequence[PairEvidence]
    notes: list[Finding] = field(default_factory=list)
    source: str = "recorder"
    resolution: dict[str, str] = field(default_factory=dict)
