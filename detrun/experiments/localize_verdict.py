"""What a localization found, pass by pass, and the verdict that is made of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from detrun.compare.chance import bound_of_clean_pairs
from detrun.compare.decision import in_order
from detrun.compare.trace_summary import Lead, TraceComparison
from detrun.errors import ExitCode
from detrun.experiments.localize_bytes import EventReading, read_event
from detrun.experiments.localize_cause import causes_of, facts_of, reproduce
from detrun.experiments.localize_culprit import culprit_of
from detrun.experiments.localize_findings import (
    byte_findings,
    coverage_finding,
    descent_finding,
    metrics_finding,
    observer_findings,
    repeats_finding,
    summary_findings,
)
from detrun.experiments.observer_check import ObserverCheck
from detrun.experiments.trace_plan import Window
from detrun.experiments.write_verdict import write_verdict
from detrun.records.jobs import ExperimentFile
from detrun.records.layout import AttemptFolder, ExperimentFolder
from detrun.records.trace_row import EventKey
from detrun.records.verdict import Figure, Finding, FirstDivergence, Verdict, Word

if TYPE_CHECKING:
    from detrun.experiments.localize import Baseline


@dataclass(frozen=True)
class Traced:
    """One traced pass. keeps: it keeps the tensors of named events."""

    place: ExperimentFolder
    verdict: Verdict
    level: int
    window: Window
    comparison: TraceComparison
    observer: ObserverCheck
    keeps: bool = False

    @property
    def attempts(self) -> tuple[AttemptFolder, AttemptFolder]:
        """The two that are held against each other."""
        return held_against(self.place)

    @property
    def broken(self) -> bool:
        """Whether no further pass of this kind can be better: its jobs failed."""
        return bool(self.verdict.of_severity("infrastructure"))

    @property
    def incomplete(self) -> bool:
        """Whether it says nothing: its jobs failed, or a trace is not whole."""
        return self.broken or bool(self.comparison.incomplete)

    def keys(self, most: int) -> list[EventKey]:
        """The events whose bytes are wanted: the lead, what last wrote its input, and what else may be the origin."""
        found: list[EventKey] = []
        lead = self.comparison.lead
        for each in [lead, *self.comparison.others] if lead else []:
            assert each is not None
            for event in (each.event, each.after):
                if event is not None and (key := event.key) not in found:
                    found.append(key)
        return found[:most]


def held_against(place: ExperimentFolder) -> tuple[AttemptFolder, AttemptFolder]:
    """The attempts of a pass that are compared; of arm b the last, which is a resumed one after an interruption."""
    return place.attempt("a", 0), (place.attempts("b") or [place.attempt("b", 0)])[-1]


@dataclass
class Descent:
    """Everything that the passes have shown so far. missed: why the steps asked for cannot show it. settled: the bytes
    of the event that they prove to be the one."""

    folder: ExperimentFolder
    experiment: ExperimentFile
    baseline: Baseline | None = None
    first: FirstDivergence | None = None
    pairs: list[Verdict] = field(default_factory=list)
    traced: list[Traced] = field(default_factory=list)
    bytes: list[EventReading] = field(default_factory=list)
    settled: EventReading | None = None
    settled_by: Traced | None = None
    tries_at_bytes: int = 0
    missed: str = ""

    def look_at_bytes(self, again: Traced, keys: list[EventKey]) -> None:
        """Reads what the last pass kept, first of all of the event that it names itself."""
        self.tries_at_bytes += 1
        a, b = again.attempts
        lead = again.comparison.lead
        own = [lead] if lead is not None else []
        places: list[tuple[int, EventKey]] = []
        for each in [*own, *again.comparison.others]:
            places.append((each.rank, each.event.key))
            if each.after is not None:
                places.append((each.rank, each.after.key))
        places = [place for place in dict.fromkeys(places) if place[1] in keys]
        self.bytes = [read_event(a, b, rank, key) for rank, key in places[:8]]
        if lead is None:
            return
        for reading in self.bytes:
            if reading.key == lead.event.key and reading.rank == lead.rank and _settles(lead, reading):
                self.settled, self.settled_by = reading, again
                return

    @property
    def may_settle(self) -> bool:
        """Whether both arms have the event whose bytes are wanted."""
        lead = self.traced[-1].comparison.lead if self.traced else None
        return lead is None or (lead.a is not None and lead.b is not None)

    @property
    def decisive(self) -> Traced | None:
        """The pass whose lead the verdict names."""
        if self.settled_by is not None:
            return self.settled_by
        found = [traced for traced in self.traced if traced.comparison.lead is not None]
        return found[-1] if found else None


def _settles(lead: Lead, reading: EventReading) -> bool:
    """Whether the bytes say what the digests said."""
    if lead.role == "origin":
        return reading.is_origin
    return bool(reading.differing("input") or reading.differing("output")) and reading.missing is None


def conclude(descent: Descent, *, write: bool = True) -> Verdict:
    """The verdict on a localization; written last, by rename, with its report."""
    if descent.baseline is None:
        verdict = _nothing_to_localize(descent)
    else:
        verdict = _nothing_traced(descent, descent.baseline) if descent.missed else _localized(descent)
    return write_verdict(descent.folder, descent.experiment, verdict) if write else verdict


def _nothing_to_localize(descent: Descent) -> Verdict:
    last = descent.pairs[-1]
    clean = sum(pair.verdict == "identical" for pair in descent.pairs)
    what = f"{clean} pair{'s' if clean > 1 else ''} of the recipe came out identical: there is nothing to localize"
    note = Finding(kind="levels", severity="info", what=what, evidence={"pairs": clean})
    update: dict[str, Any] = {"id": descent.experiment.id, "experiment": "localize"}
    if last.verdict == "identical":
        bound = Figure(value=bound_of_clean_pairs(clean), unit="probability (95% confidence)", n=clean)
        pairs = Figure(value=clean, unit="pairs", n=clean)
        update["findings"] = [note, *last.findings]
        update["figures"] = {**last.figures, "pairs": pairs, "divergence_chance_bound": bound}
    return last.model_copy(update=update)


def _nothing_traced(descent: Descent, baseline: Baseline) -> Verdict:
    """The verdict where a trace of the steps asked for could show nothing."""
    note = Finding(kind="window", severity="not-verified", what=descent.missed)
    return baseline.verdict.model_copy(
        update={
            "id": descent.experiment.id,
            "experiment": "localize",
            "verdict": "not-verified",
            "exit_code": int(ExitCode.NOT_VERIFIED),
            "culprit": None,
            "findings": [note, *baseline.verdict.findings],
            "not_verified": [descent.missed],
        }
    )


def _localized(descent: Descent) -> Verdict:
    assert descent.baseline is not None
    assert descent.first is not None
    base = descent.baseline.verdict
    findings: list[Finding] = [metrics_finding(base, descent.first, descent.baseline.folder.id)]
    findings += [descent_finding(traced) for traced in descent.traced]
    findings += observer_findings(descent.traced, descent.first.step)
    findings += repeats_finding(descent.traced)
    culprit: dict[str, Any] | None = None
    decisive = descent.decisive
    if decisive is None and descent.baseline.resumed and base.culprit and not descent.traced[-1].incomplete:
        culprit = {**base.culprit, "role": "outside-the-trace"}
        findings.append(_unread(descent))
    elif decisive is None:
        findings.append(_why_nothing(descent))
    else:
        lead = decisive.comparison.lead
        assert lead is not None
        reading = descent.settled or _bytes_of(descent, lead)
        facts = facts_of(descent, decisive, lead, reading)
        findings += byte_findings(lead, descent.bytes, descent.settled, descent.tries_at_bytes)
        if reading is not None and reading.missing is None and lead.role == "origin":
            reproduction = reproduce(descent.folder, reading, decisive.attempts, lead.event.group)
            if reproduction.outcome is not None:
                facts = replace(facts, distinct=reproduction.outcome.distinct, runs=reproduction.outcome.runs)
            findings.append(reproduction.finding())
        causes = causes_of(facts)
        findings += causes
        culprit = culprit_of(lead, decisive.comparison, reading, causes, decisive.attempts[0])
        if descent.baseline.resumed and follows_the_restore(lead):
            culprit |= _lost(base.culprit or {})
        findings += summary_findings(decisive.comparison, lead, descent.experiment.ranks)
    findings.append(coverage_finding(descent.traced, descent.experiment))
    findings = in_order(findings)
    reasons = [f.what for f in findings if f.severity in ("infrastructure", "not-verified")]
    word: Word = "not-verified" if reasons else "diverged"
    code = ExitCode.NOT_VERIFIED if reasons else ExitCode.DIVERGED
    if any(finding.severity == "infrastructure" for finding in findings):
        code = ExitCode.INFRASTRUCTURE
    return Verdict(
        id=descent.experiment.id,
        experiment="localize",
        recipe=descent.experiment.recipe_name,
        verdict=word,
        exit_code=int(code),
        first_divergence=descent.first,
        culprit=culprit,
        findings=findings,
        not_verified=reasons,
        arms=base.arms,
        figures={},
    )


def follows_the_restore(lead: Lead) -> bool:
    """Whether what differs was there before the first batch: nothing in the window wrote it, or the restore itself."""
    restored = lead.after is not None and lead.after.phase == "between"
    return lead.role == "outside-the-trace" or (lead.role == "uncaptured-producer" and restored)


def _lost(blamed: dict[str, Any]) -> dict[str, Any]:
    """What the resume check knows better than a trace that begins after the restore: the piece that came back wrong."""
    kept = ("kind", "names", "component", "boundary", "catalog", "fix")
    found = {name: blamed[name] for name in kept if blamed.get(name) is not None}
    if not found:
        return {}
    why = "it reads what came back from the checkpoint otherwise than the uninterrupted run had it"
    return {"role": "outside-the-trace", "why": why, **found}


def _unread(descent: Descent) -> Finding:
    """A resume whose restored state differs, and no operation that met it."""
    begin, end = descent.traced[-1].window.steps
    what = f"no traced operation of steps {begin} to {end} read what came back wrong; the resume check names it"
    return Finding(kind="outside-the-capture", severity="info", what=what, evidence={"steps": [begin, end]})


def _bytes_of(descent: Descent, lead: Lead) -> EventReading | None:
    """What was kept of the lead's event, where it settled nothing."""
    return next((r for r in descent.bytes if (r.rank, r.key) == (lead.rank, lead.event.key)), None)


