"""Holds traced arms against the untraced ones: did looking change the run?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from detrun.compare.streams import PairTally, compare_rank
from detrun.records.layout import AttemptFolder
from detrun.records.metrics_line import LineReader, StepRecord
from detrun.records.metrics_reader import RankMetrics, read_rank_metrics


@dataclass(frozen=True)
class Parting:
    """Where a traced arm leaves the untraced one."""

    arm: str
    step: int
    stream: str


@dataclass
class ObserverCheck:
    """compared: steps that a traced arm and its untraced one both recorded, over ranks. partings: the first difference
    of each arm that has one."""

    compared: int = 0
    partings: list[Parting] = field(default_factory=list)

    def changed_before(self, step: int) -> list[Parting]:
        """Differences in steps in which the untraced arms were equal: there the trace is what differs."""
        return [parting for parting in self.partings if parting.step < step]

    def repeats(self, arm: str) -> bool:
        """Whether an arm came out the same, to the last bit, when it was traced."""
        return self.compared > 0 and all(parting.arm != arm for parting in self.partings)


def check_observer(
    untraced: Sequence[AttemptFolder], traced: Sequence[AttemptFolder], ranks: int, last: int
) -> ObserverCheck:
    """Holds each traced attempt against the untraced one beside it, in steps up to `last`.

    The arms are named `a`, `b` … in the order given, whatever the attempts are called.
    """
    check = ObserverCheck()
    reader = LineReader()
    for position, (before, now) in enumerate(zip(untraced, traced, strict=True)):
        arm = chr(ord("a") + position)
        tally = PairTally(arm, f"{arm} traced")
        for rank in range(ranks):
            old = _up_to(read_rank_metrics(before.metrics(rank), None, reader), last)
            new = _up_to(read_rank_metrics(now.metrics(rank), None, reader), last)
            _leave_out_unreported(old, new, last)
            compare_rank(tally, rank, old, new)
        check.compared += sum(tally.compared.values())
        if tally.streams:
            first = min(tally.streams.values(), key=lambda found: (found.first_step, found.stream.causal))
            check.partings.append(Parting(arm, first.first_step, first.stream.label))
    return check


def _up_to(records: RankMetrics, last: int) -> RankMetrics:
    """The records of steps up to `last`: traced arms are ended there."""
    return RankMetrics({step: record for step, record in records.steps.items() if step <= last})


def _leave_out_unreported(old: RankMetrics, new: RankMetrics, last: int) -> None:
    """Takes out of step `last` the metrics that only one of the runs came to report: a traced arm is ended when the
    step is complete, and many a program reports its metrics after that."""
    before, now = old.steps.get(last), new.steps.get(last)
    if before is None or now is None:
        return
    a, b = before.contents.metrics, now.contents.metrics
    both = {name for name in a.keys() & b.keys() if a[name].get("source") == b[name].get("source")}
    for records, record in ((old, before), (new, now)):
        told = {name: metric for name, metric in record.contents.metrics.items() if name in both}
        records.steps[last] = StepRecord(
            last,
            record.microbatches,
            record.skipped,
            contents=replace(record.contents, metrics=told),
            first_microbatch=record.first_microbatch,
        )
