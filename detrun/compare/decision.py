"""From evidence to a verdict: which findings there are, and which word wins.

A bit difference between comparable records is `diverged`, whatever else is missing; then a failed job (exit 4),
then a gap (exit 3), and only what is left is `identical`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from detrun.compare.chance import CONFIDENCE, bound_of_clean_pairs
from detrun.compare.completeness import Asked, counts_microbatches, gaps_of_arm
from detrun.compare.divergence import divergence_findings, first_divergence, order_of
from detrun.compare.evidence import ArmEvidence, CostTally, Evidence, PairEvidence
from detrun.compare.folding import ranks_in_words
from detrun.compare.missing import ending, environment_findings, gap_findings, job_findings, placement_findings
from detrun.compare.replicas import find_drift
from detrun.compare.streams import Gap, is_ignored
from detrun.errors import ExitCode
from detrun.records.jobs import ExperimentFile
from detrun.records.metrics_line import DERIVED
from detrun.records.verdict import ArmSummary, AttemptSummary, Figure, Finding, Severity, Verdict, Word

_ORDER: dict[Severity, int] = {
    "divergence": 0,
    "infrastructure": 1,
    "not-verified": 2,
    "warning": 3,
    "info": 4,
}


def decide(experiment: ExperimentFile, evidence: Evidence) -> Verdict:
    """The verdict on an experiment whose arms are held against each other step by step. Pure."""
    asked = evidence.asked
    surveys = [survey for arm in evidence.arms for survey in arm.surveys]
    ends = {arm.id: arm.end for arm in evidence.arms}
    optimizer_steps = counts_microbatches(surveys, ends, asked)
    names = [arm.id for arm in evidence.arms]

    findings: list[Finding] = []
    for pair in sorted(evidence.pairs, key=order_of):
        findings += divergence_findings(pair, asked.ranks)
    gaps: list[Gap] = [gap for pair in evidence.pairs for gap in pair.streams.gaps]
    required = {(gap.arm, gap.rank, gap.name) for arm in evidence.arms for s in arm.surveys for gap in s.gaps}
    gaps = [gap for gap in gaps if gap.arm is None or (gap.arm, gap.rank, gap.name) not in required]
    for arm in evidence.arms:
        gaps += arm.gaps
        gaps += gaps_of_arm(arm.surveys, asked, arm.end, arm.stages, optimizer_steps)
        findings += job_findings(arm, evidence)
        findings += replica_findings(arm)
        findings += remark_findings(arm, asked.ranks)
        findings += _unexpected(arm, asked)
    findings += gap_findings(gaps, names, asked.ranks)
    for pair in evidence.pairs:
        findings += environment_findings(pair, asked.ranks)
    if len(evidence.arms) < 2:
        what = "there is only one arm, nothing to hold it against"
        findings.append(Finding(kind="one-arm", severity="not-verified", what=what))
    elif not any(pair.streams.compared for pair in evidence.pairs):
        what = "no step was recorded by both arms of a pair on any rank"
        findings.append(Finding(kind="nothing-compared", severity="not-verified", what=what))
    findings += evidence.notes
    findings += _declared(experiment)
    findings += placement_findings(evidence.arms)
    if optimizer_steps:
        count = f"{asked.steps:,} micro-batches in {optimizer_steps:,} optimizer steps"
        what = (
            f"the program seems to count micro-batches as its steps: {count}; "
            "if it was to take as many optimizer steps, it stopped early"
        )
        numbers = {"micro_batches": asked.steps, "optimizer_steps": optimizer_steps}
        findings.append(Finding(kind="micro-batches", severity="warning", what=what, evidence=numbers))
    coverage = coverage_findings(evidence, optimizer_steps)
    compared = any(pair.streams.compared for pair in evidence.pairs)
    if coverage and compared and not any(coverage[0].evidence[kind] for kind in ("metrics", "state", "rng", "batch")):
        what = "the recipe ignores every metric that was recorded, and neither batch nor state was: nothing is compared"
        findings.append(Finding(kind="nothing-asked", severity="not-verified", what=what))
    findings += coverage
    findings = in_order(findings)

    word, code = word_of(findings)
    diverged = sorted((pair for pair in evidence.pairs if pair.diverged), key=order_of)
    return Verdict(
        id=experiment.id,
        experiment=experiment.experiment,
        recipe=experiment.recipe_name,
        verdict=word,
        exit_code=int(code),
        first_divergence=first_divergence(diverged[0]) if diverged else None,
        findings=findings,
        not_verified=[f.what for f in findings if f.severity in ("infrastructure", "not-verified")],
        arms=[arm_summary(arm, evidence) for arm in evidence.arms],
        figures=_figures(evidence, optimizer_steps, diverged, word),
    )


def in_order(findings: Sequence[Finding]) -> list[Finding]:
    """The weightiest first; those of one weight stay in their order."""
    return sorted(findings, key=lambda finding: _ORDER[finding.severity])


def word_of(findings: Sequence[Finding]) -> tuple[Word, ExitCode]:
    """Which word wins, and its exit code."""
    severities = {finding.severity for finding in findings}
    if "divergence" in severities:
        return "diverged", ExitCode.DIVERGED
    if "infrastructure" in severities:
        return "not-verified", ExitCode.INFRASTRUCTURE
    if "not-verified" in severities:
        return "not-verified", ExitCode.NOT_VERIFIED
    return "identical", ExitCode.OK


def replica_findings(arm: ArmEvidence) -> list[Finding]:
    """Copies of the same parameters that part within an arm."""
    trails = {survey.rank: survey.parameters for survey in arm.surveys}
    found = []
    for drift in find_drift(arm.id, trails, arm.replicas):
        how = "hold copies of the same parameters" if drift.declared else "started from the same parameters"
        group = ranks_in_words(drift.group)
        apart = f" ({ranks_in_words(drift.apart)})" if len(drift.apart) < len(drift.group) else ""
        what = f"arm {arm.id}: {group} {how}, which part at step {drift.step}{apart}"
        where: dict[str, Any] = {"arm": arm.id, "step": drift.step, "ranks": list(drift.apart)}
        details = {"group": list(drift.group), "declared": drift.declared}
        found.append(Finding(kind="replicas", severity="warning", where=where, what=what, evidence=details))
    return found


def remark_findings(arm: ArmEvidence, ranks: int) -> list[Finding]:
    """What the recorders of an arm said themselves."""
    return [
        Finding(
            kind="recorder",
            severity="warning",
            where={"arm": arm.id, "ranks": sorted(on)},
            what=f"arm {arm.id}, {ranks_in_words(on, ranks)}: the recorder says: {text}",
        )
        for text, on in list(arm.remarks.items())[:50]
    ]


def _unexpected(arm: ArmEvidence, asked: Asked) -> list[Finding]:
    """Metrics that do not exist in this program, by the recipe's word, and were recorded all the same."""
    found = []
    for name in asked.absent:
        ranks = [survey.rank for survey in arm.surveys if {name, asked.names.get(name, name)} & {*survey.metrics}]
        if ranks:
            what = f"arm {arm.id}, {ranks_in_words(ranks, asked.ranks)}: {name} was recorded; metrics.absent denies it"
            where: dict[str, Any] = {"arm": arm.id, "ranks": ranks, "metric": name}
            found.append(Finding(kind="unexpected-metric", severity="warning", where=where, what=what))
    return found


