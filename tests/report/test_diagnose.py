"""A diagnosis on a screen and as a page."""

from __future__ import annotations

from detrun.experiments.diagnose_verdict import Tried
from detrun.records.jobs import ArmPlan, ExperimentFile, Reference
from detrun.records.verdict import Finding, FirstDivergence, Verdict
from detrun.report.html import render_html
from detrun.report.terminal import lines

EXPERIMENT = ExperimentFile(
    id="vocab-diagnose-20260101T000000-bf9d",
    experiment="diagnose",
    created="2026-01-01T00:00:00Z",
    recipe={"name": "vocab"},
    cluster="local",
    arms=[ArmPlan(id="a", role="reference")],
    ranks=1,
    steps=10,
    reference=Reference(experiment="vocab-pair-20260101T000000-c285", path="/x", arm="a"),
)
CAUSE = Finding(
    kind="cause",
    severity="info",
    what="An order follows string hashes.",
    evidence={"catalog": "hash-seed", "title": "An order follows string hashes.", "signs": ["data differs first"]},
)


def verdict(*tried: Tried, culprit: dict | None = None, causes: tuple[Finding, ...] = (CAUSE,)) -> Verdict:
    return Verdict(
        id=EXPERIMENT.id,
        experiment="diagnose",
        recipe="vocab",
        verdict="diverged",
        exit_code=0,
        first_divergence=FirstDivergence(step=1, boundary="end", stream="batch", ranks=[0], arms=["a", "b"]),
        culprit=culprit or {"kind": "unknown", "role": None, "catalog": "hash-seed", "fix": "sort it"},
        findings=[*causes, *(each.finding() for each in tried)],
    )


def shown(document: Verdict) -> str:
    return "\n".join(line.plain.rstrip() for line in lines(document, EXPERIMENT))


def test_the_first_line_says_what_helps_and_the_last_what_to_do() -> None:
    text = shown(verdict(Tried("unchanged", 0, 3, 0, 1), Tried("hash-seed", 3, 0, 0), Tried("one-thread", 0, 3, 0, 2)))
    assert text.splitlines() == [
        "DIAGNOSED  vocab: with PYTHONHASHSEED=0 the arms agree, 3 of 3",
        "",
        "changed           identical  first differs",
        "unchanged         0 of 3     step 1",
        "PYTHONHASHSEED=0  3 of 3",
        "one thread        0 of 3     step 2",
        "",
        "cause             An order follows string hashes     catalog: hash-seed     since data differs first",
        "each change: 4 arms, the others held against the first, 1 rank",
        "fix: sort it",
        "hint: detrun localize c285 names the operation",
    ]


def test_a_change_that_could_not_run_says_why_and_counts_for_nothing() -> None:
    failed = Tried("deterministic-algorithms", 0, 0, 3, None, "RuntimeError: put_ has no deterministic implementation")
    text = shown(verdict(Tried("unchanged", 0, 3, 0, 1), failed, causes=()))
    assert text.startswith("DIAGNOSED  vocab: no change could be tried")
    assert "-          cannot be told: RuntimeError: put_ has no deterministic implementation" in text
    assert "none of the catalog's entries fits what was tried" in text


def test_a_fault_that_stayed_away_is_said() -> None:
    text = shown(verdict(Tried("unchanged", 3, 0, 0), Tried("one-thread", 3, 0, 0)))
    assert text.startswith("DIAGNOSED  vocab: the fault did not come back in 3 runs of the same: nothing can be told")
    assert "clean runs of what follows weigh little" in text


def test_other_fills_that_agree_are_no_help() -> None:
    text = shown(verdict(Tried("unchanged", 0, 1, 0, 1), Tried("different-fills", 1, 0, 0)))
    assert text.startswith("DIAGNOSED  vocab: nothing that was tried makes the arms agree")


def test_what_does_not_help_is_named() -> None:
    text = shown(
        verdict(Tried("unchanged", 0, 3, 0, 1), Tried("one-thread", 2, 1, 0, 3), Tried("hash-seed", 0, 3, 0, 1))
    )
    assert text.startswith("DIAGNOSED  vocab: with one thread or PYTHONHASHSEED=0 the arms still differ")


def test_where_the_operation_is_known_its_report_is_named() -> None:
    known = {"kind": "op", "role": "origin", "name": "aten.mm.default", "fix": "sort it"}
    assert "hint: detrun report c285 shows the operation" in shown(
        verdict(Tried("unchanged", 0, 3, 0, 1), culprit=known)
    )


def test_the_page_has_every_change_with_what_it_means() -> None:
    page = render_html(verdict(Tried("unchanged", 0, 3, 0, 1), Tried("hash-seed", 3, 0, 0)), EXPERIMENT)
    assert "PYTHONHASHSEED=0" in page
    assert "an order follows Python&#39;s string hashes" in page
    assert "fix: sort it" in page
