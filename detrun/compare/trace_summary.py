"""What a comparison of two traces found, as plain values: what stands in a verdict, a report and `--json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from detrun.records.trace_row import TraceEvent

Role = Literal["origin", "receiver", "uncaptured-producer", "outside-the-trace", "suspect"]
"""origin: inputs match, outputs do not. receiver: a collective's or receive's difference came from another rank.
uncaptured-producer: an input differs though the event that last wrote it matched. outside-the-trace: an input differs
that no recorded event wrote. suspect: only inputs that cannot be trusted differ."""

Pattern = Literal["origin", "receiver", "outside", "nothing"]

LeadKind = Literal[
    "op", "collective", "recompute", "data", "rng", "control-flow", "parameter", "scalar", "uninitialized"
]

CollectiveKey = tuple[int, str, str, int]
"""(step, op, group, number of earlier events of that op in that group and step): the same on every member. For a send
or receive the group is `source>destination`, and the op empty."""


@dataclass(frozen=True)
class Lead:
    """One event at which a rank's arms part by themselves, and not because an earlier recorded event did.

    a, b: the event in each arm, None where that arm has none. inputs, outputs: numbers of the tensor parts that differ
    and can be trusted. after: the event that last wrote the differing input, and matched: what parted them lies between
    it and this one. key: of a collective or receive, what it is joined by across ranks.
    """

    role: Role
    kind: LeadKind
    rank: int
    a: TraceEvent | None
    b: TraceEvent | None
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    after: TraceEvent | None = None
    why: str = ""
    key: CollectiveKey | None = None

    @property
    def event(self) -> TraceEvent:
        """The event of the arm that has one, a's if both do."""
        event = self.a if self.a is not None else self.b
        assert event is not None
        return event

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {
            "role": self.role,
            "kind": self.kind,
            "rank": self.rank,
            "event": event_as_dict(self.event),
            "in_a": self.a is not None,
            "in_b": self.b is not None,
            "seq": {"a": None if self.a is None else self.a.seq, "b": None if self.b is None else self.b.seq},
            "inputs": list(self.inputs),
            "outputs": list(self.outputs),
            "after": None if self.after is None else event_as_dict(self.after),
            "why": self.why,
        }


@dataclass(frozen=True)
class SpreadRow:
    """The first event of a scope, in a phase, that differs on a rank."""

    rank: int
    seq: int
    step: int
    microbatch: int
    phase: str
    scope: str
    op: str


@dataclass(frozen=True)
class LeadGroup:
    """Leads of one operation with the same role. ranks_compared: how many ranks could have shown it."""

    op: str
    role: Role
    kind: LeadKind
    count: int
    ranks: tuple[int, ...]
    scopes: tuple[str, ...]
    phases: tuple[str, ...]
    steps: tuple[int, int]
    ranks_compared: int

    @property
    def reading(self) -> str:
        """What the ranks say about where to look."""
        if self.ranks_compared < 2:
            return ""
        if len(self.ranks) == self.ranks_compared:
            return "on all ranks compared: look at the operation itself"
        return f"on {len(self.ranks)} of {self.ranks_compared} ranks: look at their inputs, place and hardware"


@dataclass(frozen=True)
class CleanRow:
    """How one operation did in one phase and with one signature, by rank: events whose inputs match and whose outputs
    match (clean) or not (differing), and those whose inputs differ already (received)."""

    phase: str
    signature: str
    scopes: tuple[str, ...]
    clean: int
    differing: int
    received: int
    clean_ranks: tuple[int, ...]
    differing_ranks: tuple[int, ...]


