"""What is to be said of runs that were compared by what they wrote themselves, and of second sources. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from detrun.compare.folding import steps_in_words
from detrun.compare.sources import Agreements, Contradiction, Held, SourceAsked
from detrun.records.metrics_line import shown_name
from detrun.records.verdict import Finding

MAX_SHOWN = 3


def claim_findings(
    agreements: Agreements,
    asked: SourceAsked,
    state_every: int,
    determinism: str,
    derived: Iterable[str] = (),
) -> list[Finding]:
    """What a comparison by a source may claim: nothing of state, and of decimals no identity."""
    source = asked.spec.source
    found: list[Finding] = []
    what = (
        f"the metrics are those that the program wrote itself ({source}); no state, batch, RNG stream or environment "
        "of the processes was recorded"
    )
    found.append(
        Finding(kind="source", severity="info", what=what, evidence={"source": source, **_by_metric(agreements)})
    )
    decimals = {name: agreement for name, agreement in agreements.items() if agreement.resolution == "decimal"}
    if decimals:
        listed = ", ".join(f"{shown_name(name)} to {agreement.words()}" for name, agreement in decimals.items())
        what = (
            f"the runs agree as far as {source} prints: {listed}; decimals can show a difference and never prove that "
            "there is none"
        )
        found.append(_open("resolution", what, _by_metric(decimals)))
    if state_every:
        what = (
            f"metrics.state_every is {state_every}, and source {source} holds no state: metrics.state_every: 0 asks "
            "for the metrics alone"
        )
        found.append(_open("state-not-held", what, {"state_every": state_every}))
    for name, agreement in agreements.items():
        if agreement.apart:
            steps = steps_in_words(agreement.apart)
            what = f"{shown_name(name)} {steps} is a mean of other steps than in the other run, and was not compared"
            found.append(Finding(kind="other-mean", severity="info", where={"metric": name}, what=what))
    for name in derived:
        what = f"{shown_name(name)} is bookkeeping that may restart on resume: not compared"
        found.append(Finding(kind="derived", severity="info", where={"metric": name}, what=what))
    if determinism == "strict":
        what = "determinism: strict reached the programs by their environment alone; the rest of it needs the recorder"
        found.append(Finding(kind="determinism", severity="warning", what=what))
    return found


def never_compared(due: Sequence[int], compared: Iterable[int], arm: str) -> list[Finding]:
    """Steps of an interrupted run that no attempt's readings hold: what its writer had not flushed when it ended."""
    lost = sorted(set(due) - set(compared))
    if not lost:
        return []
    what = f"arm {arm}: no attempt's readings hold it {steps_in_words(lost)}: they were lost with the process"
    return [_open("missing-step", what, {"steps": lost[:1000]}, {"arm": arm, "step": lost[0]})]


def held_findings(held: Held, asked: SourceAsked, main: str, arm: str, attempt: int) -> list[Finding]:
    """What holding a second source against the first brought."""
    source = asked.spec.source
    where: dict[str, Any] = {"arm": arm, "attempt": attempt, "source": source}
    label = f"arm {arm}" + (f", attempt {attempt}" if attempt else "")
    by_metric: dict[str, list[Contradiction]] = {}
    for contradiction in held.contradictions:
        by_metric.setdefault(contradiction.metric, []).append(contradiction)
    found = []
    for metric, several in by_metric.items():
        first = several[0]
        more = f"; so in {len(several):,} steps" if len(several) > 1 else ""
        what = f"{label}: {_contradiction(first, source, main)}{more}"
        evidence = {"steps": [each.step for each in several][:1000]}
        found.append(_open("sources-disagree", what, evidence, {**where, "metric": metric, "step": first.step}))
    agreed = {name: each for name, each in held.agreements.items() if each.steps and name not in by_metric}
    if agreed:
        listed = ", ".join(
            f"{shown_name(name)} ({each.words()}, {each.steps:,} steps)" for name, each in agreed.items()
        )
        what = f"{label}: {source} agrees with {main}: {listed}"
        found.append(
            Finding(kind="sources-agree", severity="info", where=where, what=what, evidence=_by_metric(agreed))
        )
    if not agreed and not by_metric:
        what = f"{label}: nothing of {source} could be held against {main}"
        found.append(_open("sources-apart", what, {}, where))
    return found


def _contradiction(found: Contradiction, source: str, main: str) -> str:
    number = found.reading.number
    if number is None:
        given = "left out as negative or NaN"
    else:
        given = number.printed if number.printed is not None else f"{number.value!r}"
    of = f"the mean of steps {found.reading.first} to {found.step}" if found.reading.is_mean else f"step {found.step}"
    shown = ", ".join(f"{each.value!r} (rank {rank})" for rank, each in list(found.main.items())[:MAX_SHOWN])
    more = f" and {len(found.main) - MAX_SHOWN} ranks more" if len(found.main) > MAX_SHOWN else ""
    return f"{shown_name(found.metric)} of {of} is {given} by {source} ({found.reading.place}), by {main} {shown}{more}"


def _by_metric(agreements: Agreements) -> dict[str, Any]:
    return {
        "metrics": {
            name: {"resolution": each.resolution, "digits": each.words(), "steps": each.steps}
            for name, each in agreements.items()
        }
    }


def resolutions(agreements: Agreements) -> dict[str, str]:
    """How far each metric reaches, in words."""
    return {name: agreement.words() for name, agreement in agreements.items() if agreement.steps}


def _open(kind: str, what: str, evidence: Mapping[str, Any], where: Mapping[str, Any] | None = None) -> Finding:
    return Finding(kind=kind, severity="not-verified", where=dict(where or {}), what=what, evidence=dict(evidence))
