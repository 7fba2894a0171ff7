"""What keeps a comparison from proving identity, as findings: gaps, differing environments, jobs that died."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from detrun.compare.environment import EnvironmentDifference
from detrun.compare.evidence import ENDED_BADLY, ArmEvidence, Evidence, PairEvidence
from detrun.compare.folding import hosts, ranges, ranks_in_words
from detrun.compare.streams import Gap
from detrun.records.files import one_line
from detrun.records.verdict import Finding

MAX_FINDINGS = 200
MAX_VALUE = 300


def gap_findings(gaps: Iterable[Gap], arms: Sequence[str], ranks: int) -> list[Finding]:
    """Gaps with the same words become one finding, over ranks first, then over arms. arms: all there are."""
    by_arm: dict[tuple[str, str, str | None], list[Gap]] = {}
    for gap in gaps:
        by_arm.setdefault((gap.kind, gap.what, gap.arm), []).append(gap)
    merged: dict[tuple[str, str, tuple[int, ...], bool], list[list[Gap]]] = {}
    for (kind, what, arm), group in by_arm.items():
        seen = tuple(sorted({gap.rank for gap in group}))
        merged.setdefault((kind, what, seen, arm is None), []).append(group)
    findings = []
    for (kind, what, seen, _between), groups in merged.items():
        first = groups[0][0]
        named = [group[0].arm for group in groups if group[0].arm is not None]
        where: dict[str, Any] = {"ranks": [rank for rank in seen if rank >= 0]}
        if len(named) == 1:
            where["arm"] = named[0]
        elif named:
            where["arms"] = named
        if len(seen) == 1 and seen[0] >= 0:
            where["rank"] = seen[0]
        where |= {
            key: value
            for key, value in (("step", first.step), ("line", first.line), ("path", first.path))
            if value is not None
        }
        if first.kind.startswith("metric") and first.name:
            where["metric"] = first.name
        words = f"{_place(named, arms, where['ranks'], ranks)}: {what}"
        findings.append(Finding(kind=kind, severity="not-verified", where=where, what=words))
    if len(findings) > MAX_FINDINGS:
        rest = len(findings) - MAX_FINDINGS
        findings = findings[:MAX_FINDINGS]
        findings.append(Finding(kind="more", severity="not-verified", what=f"{rest:,} more of this sort"))
    return findings


def _place(named: Sequence[str], arms: Sequence[str], seen: Sequence[int], ranks: int) -> str:
    if not named:
        arm = "between the arms"
    elif len(named) == 1:
        arm = f"arm {named[0]}"
    elif len(named) == len(arms):
        arm = "both arms" if len(arms) == 2 else "every arm"
    else:
        arm = f"arms {', '.join(named)}"
    return f"{arm}, {ranks_in_words(seen, ranks)}" if seen else arm


def job_findings(arm: ArmEvidence, evidence: Evidence) -> list[Finding]:
    """How an arm's job ended, where that is worth a word."""
    job = arm.job
    if job is None:
        return []
    where: dict[str, Any] = {"arm": arm.id, "attempt": arm.attempt}
    if job.state in ("running", "pending"):
        what = f"arm {arm.id}: its job was still {job.state} when the records were read"
        return [Finding(kind="unfinished", severity="not-verified", where=where, what=what)]
    bad = job.state in ENDED_BADLY or (
        job.exit_code not in (0, None) and not (evidence.asked.cut_short and arm.ended_by_plan)
    )
    if not bad:
        return []
    if job.failed_rank is not None:
        where["rank"] = job.failed_rank
    if job.log:
        where["path"] = job.log
    details = {
        "state": job.state,
        "exit_code": job.exit_code,
        "reason": job.reason,
        "jobs": job.jobs,
        "nodes": job.nodes,
        "log_tail": [line[:1000] for line in job.log_tail[-20:]],
    }
    if arm.is_complete(evidence.asked):
        what = f"arm {arm.id} recorded every step on every rank and then {ending(arm)}"
        return [Finding(kind="late-exit", severity="info", where=where, what=what, evidence=details)]
    rank = f", rank {job.failed_rank}" if job.failed_rank is not None else ""
    reached = sorted({survey.last for survey in arm.surveys if not survey.unreadable})
    steps = f"; steps recorded: {ranges(reached)} of {evidence.asked.steps}" if reached else "; no step recorded"
    what = f"arm {arm.id}{rank}: {ending(arm)}{steps}"
    return [Finding(kind="job", severity="infrastructure", where=where, what=what, evidence=details)]


