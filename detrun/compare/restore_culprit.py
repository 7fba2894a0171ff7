"""The one thing that a verdict on a resume check blames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from detrun.compare.culprit import BLAMES, Blame
from detrun.compare.restored import MAX_EVIDENCE, MAX_NAMES, called, fix_of, given_other_data, suspects_of
from detrun.compare.resume_evidence import AttemptEvidence
from detrun.compare.streams import METRIC


def culprit_of(attempt: AttemptEvidence) -> dict[str, Any] | None:
    """The likeliest suspect; where nothing that was captured explains it, the data if they differ first; else None."""
    if attempt.restored is None:
        return None
    found = suspects_of(attempt)
    if not found:
        ranks = given_other_data(attempt)
        blame = BLAMES["batch"]
        return _culprit(attempt, blame, blame.fix, "batch", ranks, "the input data", ["batch"]) if ranks else None
    first = found[0]
    names = list(dict.fromkeys(difference.name for difference in first.differences))
    others = [called(suspect) for suspect in found[1:]]
    name, mend = called(first), fix_of(first)
    return _culprit(attempt, first.blame, mend, first.component, first.ranks, name, names, first.firm, others)


def _culprit(
    attempt: AttemptEvidence,
    blame: Blame,
    fix: str,
    component: str,
    ranks: Sequence[int],
    name: str,
    names: Sequence[str],
    firm: bool = False,
    others: Sequence[str] = (),
) -> dict[str, Any]:
    restored = attempt.restored
    assert restored is not None
    scope = sorted({name.rpartition(".")[0] for name in names} - {""})
    metrics = [t.first_step for t in attempt.pair.streams.streams.values() if t.stream.kind == METRIC]
    return {
        "kind": blame.kind,
        "name": name,
        "names": list(names[:MAX_EVIDENCE]),
        "component": component,
        "scope": ", ".join(scope[:MAX_NAMES]) or None,
        "phase": "restore",
        "rank": ranks[0],
        "ranks": list(ranks),
        "coordinates": None,
        "step": restored.position.step,
        "boundary": restored.position.begin,
        "first_metric_step": min(metrics, default=None),
        "microbatch": restored.position.microbatch or None,
        "occurrence": None,
        "call_site": None,
        "role": "origin" if firm else "uncaptured-producer",
        "catalog": blame.catalog,
        "fix": fix,
        "others": list(others),
    }