def _declared(experiment: ExperimentFile) -> list[Finding]:
    found = []
    for arm in experiment.arms:
        if arm.declared.args:
            what = f"{arm.id}.args = {' '.join(arm.declared.args)}"
            evidence: dict[str, Any] = {"args": arm.declared.args}
            found.append(Finding(kind="declared", severity="info", where={"arm": arm.id}, what=what, evidence=evidence))
        for name, value in arm.declared.env.items():
            what = f"{arm.id}.env.{name} = {value}"
            evidence = {"env": {name: value}}
            found.append(Finding(kind="declared", severity="info", where={"arm": arm.id}, what=what, evidence=evidence))
    return found


def coverage_findings(evidence: Evidence, optimizer_steps: int | None) -> list[Finding]:
    """What the arms have in common that was held against each other: the claim of an `identical`."""
    arms = [arm for arm in evidence.arms if arm.surveys]
    if len(arms) < 2:
        return []
    ignored = frozenset(evidence.asked.ignore)
    metrics: dict[str, None] = {}
    components: dict[str, None] = {}
    derived: set[str] = set()
    batchless: list[int] = []
    for survey in arms[0].surveys:
        metrics |= dict.fromkeys(name for name in survey.metrics if not is_ignored(name, ignored))
        derived |= {name for name in survey.metrics if name.endswith(DERIVED)}
        components |= dict.fromkeys(survey.components)
        if not survey.has_batch and not survey.unreadable:
            batchless.append(survey.rank)
    surveys = arms[0].surveys
    details: dict[str, Any] = {
        "ranks": evidence.asked.ranks,
        "steps": optimizer_steps or evidence.asked.steps,
        "metrics": list(metrics),
        "state": list(components),
        "rng": any(survey.has_rng for survey in surveys),
        "batch": any(survey.has_batch for survey in surveys),
        "state_every": evidence.asked.state_every,
        "ignored": sorted(ignored),
        "derived": sorted(derived),
    }
    what = f"compared by bits: {len(metrics)} metrics, {len(components)} components of the state"
    if evidence.source != "recorder":
        details |= {"source": evidence.source, "resolution": evidence.resolution}
        what = f"compared as {evidence.source} has them: {len(metrics)} metrics"
    found = [Finding(kind="coverage", severity="info", what=what, evidence=details)]
    if batchless and not evidence.asked.state_every and "batch" not in evidence.asked.absent:
        what = f"no batch was recorded in any step ({ranks_in_words(batchless, evidence.asked.ranks)})"
        found.append(Finding(kind="no-batch", severity="warning", where={"ranks": batchless}, what=what))
    return found


