"""From the evidence of a resume check to its verdict.

The two runs are first held against each other where neither was restored: if they part there, nothing is said about
resuming. Then state right after each restore, then every step from there on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from detrun.compare.attempts import Position
from detrun.compare.completeness import counts_microbatches, gaps_of_arm, gaps_within
from detrun.compare.decision import (
    cost_figures,
    coverage_findings,
    in_order,
    remark_findings,
    replica_findings,
    word_of,
)
from detrun.compare.divergence import divergence_findings, first_divergence, metric_difference, streams_in_order
from detrun.compare.evidence import ArmEvidence, Evidence
from detrun.compare.folding import ranks_in_words
from detrun.compare.missing import environment_findings, gap_findings, job_findings, placement_findings
from detrun.compare.restore_culprit import culprit_of
from detrun.compare.restored import state_findings, table_finding
from detrun.compare.resume_controls import control_findings
from detrun.compare.resume_evidence import AttemptEvidence, ResumeEvidence
from detrun.compare.resume_records import lost_records, was_interrupted
from detrun.compare.streams import BATCH, METRIC, Gap
from detrun.records.jobs import ExperimentFile
from detrun.records.verdict import (
    ArmSummary,
    AttemptSummary,
    Figure,
    Finding,
    FirstDivergence,
    StateDifference,
    Verdict,
)


def decide_resume(experiment: ExperimentFile, evidence: ResumeEvidence) -> Verdict:
    """The verdict on a resume check. Pure."""
    asked = evidence.asked
    reference = evidence.reference
    optimizer_steps = counts_microbatches(reference.surveys, {reference.id: reference.end}, asked)
    findings = _of_reference(evidence, optimizer_steps)
    repeatable = True
    for attempt in evidence.attempts:
        if attempt.number == 0:
            parted = _parted_before_the_restore(attempt)
            repeatable = not parted
            findings += parted
    diverged: AttemptEvidence | None = None
    for attempt in evidence.attempts:
        findings += _of_attempt(attempt, evidence, optimizer_steps, len(experiment.interrupts))
        if attempt.number == 0 or diverged is not None:
            continue
        found = _divergence(attempt, asked.ranks)
        if not repeatable:
            found = [finding.model_copy(update={"severity": "info"}) for finding in found]
        findings += found
        if any(finding.severity == "divergence" for finding in found):
            diverged = attempt
    findings += _never_resumed(evidence)
    findings += lost_records(experiment, evidence)
    findings += control_findings(evidence, resumes_exactly=diverged is None)
    findings += [
        Finding(kind="checkpoint", severity="warning" if weight == "warns" else "info", what=what)
        for weight, what in evidence.checkpoints
    ]
    arms = [reference, *(attempt.arm for attempt in evidence.attempts)]
    findings += evidence.notes
    findings += placement_findings(_latest(arms))
    findings += coverage_findings(_as_pairs(evidence), optimizer_steps)
    findings = in_order(findings)
    word, code = word_of(findings)
    window = _window(asked.steps, optimizer_steps)
    culprit = culprit_of(diverged) if diverged is not None and word == "diverged" else None
    if culprit is not None and window:
        culprit["counted_as"] = culprit["step"] * window + (culprit["microbatch"] or 0)
    return Verdict(
        id=experiment.id,
        experiment=experiment.experiment,
        recipe=experiment.recipe_name,
        verdict=word,
        exit_code=int(code),
        first_divergence=_first(diverged, window) if diverged is not None and word == "diverged" else None,
        culprit=culprit,
        findings=findings,
        not_verified=[f.what for f in findings if f.severity in ("infrastructure", "not-verified")],
        arms=_summaries(experiment, evidence),
        figures=_figures(evidence),
    )


def _of_reference(evidence: ResumeEvidence, optimizer_steps: int | None) -> list[Finding]:
    reference, asked = evidence.reference, evidence.asked
    gaps = [*reference.gaps, *gaps_of_arm(reference.surveys, asked, reference.end, reference.stages, optimizer_steps)]
    findings = job_findings(reference, _as_evidence(evidence))
    if reference.job is not None and reference.job.state == "interrupted":
        what = f"arm {reference.id}: its job.json speaks of an interruption, and the reference has none"
        findings.append(Finding(kind="reference", severity="not-verified", where={"arm": reference.id}, what=what))
    findings += replica_findings(reference)
    findings += remark_findings(reference, asked.ranks)
    findings += gap_findings(gaps, [reference.id], asked.ranks)
    return findings


def _parted_before_the_restore(attempt: AttemptEvidence) -> list[Finding]:
    """What says that the program does not even repeat itself, so that a difference later says nothing of resuming."""
    pair = attempt.pair
    ordered = streams_in_order(pair)
    if pair.initial_differences:
        what, step = f"{pair.initial_differences[0].component} before the first step", 1
    elif ordered:
        what, step = f"{ordered[0].stream.label} at step {ordered[0].first_step}", ordered[0].first_step
    else:
        return []
    text = f"the two runs differ before anything was restored ({what}): the program does not repeat itself"
    details = {"hint": "pair"}
    where: dict[str, Any] = {"arms": pair.arms, "step": step}
    return [Finding(kind="not-repeatable", severity="not-verified", where=where, what=text, evidence=details)]


def _of_attempt(
    attempt: AttemptEvidence, evidence: ResumeEvidence, optimizer_steps: int | None, planned: int
) -> list[Finding]:
    """Everything about an attempt but what differs after its restore. planned: interruptions."""
    arm, asked = attempt.arm, evidence.asked
    label = f"{arm.id}, attempt {attempt.number}" if len(evidence.attempts) > 1 else arm.id
    interrupted = was_interrupted(attempt, planned)
    cancelled = arm.job is not None and arm.job.state == "cancelled"
    findings: list[Finding] = []
    from_outside = cancelled and arm.job is not None and (arm.job.reason or "").startswith("the job was cancelled")
    if from_outside and all(survey.unreadable for survey in arm.surveys):
        return job_findings(arm, _as_evidence(evidence))
    if cancelled and arm.job is not None and not from_outside:
        what = f"arm {label}: {arm.job.reason or 'it was not started'}"
        kind = "not-interrupted" if "never interrupted" in what else "not-resumed"
        return [Finding(kind=kind, severity="not-verified", where={"arm": arm.id}, what=what)]
    if not interrupted:
        findings += job_findings(arm, _as_evidence(evidence))
    gaps: list[Gap] = list(arm.gaps)
    if interrupted:
        gaps += gaps_within(arm.surveys, arm.stages)
    else:
        gaps += gaps_of_arm(arm.surveys, asked, arm.end, arm.stages, optimizer_steps)
    required = {(gap.rank, gap.name) for gap in gaps}
    gaps += [gap for gap in attempt.pair.streams.gaps if gap.arm is None or (gap.rank, gap.name) not in required]
    findings += gap_findings(gaps, [evidence.reference.id, arm.id], asked.ranks)
    findings += remark_findings(arm, asked.ranks)
    findings += environment_findings(attempt.pair, asked.ranks)
    if not attempt.pair.streams.compared and not gaps:
        what = f"arm {label}: no step was recorded that the reference has too"
        findings.append(Finding(kind="nothing-compared", severity="not-verified", where={"arm": arm.id}, what=what))
    if attempt.number:
        elsewhere = _where_it_came_back(attempt, asked.ranks)
        findings += elsewhere
        # A run that came back elsewhere has no counterpart there, which is no reason of its own.
        if not any(finding.kind == "resumed-elsewhere" for finding in elsewhere):
            findings += _missing_state(attempt, asked.ranks)
        findings += _overlap(attempt)
        findings.append(table_finding(attempt))
    return findings


def _where_it_came_back(attempt: AttemptEvidence, ranks: int) -> list[Finding]:
    told = attempt.told
    if told is None:
        return []
    places = {position for position in attempt.came_from.values() if position is not None}
    where: dict[str, Any] = {"arm": attempt.arm.id, "attempt": attempt.number, "step": told.step}
    if len(places) > 1:
        shown = "; ".join(
            f"{position.words} on {ranks_in_words([r for r, p in attempt.came_from.items() if p == position], ranks)}"
            for position in sorted(places, key=lambda p: (p.step, p.microbatch))
        )
        what = f"the ranks came back from different checkpoints: {shown}"
        return [Finding(kind="resumed-elsewhere", severity="not-verified", where=where, what=what)]
    began = attempt.began
    if began is None or began == told:
        return []
    if not began.step:
        what = f"it did not resume: told to go on from {told.words}, it began again at step 0, silently"
    else:
        what = f"it came back from {began.words}, not from {told.words} as it was told"
    evidence = {"told": told.step, "came_from": began.step}
    if began == Position(attempt.named or 0) and began.step:
        what = f"the checkpoint of {began.words} was written when {told.words} was complete: in the background"
        return [Finding(kind="written-late", severity="info", where=where, what=what, evidence=evidence)]
    return [Finding(kind="resumed-elsewhere", severity="not-verified", where=where, what=what, evidence=evidence)]


def _missing_state(attempt: AttemptEvidence, ranks: int) -> list[Finding]:
    if attempt.restored is None:
        return []
    return [
        Finding(
            kind="state",
            severity="not-verified",
            where={"arm": attempt.arm.id, "ranks": sorted(on)},
            what=f"{why} ({ranks_in_words(on, ranks)})",
        )
        for why, on in attempt.restored.missing.items()
    ]


def _overlap(attempt: AttemptEvidence) -> list[Finding]:
    """The steps that the attempt before had run too, held against this one's."""
    overlap = attempt.overlap
    if overlap is None or not overlap.compared:
        return []
    steps = sorted(overlap.compared)
    count = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    parted = min((tally.first_step for tally in overlap.streams.values()), default=None)
    said = "the same bits" if parted is None else f"parted from step {parted} on"
    what = f"{count}, run by attempts {attempt.number - 1} and {attempt.number}: {said}"
    details = {"steps": steps, "parted": parted}
    return [Finding(kind="overlap", severity="info", where={"arm": attempt.arm.id}, what=what, evidence=details)]