def _why_nothing(descent: Descent) -> Finding:
    """Why no operation is named."""
    last = descent.traced[-1]
    where: dict[str, Any] = {"path": f"passes/{last.place.path.name}"}
    broken = last.verdict.of_severity("infrastructure")
    if broken:
        what = f"pass {last.place.path.name}: {broken[0].what}"
        inside = broken[0].where.get("path")
        path = {"path": f"{where['path']}/{inside}"} if inside else {}
        return Finding(kind="job", severity="infrastructure", where={**where, **broken[0].where, **path}, what=what)
    if last.window.scopes and not last.comparison.events and last.verdict.first_divergence is not None:
        asked = " or ".join(last.window.scopes)
        what = f"no module that ran is called {asked}: --scope takes a module's name, or a pattern"
        return Finding(kind="scope", severity="not-verified", where=where, what=what)
    if last.comparison.incomplete:
        return Finding(kind="trace", severity="not-verified", where=where, what=last.comparison.incomplete[0])
    if last.verdict.first_divergence is None:
        tries = sum(traced.verdict.first_divergence is None for traced in descent.traced)
        what = f"{tries} traced pass{'es' if tries > 1 else ''} came out identical; --repeat K tries more often"
        evidence = {"tries": tries, "widen": "--repeat 10"}
        return Finding(kind="not-repeated", severity="not-verified", where=where, what=what, evidence=evidence)
    begin, end = last.window.steps
    what = last.comparison.hint or f"every traced event of steps {begin} to {end} is equal"
    evidence = {"widen": f"--steps {max(1, begin - 2)}-{end}"}
    return Finding(kind="outside-the-capture", severity="not-verified", where=where, what=what, evidence=evidence)
