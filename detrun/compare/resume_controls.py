"""What the control arms of a resume check say: does saving change a run, and does the check see what is broken on
purpose?"""

from __future__ import annotations

from typing import Any

from detrun.compare.completeness import gaps_of_arm
from detrun.compare.divergence import streams_in_order
from detrun.compare.evidence import Evidence
from detrun.compare.missing import gap_findings, job_findings
from detrun.compare.restored import state_findings
from detrun.compare.resume_evidence import AttemptEvidence, ControlEvidence, ResumeEvidence
from detrun.records.files import one_line
from detrun.records.verdict import Finding

OBSERVER = "observer"
SELF_TEST = "self-test:"

_BROKEN = {
    "rng": "a random number stream that starts anew",
    "batch": "a batch that is skipped",
    "moment": "an optimizer moment that is zero",
    "parameter": "a parameter that is one ULP off",
    "scheduler": "a scheduler that is one step behind",
}


def control_findings(evidence: ResumeEvidence, *, resumes_exactly: bool = True) -> list[Finding]:
    """The observer's answer, then one finding on the self-test over all its arms, which shows something only where a
    run that nothing was broken in resumes exactly."""
    findings: list[Finding] = []
    for control in evidence.controls:
        if control.purpose == OBSERVER:
            findings += _observer(control.attempt, evidence)
    tests = [control for control in evidence.controls if control.purpose.startswith(SELF_TEST)]
    if tests and not resumes_exactly:
        what = "self-test: shows nothing, since a resume parts even where nothing was broken on purpose"
        findings.append(Finding(kind="self-test", severity="info", what=what))
    elif tests:
        findings += _self_test(tests, evidence)
    return findings


def _observer(attempt: AttemptEvidence, evidence: ResumeEvidence) -> list[Finding]:
    arm, asked = attempt.arm, evidence.asked
    findings = job_findings(arm, Evidence(asked, [arm], []))
    gaps = [*arm.gaps, *gaps_of_arm(arm.surveys, asked, arm.end, arm.stages), *attempt.pair.streams.gaps]
    findings += gap_findings(gaps, [evidence.reference.id, arm.id], asked.ranks)
    ordered = streams_in_order(attempt.pair)
    where: dict[str, Any] = {"arms": attempt.pair.arms}
    if ordered:
        first = ordered[0]
        other = evidence.attempts[0].pair if evidence.attempts else None
        repeats = other is not None and first.first_step in other.streams.compared and not other.diverged
        why = "saving changes the run" if repeats else "saving changes the run, or it does not repeat itself"
        parted = f"at step {first.first_step} ({first.stream.label})"
        what = f"the arm that never saves parts from the reference {parted}: {why}"
        where["step"] = first.first_step
        return [*findings, Finding(kind="saving-changes", severity="not-verified", where=where, what=what)]
    if attempt.pair.streams.compared:
        what = "an arm that never saves took the same steps, bit for bit: saving does not change the run"
        findings.append(Finding(kind="saving-harmless", severity="info", where=where, what=what))
    return findings


def _self_test(controls: list[ControlEvidence], evidence: ResumeEvidence) -> list[Finding]:
    seen, unseen, untried = [], [], []
    for control in controls:
        kind = control.purpose.removeprefix(SELF_TEST)
        name = _BROKEN.get(kind, kind)
        attempt = control.attempt
        done = [record for record in attempt.sabotage.values() if record.get("done") is True]
        if not done:
            words = {str(record.get("what") or record.get("why") or "") for record in attempt.sabotage.values()}
            job = attempt.arm.job
            why = next((word for word in words if word), (job.reason if job else None) or "it left no word")
            untried.append(f"{name} ({one_line(why, 100)})")
        elif state_findings(attempt, evidence.asked.ranks) or attempt.pair.streams.streams:
            seen.append(name)
        else:
            unseen.append(name)
    details = {"seen": seen, "unseen": unseen, "untried": untried}
    findings = []
    if unseen:
        what = f"this check cannot be trusted with this recipe: broken on purpose and not seen: {'; '.join(unseen)}"
        findings.append(Finding(kind="self-test", severity="not-verified", what=what, evidence=details))
    elif not seen:
        what = f"the self-test could break nothing: {'; '.join(untried)}"
        return [Finding(kind="self-test", severity="not-verified", what=what, evidence=details)]
    if seen:
        what = f"self-test: seen when broken on purpose: {'; '.join(seen)}"
        findings.append(Finding(kind="self-test", severity="info", what=what, evidence=details))
    if untried:
        what = f"self-test: could not be broken here: {'; '.join(untried)}"
        findings.append(Finding(kind="self-test", severity="info", what=what, evidence=details))
    return findings