@dataclass
class RankReading:
    """What the traces of one rank say.

    events: aligned pairs. skipped_steps: equal by the digests of the index, their events counted as equal. leads: in
    execution order, the first 200 of leads_total. shared: of collectives, sends and receives that differ, whether their
    inputs do; shared_until: (step, ) after which they were not noted any more. problem: why nothing could be compared.
    """

    rank: int
    level: int = 0
    events: int = 0
    equal: int = 0
    differing: int = 0
    missing: int = 0
    extra: int = 0
    flagged: int = 0
    steps: tuple[int, ...] = ()
    skipped_steps: int = 0
    leads: list[Lead] = field(default_factory=list)
    leads_total: int = 0
    first_difference: Lead | None = None
    recompute: list[Lead] = field(default_factory=list)
    spread: list[SpreadRow] = field(default_factory=list)
    shared: dict[CollectiveKey, bool] = field(default_factory=dict)
    shared_until: int | None = None
    notes: list[str] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)
    coverage: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None

    @property
    def differs(self) -> bool:
        return bool(self.differing or self.missing or self.extra)

    def as_dict(self) -> dict[str, Any]:
        """The counts and words of it, without its leads."""
        return {
            "rank": self.rank,
            "level": self.level,
            "events": self.events,
            "equal": self.equal,
            "differing": self.differing,
            "missing": self.missing,
            "extra": self.extra,
            "flagged": self.flagged,
            "steps": list(self.steps),
            "skipped_steps": self.skipped_steps,
            "leads": self.leads_total,
            "first_difference": None if self.first_difference is None else self.first_difference.as_dict(),
            "notes": self.notes,
            "incomplete": self.incomplete,
            "problem": self.problem,
        }


@dataclass
class TraceComparison:
    """Two arms' traces held against each other.

    lead: what the verdict names. others: every further lead of the same role and operation first, then the rest in
    the order of their steps. pattern: `receiver` where the lead of every rank came from a rank that was not traced.
    incomplete: every reason why equal events do not make the traces identical. recompute: recomputed events that
    differ from their forward within one arm.
    """

    lead: Lead | None = None
    others: list[Lead] = field(default_factory=list)
    pattern: Pattern = "nothing"
    groups: list[LeadGroup] = field(default_factory=list)
    table: list[CleanRow] = field(default_factory=list)
    spread: list[SpreadRow] = field(default_factory=list)
    recompute: list[Lead] = field(default_factory=list)
    readings: list[RankReading] = field(default_factory=list)
    hint: str = ""
    coverage: dict[str, Any] = field(default_factory=dict)
    incomplete: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> Literal["identical", "diverged", "not-verified"]:
        if any(reading.differs for reading in self.readings):
            return "diverged"
        return "not-verified" if self.incomplete or not self.events else "identical"

    @property
    def events(self) -> int:
        """Aligned events of all ranks."""
        return self._sum("events")

    @property
    def differing(self) -> int:
        return self._sum("differing")

    def _sum(self, name: str) -> int:
        return sum(getattr(reading, name) for reading in self.readings)

    def as_dict(self) -> dict[str, Any]:
        """One JSON document, everything but the verdict's wording in it."""
        counts = ("events", "equal", "differing", "missing", "extra", "flagged", "skipped_steps")
        return {
            "verdict": self.verdict,
            "pattern": self.pattern,
            "lead": None if self.lead is None else self.lead.as_dict(),
            "others": [lead.as_dict() for lead in self.others],
            "groups": [{**asdict(group), "reading": group.reading} for group in self.groups],
            "table": [asdict(row) for row in self.table],
            "spread": [asdict(row) for row in self.spread],
            "recompute": [lead.as_dict() for lead in self.recompute],
            "counts": {name: self._sum(name) for name in counts},
            "ranks": [reading.as_dict() for reading in self.readings],
            "hint": self.hint,
            "coverage": self.coverage,
            "incomplete": self.incomplete,
            "notes": self.notes,
        }


def event_as_dict(event: TraceEvent) -> dict[str, Any]:
    """An event's key and what describes it, without digests."""
    return {
        "seq": event.seq,
        "step": event.step,
        "microbatch": event.microbatch,
        "phase": event.phase,
        "scope": event.scope,
        "op": event.op,
        "kind": event.kind,
        "occurrence": event.occurrence,
        "signature": event.signature,
        "scalars": event.scalars,
        "flags": event.flags,
        "site": event.site,
        "group": event.group,
        "peer": event.peer,
    }


def shape_of_counts(counts: Mapping[str, int], limit: int = 8) -> str:
    """`cumsum 12, relu 3, … 4 more`: names with their counts, the largest first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    words = [f"{name} {count}" for name, count in ordered[:limit]]
    return ", ".join([*words, *([f"… {len(ordered) - limit} more"] if len(ordered) > limit else [])])