def _divergence(attempt: AttemptEvidence, ranks: int) -> list[Finding]:
    """State that was not restored, then the steps that differ."""
    return [*state_findings(attempt, ranks), *divergence_findings(attempt.pair, ranks)]


def _never_resumed(evidence: ResumeEvidence) -> list[Finding]:
    if any(attempt.number for attempt in evidence.attempts):
        return []
    what = "no attempt was resumed, so that nothing is known of resuming"
    return [Finding(kind="not-resumed", severity="not-verified", what=what)]


def _window(steps: int, optimizer_steps: int | None) -> int | None:
    """Micro-batches a step, where the recipe counts those and every step has as many."""
    return steps // optimizer_steps if optimizer_steps and steps % optimizer_steps == 0 else None


def _counted_as(attempt: AttemptEvidence, step: int, window: int | None) -> int | None:
    """The micro-batch of the whole run with which a step parts: the first whose loss differs, else the last one."""
    if window is None:
        return None
    names = [t.stream.name for t in attempt.pair.streams.streams.values() if t.first_step == step]
    within = [int(name[name.index("[") + 1 : -1]) for name in names if name.endswith("]")]
    return (step - 1) * window + min([part + 1 for part in within if part < window], default=window)


def _first(attempt: AttemptEvidence, window: int | None) -> FirstDivergence:
    """The first step with another metric or batch; else the first with another digest; else the restore itself."""
    restored = attempt.restored
    assert restored is not None
    state = [
        StateDifference(
            component=difference.component,
            name=difference.name,
            rank=difference.rank,
            a=_shown(difference.a),
            b=_shown(difference.b),
            differing_elements=difference.differing,
            ulp=difference.ulp,
        )
        for difference in restored.differences[:100]
    ]
    ordered = streams_in_order(attempt.pair)
    visible = [tally for tally in ordered if tally.stream.kind in (METRIC, BATCH)] or ordered
    if not visible:
        return FirstDivergence(
            step=restored.position.step + 1,
            counted_as=restored.position.step * window + restored.position.microbatch + 1 if window else None,
            boundary="begin",
            stream=restored.differences[0].component,
            ranks=sorted({difference.rank for difference in restored.differences}),
            arms=attempt.pair.arms,
            state=state,
        )
    first = first_divergence(attempt.pair)
    chosen = visible[0]
    return first.model_copy(
        update={
            "step": chosen.first_step,
            "counted_as": _counted_as(attempt, chosen.first_step, window),
            "boundary": "end",
            "stream": chosen.stream.label,
            "ranks": sorted(chosen.ranks),
            "metrics": {t.stream.name: metric_difference(t) for t in ordered if t.stream.kind == METRIC},
            "state": state or first.state,
        }
    )


