"""What an experiment that only traces has recorded, and whether that is all it was asked for."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from detrun.compare.decision import arm_summary, in_order, remark_findings, word_of
from detrun.compare.evidence import Evidence
from detrun.compare.folding import ranks_in_words
from detrun.compare.missing import job_findings
from detrun.errors import RecordError
from detrun.records.files import read_object
from detrun.records.jobs import ExperimentFile
from detrun.records.layout import AttemptFolder, ExperimentFolder
from detrun.records.trace_reader import TraceFile, open_trace
from detrun.records.verdict import Figure, Finding, Verdict


def judge_trace(place: ExperimentFolder, experiment: ExperimentFile, evidence: Evidence) -> Verdict:
    """Whether what was asked for was recorded. `identical` stands for done: there is nothing to compare."""
    findings: list[Finding] = []
    tally = _Tally()
    for arm in evidence.arms:
        findings += job_findings(arm, evidence)
        findings += remark_findings(arm, experiment.ranks)
        findings += tally.read(place.attempt(arm.id, arm.attempt), experiment)
    findings = in_order([*findings, tally.coverage()])
    word, code = word_of(findings)
    return Verdict(
        id=experiment.id,
        experiment=experiment.experiment,
        recipe=experiment.recipe_name,
        verdict=word,
        exit_code=int(code),
        findings=findings,
        not_verified=[f.what for f in findings if f.severity in ("infrastructure", "not-verified")],
        arms=[arm_summary(arm, evidence) for arm in evidence.arms],
        figures={
            "trace_events": Figure(value=tally.events, unit="events", n=tally.traces),
            "trace_bytes": Figure(value=tally.bytes, unit="bytes", n=tally.traces),
        },
    )


@dataclass
class _Tally:
    """What the traces of all arms and ranks hold together."""

    traces: int = 0
    events: int = 0
    bytes: int = 0
    level: int | None = None
    steps: list[int] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)
    not_captured: list[str] = field(default_factory=list)
    opaque: dict[str, int] = field(default_factory=dict)

    def read(self, attempt: AttemptFolder, experiment: ExperimentFile) -> list[Finding]:
        """Takes in the traces of one arm; what is missing of them."""
        asked = read_settings(attempt)
        wanted = range(experiment.ranks) if asked.get("ranks") is None else asked["ranks"]
        broken: dict[str, list[int]] = {}
        for rank in wanted:
            try:
                trace = open_trace(attempt, rank)
            except RecordError as error:
                broken.setdefault(f"its trace {error.what}", []).append(rank)
                continue
            self._add(trace, attempt, rank)
            whole = trace.end is not None and trace.end.complete
            if trace.torn or not whole:
                why = trace.torn or (trace.end.reason if trace.end else None) or "the trace has no end"
                broken.setdefault(f"its trace is incomplete: {why}", []).append(rank)
            elif (step := _first_lacking(trace)) is not None:
                why = f"the run ended before it{', or nothing ran in --scope' if asked.get('scopes') else ''}"
                broken.setdefault(f"its trace has no step {step}: {why}", []).append(rank)
        findings = []
        for why, ranks in broken.items():
            what = f"arm {attempt.arm}, {ranks_in_words(ranks, experiment.ranks)}: {why}"
            where: dict[str, Any] = {"arm": attempt.arm, "ranks": ranks}
            findings.append(Finding(kind="trace", severity="not-verified", where=where, what=what))
        return findings

    def _add(self, trace: TraceFile, attempt: AttemptFolder, rank: int) -> None:
        self.traces += 1
        self.level = trace.level
        self.ranks.add(rank)
        self.events += sum(step.events for step in trace.index)
        self.steps = sorted({*self.steps, *(step.step for step in trace.index)})
        self.bytes += sum(path.stat().st_size for path in (attempt.trace(rank), attempt.trace_index(rank)))
        if trace.end is not None:
            coverage = trace.end.coverage
            self.not_captured += [text for text in coverage.get("not_captured", []) if text not in self.not_captured]
            for name, count in coverage.get("opaque", {}).items():
                self.opaque[name] = self.opaque.get(name, 0) + count

    def coverage(self) -> Finding:
        evidence = {
            "level": self.level,
            "steps": [self.steps[0], self.steps[-1]] if self.steps else [],
            "ranks": sorted(self.ranks),
            "not_captured": self.not_captured,
            "opaque": self.opaque,
        }
        ranks = f"{len(self.ranks)} rank{'' if len(self.ranks) == 1 else 's'}"
        what = f"{self.events:,} events of {ranks}"
        return Finding(kind="coverage", severity="info", what=what, evidence=evidence)


def _first_lacking(trace: TraceFile) -> int | None:
    """The first step that was asked for and is not in a trace that was closed."""
    if trace.steps_asked is None:
        return None
    first, last = trace.steps_asked
    there = {entry.step for entry in trace.index}
    return next((step for step in range(first, last + 1) if step not in there), None)


def read_settings(attempt: AttemptFolder) -> dict[str, Any]:
    """What an attempt's ranks were asked to trace, from what they were launched with."""
    try:
        env = read_object(attempt.path / "launch.json").get("env")
        asked = json.loads(env["DETRUN_TRACE"]) if isinstance(env, dict) and "DETRUN_TRACE" in env else {}
    except (RecordError, ValueError, TypeError):
        return {}
    return asked if isinstance(asked, dict) else {}
