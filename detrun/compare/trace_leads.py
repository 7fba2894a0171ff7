"""Which events of a rank lead: where its arms part by themselves.

An event whose inputs match and whose outputs do not is an origin, wherever it comes. One whose inputs differ leads only
if nothing that was recorded explains it, and nothing differed before: what comes later may follow from the first
difference on a way that is not recorded, such as a number that the host read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy

from detrun.compare.trace_shared import shared_key
from detrun.compare.trace_sources import Scene, differing_parts, explained, source_of
from detrun.compare.trace_summary import Lead, LeadKind, RankReading
from detrun.compare.trace_unpaired import Unpaired, lead_of_unpaired
from detrun.compare.trace_views import is_view
from detrun.compare.trace_weight import weightier
from detrun.records.files import one_line
from detrun.records.trace_row import TraceEvent
from detrun.records.trace_table import Integers

ENCLOSING = ("module", "recompute", "opaque", "optimizer")
"""Kinds of events inside of which other events happen, and end before them."""

FUNCTION = "function."
"""How operations are named that are a function of the program's own, inside of which others happen as well."""

_SHARED = ("collective", "send", "recv")


class LeadBook:
    """Gathers the leads of a rank over its steps. unexplained: operations whose inputs differ in the step of the
    first difference, after it, and that no recorded event explains."""

    def __init__(self, reading: RankReading, limit: int) -> None:
        self.unexplained: Counter[str] = Counter()
        self._reading = reading
        self._limit = limit
        self._differed = False
        self._aside: Lead | None = None  # of the first step in which one arm did something more, and nothing differed
        self._suspects: list[Lead] = []
        self._suspects_total = 0

    def add(self, scene: Scene, *, missing: bool, extra: bool) -> None:
        """Adds a step. missing, extra: whether events that only A has, or only B, are differences."""
        found = scene.alignment.differences
        apart = numpy.flatnonzero(found.any)
        if not self._differed:
            alignment = scene.alignment
            lonely = Unpaired(
                alignment.only_a if missing else alignment.only_a[:0],
                alignment.only_b if extra else alignment.only_b[:0],
            )
            unpaired = lead_of_unpaired(scene, lonely, apart)
            if unpaired is not None and len(apart):
                self._put([unpaired])
                self._differed = True
            elif self._aside is None:
                self._aside = unpaired
        if not len(apart):
            return
        leads: list[Lead] = []
        if not self._differed:
            leads += self._sources(scene, int(apart[0]))
            if self._aside is not None and self._follows(scene, int(apart[0]), leads):
                leads = [self._aside]
        kinds = scene.a.table.texts["kind"]
        rows = scene.alignment.rows_a
        origins = numpy.flatnonzero(~found.inputs & found.outputs)
        doubtful = found.doubtful_inputs[origins]
        self._suspect(scene, origins[doubtful])
        candidates = origins[~doubtful]
        ops = scene.a.table.texts["op"]
        functions = [code for code, op in enumerate(ops.values) if op.startswith(FUNCTION)]
        enclosing = numpy.isin(
            kinds.codes[rows[candidates]], [kinds.values.index(k) for k in ENCLOSING if k in kinds.values]
        ) | numpy.isin(ops.codes[rows[candidates]], functions)
        simple = candidates[~enclosing]
        room = max(0, self._limit - len(self._reading.leads))
        leads += [_origin(scene, int(number)) for number in simple[:room]]
        extra_leads = len(simple) - min(len(simple), room)
        leads = _with_enclosing(scene, leads, candidates[enclosing], apart)
        self._put(sorted(leads, key=lambda lead: lead.event.seq))
        self._reading.leads_total += extra_leads
        if not self._differed and not leads and not len(origins):
            # Explained by something that only B's order has before it: said, rather than passed over.
            self._put([source_of(scene, int(apart[0]))])
        self._differed = True

    def _sources(self, scene: Scene, first: int) -> list[Lead]:
        """The lead of the first difference, if it is one that nothing recorded explains; later ones are counted."""
        found = scene.alignment.differences
        sources = found.inputs & ~explained(scene)
        leads: list[Lead] = []
        if sources[first]:
            lead = source_of(scene, first)
            leads = [lead]
            if lead.kind == "data" and lead.event.kind != "batch":
                origins = bool((~found.inputs & found.outputs).any())
                apart = numpy.flatnonzero(found.any)
                chosen = weightier(scene, numpy.flatnonzero(sources), apart, origins=origins)
                if chosen is not None or origins:
                    leads = [] if chosen is None else [source_of(scene, chosen)]
        sources[first] = False
        ops = scene.a.table.texts["op"]
        codes, counts = numpy.unique(ops.codes[scene.alignment.rows_a[sources]], return_counts=True)
        for code, count in zip(codes.tolist(), counts.tolist(), strict=True):
            self.unexplained[ops.values[code]] += count
        return leads

    @property
    def decided(self) -> bool:
        """Whether a step was added in which the arms part."""
        return self._differed

    def _follows(self, scene: Scene, first: int, leads: list[Lead]) -> bool:
        """Whether the first difference may follow from what one arm alone did in an earlier step: an event without a
        partner wrote what it reads, or both draw random numbers."""
        assert self._aside is not None
        if leads:
            return leads[0].kind == "rng" and self._aside.event.rng is not None
        return bool(scene.alignment.differences.inputs[first])

    def finish(self) -> None:
        """All steps were added. What one arm alone did, without any effect, leads where nothing differs at all, and
        suspects where nothing else does."""
        reading = self._reading
        if not reading.leads and self._aside is not None:
            self._put([self._aside])
        if not reading.leads and reading.differs:
            self._put(self._suspects)
            reading.leads_total += self._suspects_total - len(self._suspects)
        elif self._suspects_total:
            reading.notes.append(
                f"rank {reading.rank}: {self._suspects_total:,} events differ whose only differing inputs are flagged"
            )
        reading.first_difference = reading.leads[0] if reading.leads else None

    def _put(self, leads: list[Lead]) -> None:
        reading = self._reading
        reading.leads_total += len(leads)
        reading.leads += leads[: self._limit - len(reading.leads)]

    def _suspect(self, scene: Scene, numbers: Integers) -> None:
        self._suspects_total += len(numbers)
        for number in numbers[: self._limit - len(self._suspects)].tolist():
            lead = _origin(scene, number)
            flags = one_line(lead.event.flags, 80)
            uninitialized = "uninitialized" in lead.event.flags
            self._suspects.append(
                replace(
                    lead,
                    role="suspect",
                    kind="uninitialized" if uninitialized else lead.kind,
                    after=None,
                    why=f"the only inputs of it that differ cannot be trusted ({flags})",
                )
            )


