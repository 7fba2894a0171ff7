"""One rank's two traces held against each other, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy

from detrun.compare.trace_align import Alignment, align
from detrun.compare.trace_history import DIFFERS, MATCHED, NOBODY, Block, History
from detrun.compare.trace_leads import LeadBook
from detrun.compare.trace_recompute import recompute_findings
from detrun.compare.trace_shared import note_shared
from detrun.compare.trace_sources import Scene, Side
from detrun.compare.trace_summary import RankReading, SpreadRow, shape_of_counts
from detrun.errors import RecordError
from detrun.records.files import one_line
from detrun.records.trace_reader import StepIndex, TraceFile
from detrun.records.trace_row import TraceEvent
from detrun.records.trace_table import StepTable

MOST_LEADS = 200
MOST_SPREAD = 100
SPREAD_STEPS = 3


def compare_rank(
    a: TraceFile,
    b: TraceFile,
    *,
    limit: int = MOST_LEADS,
    recompute: bool = False,
    skip_equal: bool = True,
    from_batch: bool = False,
) -> RankReading:
    """What the traces of one rank in two arms say.

    limit: leads that are kept. recompute: steps that are equal in both arms are read as well, to hold recomputed events
    against their forward within arm A; steps that differ always are. skip_equal: steps whose digests agree are not
    read. from_batch: the first step counts from its first batch on: a program that just resumed has not done what
    an uninterrupted one does between two steps. Whatever is wrong with the files is in the reading.
    """
    reading = RankReading(a.rank, level=a.level)
    reading.problem = incomparable(a, b)
    if reading.problem is not None:
        return reading
    for arm, trace in (("A", a), ("B", b)):
        reading.incomplete += [f"{arm}: {what}" for what in lacking(trace)]
        reading.coverage[arm] = dict(trace.end.coverage) if trace.end is not None else {}
    _Comparison(a, b, reading, limit, recompute, skip_equal, from_batch).run()
    return reading


def incomparable(a: TraceFile, b: TraceFile) -> str | None:
    """Why two traces cannot be held against each other, None if they can."""
    for what, left, right in (
        ("level", a.level, b.level),
        ("digest algorithm", a.digest, b.digest),
        ("scope patterns", a.scopes, b.scopes),
        ("layout of ranks", a.coordinates, b.coordinates),
    ):
        if left != right:
            return f"the {what} is {one_line(str(left), 120)} in A and {one_line(str(right), 120)} in B"
    return None


def lacking(trace: TraceFile) -> list[str]:
    """Why a trace does not hold all of what was asked for."""
    found: list[str] = []
    if trace.torn is not None:
        found.append(f"the trace of rank {trace.rank} {trace.torn}")
    if trace.end is not None and not trace.end.complete:
        found.append(f"the trace of rank {trace.rank} is incomplete: {one_line(trace.end.reason or 'no reason given')}")
    unfinished = [entry.step for entry in trace.index if not entry.finished]
    if unfinished and trace.end is not None and trace.end.complete:
        found.append(f"step {unfinished[0]} of rank {trace.rank} was not recorded to its end")
    if trace.steps_asked is not None and trace.torn is None and (trace.end is None or trace.end.complete):
        first, last = trace.steps_asked
        there = {entry.step for entry in trace.index}
        missing = last - first + 1 - len([step for step in there if first <= step <= last])
        if missing > 0:
            step = next(step for step in range(first, last + 1) if step not in there)
            which = f"step {step}" if missing == 1 else f"{missing} of the steps {first} to {last}, the first is {step}"
            found.append(f"rank {trace.rank} lacks {which}")
    if not trace.index:
        found.append(f"the trace of rank {trace.rank} holds no step")
    return found


@dataclass
class _Comparison:
    a: TraceFile
    b: TraceFile
    reading: RankReading
    limit: int
    recompute: bool
    skip_equal: bool
    from_batch: bool
    history_a: History = field(default_factory=History)
    history_b: History = field(default_factory=History)
    since: tuple[int, ...] = (0, 0)
    moved: int = 0
    spread_steps: int = 0

    def run(self) -> None:
        reading = self.reading
        self.book = LeadBook(reading, self.limit)
        index_a = {entry.step: entry for entry in self.a.index}
        index_b = {entry.step: entry for entry in self.b.index}
        for step in sorted(index_a.keys() | index_b.keys()):
            entry_a, entry_b = index_a.get(step), index_b.get(step)
            if entry_a is None or entry_b is None:
                reading.incomplete.append(f"step {step} of rank {reading.rank} is only in {'A' if entry_a else 'B'}")
                continue
            try:
                self._step(entry_a, entry_b)
            except RecordError as error:
                reading.incomplete.append(f"rank {reading.rank} is not compared from step {step} on: {error}")
                break
            reading.steps = (*reading.steps, step)
        self.book.finish()
        if self.moved:
            reading.notes.append(
                f"rank {reading.rank}: {self.moved:,} events came in another order among those of their scope and "
                "operation; they are aligned by content"
            )
        if self.book.unexplained:
            words = shape_of_counts(self.book.unexplained)
            reading.notes.append(
                f"rank {reading.rank}: later inputs differ that no recorded event wrote ({words}); they may follow "
                "from the first difference by way of the host"
            )

    def _step(self, entry_a: StepIndex, entry_b: StepIndex) -> None:
        reading = self.reading
        whole = entry_a.finished and entry_b.finished
        if self.skip_equal and whole and self._equal_by_digest(entry_a, entry_b):
            reading.events += entry_a.events
            reading.equal += entry_a.events
            reading.skipped_steps += 1
            if self.recompute:
                self._recomputed(self.a.table(entry_a.step), "A")
            return
        a, b = self.a.table(entry_a.step), self.b.table(entry_b.step)
        if self.from_batch and not reading.steps:
            a, b = _from_batch(a), _from_batch(b)
            self.since = tuple(int(table.numbers["seq"][0]) if len(table) else 0 for table in (a, b))
        # What came before the first difference decides; after it a step is only counted, and searched for origins.
        first = not self.book.decided
        alignment = align(a, b, by_content=first)
        found = alignment.differences
        differing = int(found.any.sum())
        same = whole and entry_a.digest is not None and entry_a.digest == entry_b.digest
        if same and (differing or len(alignment.only_a) or len(alignment.only_b)):
            what = "or that of A holds other events than its digest was made of: it was changed, or is damaged"
            raise RecordError(what, where=str(self.b.path))
        reading.events += len(alignment.rows_a)
        reading.differing += differing
        reading.equal += len(alignment.rows_a) - differing
        reading.flagged += int(found.flagged.sum())
        self.moved += alignment.moved
        # What a torn trace lacks at its end was not recorded: that is no event which the program left out.
        if entry_b.finished:
            reading.missing += len(alignment.only_a)
        if entry_a.finished:
            reading.extra += len(alignment.only_b)
        if first:
            self._remember(a, b, alignment)
        scene = Scene(
            reading.rank,
            self.a.level,
            Side(a, self.history_a, lambda seq: _event(self.a, self.history_a, a, seq), self.since[0]),
            Side(b, self.history_b, lambda seq: _event(self.b, self.history_b, b, seq), self.since[1]),
            alignment,
            self.a.scopes is not None,
        )
        self.book.add(scene, missing=entry_b.finished, extra=entry_a.finished)
        note_shared(reading, scene)
        if differing and self.spread_steps < SPREAD_STEPS:
            self.spread_steps += 1
            self._spread(scene)
        for table, arm in ((a, "A"), (b, "B")):
            self._recomputed(table, arm)

    def _equal_by_digest(self, a: StepIndex, b: StepIndex) -> bool:
        if a.events != b.events:
            return False
        if a.digest is not None and b.digest is not None:
            return a.digest == b.digest
        left, right = self.a.raw(a.step), self.b.raw(b.step)
        return left is not None and left == right

    def _remember(self, a: StepTable, b: StepTable, alignment: Alignment) -> None:
        found = alignment.differences
        # An output that could not be read of an event whose inputs differ is taken to differ.
        wrote = found.outputs | (found.inputs & found.blind)
        seq_a, seq_b = a.numbers["seq"], b.numbers["seq"]
        for history, seq, rows, others, other_rows in (
            (self.history_a, seq_a, alignment.rows_a, seq_b, alignment.rows_b),
            (self.history_b, seq_b, alignment.rows_b, seq_a, alignment.rows_a),
        ):
            state = numpy.full(len(seq), DIFFERS, numpy.int8)
            state[rows] = numpy.where(wrote, DIFFERS, MATCHED)
            partner = numpy.full(len(seq), NOBODY, numpy.int64)
            partner[rows] = others[other_rows]
            history.add(Block(a.step, seq, state, partner))

    def _spread(self, scene: Scene) -> None:
        """The first differing event of each phase and scope."""
        spread = self.reading.spread
        room = MOST_SPREAD - len(spread)
        apart = numpy.flatnonzero(scene.alignment.differences.any)
        if room <= 0 or not len(apart):
            return
        table = scene.a.table
        rows = scene.alignment.rows_a[apart]
        scopes, phases = table.texts["scope"], table.texts["phase"]
        _, first = numpy.unique(
            phases.codes[rows].astype(numpy.int64) * len(scopes.values) + scopes.codes[rows], return_index=True
        )
        known = {(row.phase, row.scope) for row in spread}
        for row in rows[numpy.sort(first)].tolist():
            if (phases[row], scopes[row]) in known or room <= 0:
                continue
            room -= 1
            numbers = table.numbers
            spread.append(
                SpreadRow(
                    self.reading.rank,
                    int(numbers["seq"][row]),
                    table.step,
                    int(numbers["microbatch"][row]),
                    phases[row],
                    scopes[row],
                    table.texts["op"][row],
                )
            )

    def _recomputed(self, table: StepTable, arm: str) -> None:
        room = self.limit - len(self.reading.recompute)
        if room > 0 and "recompute" in table.texts["phase"].values:
            self.reading.recompute += recompute_findings(table, self.reading.rank, arm, room)


def _from_batch(table: StepTable) -> StepTable:
    """A step without what came before its first batch; all of it where it has none."""
    kinds = table.texts["kind"]
    if "batch" not in kinds.values:
        return table
    batches = numpy.flatnonzero(kinds.codes == kinds.values.index("batch"))
    return table.take(numpy.arange(int(batches[0]), len(table))) if len(batches) else table


def _event(trace: TraceFile, history: History, table: StepTable, seq: int) -> TraceEvent | None:
    """An event by its number: of this step, of one that was read, or of one that was skipped."""
    _, _, steps = history.look_up(numpy.array([seq]))
    step = int(steps[0])
    if step != table.step:
        if step < 0:
            known = _step_of(trace, seq)
            if known is None:
                return None
            step = known
        table = trace.table(step)
    row = int(numpy.searchsorted(table.numbers["seq"], seq))
    return table.event(row) if row < len(table) and table.numbers["seq"][row] == seq else None


def _step_of(trace: TraceFile, seq: int) -> int | None:
    """The step of an event of a trace that holds all events from 0 on."""
    before = 0
    for entry in trace.index:
        before += entry.events
        if seq < before:
            return entry.step
    return None