def _shown(row: Any) -> str:
    if row is None:
        return "(missing)"
    return str(row.digest or row.value or "(absent)")


def _latest(arms: Sequence[ArmEvidence]) -> list[ArmEvidence]:
    return list({arm.id: arm for arm in arms}.values())


def _as_evidence(evidence: ResumeEvidence) -> Evidence:
    return Evidence(evidence.asked, [evidence.reference, *(attempt.arm for attempt in evidence.attempts)], [])


def _as_pairs(evidence: ResumeEvidence) -> Evidence:
    """As if each attempt were an arm: what was held against the reference, for the claim of an `identical`."""
    attempts = [attempt for attempt in evidence.attempts if attempt.number]
    arms = [evidence.reference, *(attempt.arm for attempt in attempts)]
    pairs = [attempt.pair for attempt in attempts]
    return Evidence(evidence.asked, arms, pairs, source=evidence.source, resolution=evidence.resolution)


def _summaries(experiment: ExperimentFile, evidence: ResumeEvidence) -> list[ArmSummary]:
    found: dict[str, list[AttemptSummary]] = {}
    everything = [evidence.reference, *(a.arm for a in evidence.attempts), *(c.attempt.arm for c in evidence.controls)]
    for arm in everything:
        read = [survey for survey in arm.surveys if not survey.unreadable]
        job = arm.job
        firsts = [survey.first for survey in read]
        found.setdefault(arm.id, []).append(
            AttemptSummary(
                n=arm.attempt,
                jobs=job.jobs if job else [],
                nodes=arm.nodes,
                first_step=min(firsts, default=None),
                last_step=(job.interruption.step if job and job.interruption else None)
                or min((survey.last for survey in read), default=None),
                ended=job.ended if job else None,
                exit_code=job.exit_code if job else None,
                remark=_how_it_ended(arm),
                interruption=job.interruption.model_dump() if job and job.interruption else None,
                resumed_from=job.resumed_from.model_dump() if job and job.resumed_from else None,
            )
        )
    return [ArmSummary(id=plan.id, role=plan.role, attempts=found.get(plan.id, [])) for plan in experiment.arms]