def ending(arm: ArmEvidence) -> str:
    """`failed with exit code 1 (out of memory)`."""
    job = arm.job
    if job is None:
        return "left no word"
    word = {"done": "ended", "cancelled": "was cancelled", "lost": "was lost"}.get(job.state, job.state)
    reason = one_line(job.reason, MAX_VALUE) if job.reason else ""
    if "exit code" in reason:
        return f"{word}: {reason}"
    code = "" if job.exit_code in (0, None) else f" with exit code {job.exit_code}"
    return f"{word}{code}" + (f" ({reason})" if reason else "")


def environment_findings(pair: PairEvidence, ranks: int) -> list[Finding]:
    """Differences of settings between two arms, one finding each, those that merely inform in one."""
    findings: list[Finding] = []
    informing: dict[str, EnvironmentDifference] = {}
    placing: dict[str, EnvironmentDifference] = {}
    for path, group in _by_path(pair).items():
        first = group[0]
        if first.effect == "inform":
            informing[path] = first
            continue
        if first.effect == "placement":
            placing[path] = first
            continue
        on = sorted({rank for difference in group for rank in difference.ranks})
        name = path.removeprefix("env.clear.").removeprefix("packages.")
        a, b = _cut(first.a), _cut(first.b)
        what = (
            f"{name} differs between the arms, undeclared ({ranks_in_words(on, ranks)}): "
            f"{a} in arm {pair.streams.a}, {b} in arm {pair.streams.b}"
        )
        where = {"arms": pair.arms, "ranks": on, "setting": path}
        shown = {"a": a, "b": b}
        findings.append(Finding(kind="environment", severity="not-verified", where=where, what=what, evidence=shown))
    missing = [item for item in pair.initial.values() if not item.comparable]
    findings += [
        Finding(
            kind="initial-state",
            severity="not-verified",
            where={"arms": pair.arms, "ranks": sorted(item.ranks), "stream": item.component},
            what=f"the initial {item.component} cannot be compared ({ranks_in_words(item.ranks, ranks)}): "
            f"{_cut(item.a)} in arm {pair.streams.a}, {_cut(item.b)} in arm {pair.streams.b}",
            evidence={"a": item.a, "b": item.b},
        )
        for item in missing
    ]
    if informing:
        names = sorted(path.removeprefix("env.digest.") for path in informing)
        shown_names = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
        findings.append(
            Finding(
                kind="environment",
                severity="info",
                where={"arms": pair.arms},
                what=f"settings of unknown effect differ between arms {pair.streams.a} and {pair.streams.b}: "
                f"{shown_names}",
                evidence={"settings": names[:MAX_FINDINGS]},
            )
        )
    devices = [path for path in placing if path.startswith("devices.") or path.endswith("VISIBLE_DEVICES")]
    if devices:
        what = f"arms {pair.streams.a} and {pair.streams.b} ran on different devices of the same kind"
        findings.append(Finding(kind="devices", severity="info", where={"arms": pair.arms}, what=what))
    return findings[:MAX_FINDINGS]


def _by_path(pair: PairEvidence) -> dict[str, list[EnvironmentDifference]]:
    groups: dict[str, list[EnvironmentDifference]] = {}
    for difference in pair.environment.differences.values():
        groups.setdefault(difference.path, []).append(difference)
    return dict(sorted(groups.items()))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}…"


def placement_findings(arms: Sequence[ArmEvidence]) -> list[Finding]:
    """Which nodes the arms ran on, where they are known."""
    nodes = {arm.id: sorted(arm.nodes) for arm in arms if arm.nodes}
    if len(nodes) < 2:
        return []
    if len({tuple(names) for names in nodes.values()}) == 1:
        what = f"same nodes: {hosts(next(iter(nodes.values())))}"
        return [Finding(kind="same-nodes", severity="info", what=what, evidence={"nodes": nodes})]
    shown = "; ".join(f"arm {arm} on {hosts(names)}" for arm, names in list(nodes.items())[:6])
    what = f"different nodes: {shown}"
    return [Finding(kind="different-nodes", severity="info", what=what, evidence={"nodes": nodes})]
