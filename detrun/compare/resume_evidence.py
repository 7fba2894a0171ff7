"""All that a verdict on a resume check rests on, as plain data: what the reading side hands to the deciding side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from detrun.compare.attempts import Position
from detrun.compare.completeness import Asked
from detrun.compare.evidence import ArmEvidence, PairEvidence
from detrun.compare.state import GroupTally, RowDifference
from detrun.compare.streams import PairTally
from detrun.records.verdict import Finding


@dataclass(slots=True)
class Boundary:
    """State at one boundary, two runs held against each other on every rank.

    groups: by label, the rows that count. explaining: differences that do not count alone. unseeded: random number
    streams that nobody seeded. missing: why a rank has nothing to compare, with the ranks.
    """

    position: Position
    groups: dict[str, GroupTally] = field(default_factory=dict)
    explaining: list[RowDifference] = field(default_factory=list)
    unseeded: list[str] = field(default_factory=list)
    missing: dict[str, list[int]] = field(default_factory=dict)
    ranks: int = 0
    cpu_seconds: list[float] = field(default_factory=list)

    def merge(self, other: Boundary) -> None:
        """Adds other ranks."""
        for label, tally in other.groups.items():
            mine = self.groups.setdefault(label, GroupTally(label))
            mine.merge(tally)
        self.explaining += other.explaining
        self.unseeded += [name for name in other.unseeded if name not in self.unseeded]
        for why, ranks in other.missing.items():
            self.missing.setdefault(why, []).extend(ranks)
        self.ranks += other.ranks
        self.cpu_seconds += other.cpu_seconds

    @property
    def differences(self) -> list[RowDifference]:
        """All that count, group by group."""
        return [difference for tally in self.groups.values() for difference in tally.differences]


@dataclass(slots=True)
class AttemptEvidence:
    """One attempt of an arm, held against the reference.

    arm: its job, surveys and gaps. told: the position of the checkpoint that it was given; named: the step in its name;
    came_from: by rank, where it began by its own parameters (None: not known). restored: its begin against the
    reference's; saved: the state when the checkpoint was written, in the run that wrote it. overlap: the steps that the
    attempt before ran too. sabotage: by rank, what a control arm broke on purpose.
    """

    arm: ArmEvidence
    pair: PairEvidence
    told: Position | None = None
    named: int | None = None
    came_from: dict[int, Position | None] = field(default_factory=dict)
    restored: Boundary | None = None
    saved: Boundary | None = None
    overlap: PairTally | None = None
    sabotage: dict[int, dict[str, Any]] = field(default_factory=dict)
    batch_offsets: dict[int, int] = field(default_factory=dict)
    """By rank, how many steps ahead of the reference's the first batch is, where it is one of the reference's."""

    @property
    def number(self) -> int:
        return self.arm.attempt

    @property
    def began(self) -> Position | None:
        """Where it came back, if every rank that knows agrees."""
        known = {position for position in self.came_from.values() if position is not None}
        return known.pop() if len(known) == 1 else None


@dataclass(slots=True)
class ControlEvidence:
    """An arm that has a purpose of its own: `observer`, or `self-test:<what was broken>`."""

    purpose: str
    attempt: AttemptEvidence


@dataclass(slots=True)
class ResumeEvidence:
    """Everything about one resume check. checkpoints: what the audit of the checkpoint folder found, each as ("warns"
    or "tells", in words). notes, source, resolution: as of `Evidence`."""

    asked: Asked
    reference: ArmEvidence
    attempts: Sequence[AttemptEvidence]
    controls: Sequence[ControlEvidence] = ()
    checkpoints: Sequence[tuple[str, str]] = ()
    notes: list[Finding] = field(default_factory=list)
    source: str = "recorder"
    resolution: dict[str, str] = field(default_factory=dict)