def arm_summary(arm: ArmEvidence, evidence: Evidence) -> ArmSummary:
    """One arm in short."""
    job = arm.job
    read = [survey for survey in arm.surveys if not survey.unreadable]
    remark = job.remark if job else "job.json is missing or unreadable"
    by_plan = evidence.asked.cut_short and arm.ended_by_plan
    if job and not arm.end.clean and not by_plan and job.state not in ("running", "pending"):
        died = ending(arm)
        if arm.is_complete(evidence.asked):
            died = f"every step recorded, then {died}"
        remark = f"{remark}; {died}" if remark else died
    return ArmSummary(
        id=arm.id,
        role=arm.role,
        attempts=[
            AttemptSummary(
                n=arm.attempt,
                jobs=job.jobs if job else [],
                nodes=arm.nodes,
                first_step=1 if read else None,
                last_step=min((survey.last for survey in read), default=None),
                ended=job.ended if job else None,
                exit_code=job.exit_code if job else None,
                remark=remark,
            )
        ],
    )


def _figures(
    evidence: Evidence, optimizer_steps: int | None, diverged: Sequence[PairEvidence], word: Word
) -> dict[str, Figure]:
    pairs = len(evidence.pairs)
    rank_steps = sum(sum(pair.streams.compared.values()) for pair in evidence.pairs)
    figures = {
        "pairs": Figure(value=pairs, unit="pairs", n=pairs),
        "pairs_diverged": Figure(value=len(diverged), unit="pairs", n=pairs),
        "rank_steps_compared": Figure(value=rank_steps, unit="rank-steps", n=pairs),
    }
    if optimizer_steps:
        figures["optimizer_steps"] = Figure(value=optimizer_steps, unit="steps", n=len(evidence.arms))
    if word == "identical" and pairs:
        bound = bound_of_clean_pairs(pairs)
        figures["divergence_chance_bound"] = Figure(
            value=bound, unit=f"probability ({CONFIDENCE:.0%} confidence)", n=pairs, interval=(0.0, bound)
        )
    figures.update(cost_figures(evidence.arms))
    return figures


def cost_figures(arms: Iterable[ArmEvidence]) -> dict[str, Figure]:
    """What recording cost, as a share of the ranks' CPU time: every step, and around saves."""
    figures: dict[str, Figure] = {}
    cost = CostTally()
    for arm in arms:
        cost.merge(arm.cost)
    captures = cost.parts.get("capture", 0.0)
    total = sum(cost.parts.values()) - captures
    if cost.process > 0 and math.isfinite(total / cost.process):
        figures["recorder_cpu_share"] = Figure(value=total / cost.process, unit="of CPU time", n=cost.ranks)
        state = cost.parts.get("state", 0.0)
        if captures:
            figures["state_capture_cpu_share"] = Figure(value=captures / cost.process, unit="of CPU time", n=cost.ranks)
        figures["state_digest_cpu_share"] = Figure(value=state / cost.process, unit="of CPU time", n=cost.ranks)
    return figures