def _origin(scene: Scene, number: int) -> Lead:
    a, b = scene.pair(number)
    inputs, outputs = differing_parts(scene, number)
    kind = _kind(a)
    if a.kind == "op" and is_view(a.op):
        writer = a.producers[0] if a.producers else 0
        after = scene.a.find(a.seq - writer) if writer else None
        why = "a view computes nothing: what it looks at was written by something that is not recorded"
        return Lead("uncaptured-producer", kind, scene.rank, a, b, inputs, outputs, after, why)
    key = shared_key(scene, int(scene.alignment.rows_a[number])) if a.kind in _SHARED else None
    return Lead("origin", kind, scene.rank, a, b, inputs, outputs, None, "its inputs match, its outputs do not", key)


def _with_enclosing(scene: Scene, leads: list[Lead], numbers: Integers, apart: Integers) -> list[Lead]:
    """Adds the origins among events that enclose others, unless what differs in them began inside.

    Where something inside has inputs that differ and nothing explains them, a module's own code computed them, and so
    did a function's if it is data that comes from nowhere.
    """
    rows = scene.alignment.rows_a
    first = int(rows[apart[0]])
    for number in numbers.tolist():
        outer = scene.a.table.event(int(rows[number]))
        inside = [lead for lead in leads if _encloses(outer, lead.event)]
        if any(lead.role == "origin" for lead in inside[:1]):
            continue
        computes = outer.op.startswith(FUNCTION) and all(lead.kind == "data" for lead in inside)
        if outer.kind == "module" or computes or not inside:
            if not inside and outer.kind != "module" and first < rows[number]:
                event = scene.a.table.event(first)
                if _encloses(outer, event):
                    continue
            leads = [lead for lead in leads if lead not in inside]
            leads.append(_origin(scene, number))
    return leads


def _encloses(outer: TraceEvent, inner: TraceEvent) -> bool:
    """Whether an event may have happened inside another one."""
    if inner.seq >= outer.seq or (inner.step, inner.phase) != (outer.step, outer.phase):
        return False
    if outer.kind == "optimizer":
        return True
    within = inner.scope == outer.scope or not outer.scope or inner.scope.startswith(f"{outer.scope}.")
    return within and inner.microbatch == outer.microbatch


def _kind(event: TraceEvent) -> LeadKind:
    if event.kind in _SHARED:
        return "collective"
    if event.kind == "parameter":
        return "parameter"
    return "recompute" if event.kind == "recompute" else "op"
