"""Whether the records of a resume check are all there: every attempt and control arm that was planned, each with the
end that its job speaks of. What is missing would otherwise be equal by omission."""

from __future__ import annotations

from typing import Any

from detrun.compare.folding import ranks_in_words
from detrun.compare.resume_evidence import AttemptEvidence, ResumeEvidence
from detrun.records.jobs import ExperimentFile
from detrun.records.verdict import Finding


def was_interrupted(attempt: AttemptEvidence, planned: int) -> bool:
    """Whether its end is excused: one of the `planned` interruptions, and its job.json tells of it."""
    job = attempt.arm.job
    if job is None or job.state != "interrupted" or job.interruption is None:
        return False
    return attempt.number < max(planned, 1)


def lost_records(experiment: ExperimentFile, evidence: ResumeEvidence) -> list[Finding]:
    """Attempts, control arms and steps of interrupted attempts of which there is no record. Pure."""
    return [*_attempts(experiment, evidence), *_controls(experiment, evidence), *_ends(evidence)]


def _attempts(experiment: ExperimentFile, evidence: ResumeEvidence) -> list[Finding]:
    found = {attempt.number for attempt in evidence.attempts}
    planned = set(range(len(experiment.interrupts) + 1)) if experiment.interrupts else set(range(max(found, default=0)))
    findings = []
    for arm in [plan.id for plan in experiment.arms if plan.role == "interrupted"] or ["b"]:
        mine = {attempt.number for attempt in evidence.attempts if attempt.arm.id == arm}
        if lost := sorted(planned - mine):
            which = ", ".join(map(str, lost))
            what = f"arm {arm}: attempt{'s' if len(lost) > 1 else ''} {which} left no record at all"
            findings.append(_finding("attempt-missing", {"arm": arm, "attempts": lost}, what))
        if experiment.interrupts and (extra := sorted(mine - planned)):
            which = ", ".join(map(str, extra))
            what = f"arm {arm}: there are records of attempt{'s' if len(extra) > 1 else ''} {which}, never planned"
            findings.append(_finding("attempt-extra", {"arm": arm, "attempts": extra}, what))
    return findings


def _controls(experiment: ExperimentFile, evidence: ResumeEvidence) -> list[Finding]:
    there = {control.attempt.arm.id for control in evidence.controls}
    return [
        _finding("control-missing", {"arm": plan.id}, f"arm {plan.id} ({plan.purpose}) left no record at all")
        for plan in experiment.arms
        if plan.role == "control" and plan.id not in there
    ]


def _ends(evidence: ResumeEvidence) -> list[Finding]:
    """A rank that was interrupted after a step has the steps before it; the last ones may be lost with the process."""
    findings = []
    for attempt in evidence.attempts:
        arm = attempt.arm
        if arm.job is None or arm.job.state != "interrupted":
            continue
        if evidence.source != "recorder":
            continue  # what a writer had not flushed is lost; which steps that leaves open is found by their union
        where: dict[str, Any] = {"arm": arm.id, "attempt": attempt.number}
        how = arm.job.interruption
        if how is None:
            what = f"arm {arm.id}, attempt {attempt.number}: its job.json does not tell how it was interrupted"
            findings.append(_finding("interruption", where, what))
            continue
        if attempt.began not in (None, attempt.told):
            continue  # its steps are counted from elsewhere, of which there is a finding
        hit = [survey for survey in arm.surveys if survey.rank in how.ranks and not survey.unreadable]
        short = [survey for survey in hit if survey.last + 2 < (how.step or 0)]
        if short:
            on = sorted(survey.rank for survey in short)
            last = min(survey.last for survey in short)
            what = (
                f"arm {arm.id}, attempt {attempt.number}, {ranks_in_words(on, evidence.asked.ranks)}: "
                f"metrics end at step {last}, and it was interrupted after step {how.step}"
            )
            findings.append(_finding("short", {**where, "ranks": on}, what))
    return findings


def _finding(kind: str, where: dict[str, Any], what: str) -> Finding:
    return Finding(kind=kind, severity="not-verified", where=where, what=what)