def _how_it_ended(arm: ArmEvidence) -> str | None:
    job = arm.job
    if job is None:
        return "job.json is missing or unreadable"
    if job.state == "interrupted" and job.interruption is not None:
        return f"interrupted by plan ({job.interruption.kind}) after step {job.interruption.step}"
    return job.remark or (job.reason if job.state != "done" else None)


def _figures(evidence: ResumeEvidence) -> dict[str, Figure]:
    resumed = [attempt for attempt in evidence.attempts if attempt.number]
    rank_steps = sum(sum(attempt.pair.streams.compared.values()) for attempt in resumed)
    figures = {
        "restores": Figure(value=len(resumed), unit="restores", n=len(resumed)),
        "rank_steps_compared": Figure(value=rank_steps, unit="rank-steps", n=len(resumed)),
    }
    boundaries = [boundary for a in resumed for boundary in (a.saved, a.restored) if boundary is not None]
    seconds = [second for boundary in boundaries for second in boundary.cpu_seconds]
    if seconds:
        figures["state_capture_seconds"] = Figure(
            value=round(sum(seconds) / len(seconds), 4), unit="CPU seconds a capture and rank", n=len(seconds)
        )
    arms = [evidence.reference, *(attempt.arm for attempt in evidence.attempts)]
    figures.update(cost_figures(arms))
    return figures
