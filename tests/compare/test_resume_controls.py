"""What control arms say of a resume check: whether saving changes a run, and whether the check sees what is broken."""

from __future__ import annotations

from typing import Any

from detrun.compare.attempts import Position
from detrun.compare.completeness import Asked
from detrun.compare.environment import EnvironmentTally
from detrun.compare.evidence import ArmEvidence, PairEvidence
from detrun.compare.resume_controls import control_findings
from detrun.compare.resume_evidence import AttemptEvidence, Boundary, ControlEvidence, ResumeEvidence
from detrun.compare.streams import METRIC, PairTally, StepTally, Stream, StreamTally
from detrun.records.jobs import JobFile
from detrun.records.verdict import Finding

METRIC_A = {"bits": "0x3f800000", "dtype": "float32", "value": 1.0}
METRIC_B = {"bits": "0x3f800001", "dtype": "float32", "value": 1.0}


def attempt(arm: str, parted: int | None = None, number: int = 0, **sabotage: Any) -> AttemptEvidence:
    pair = PairEvidence(PairTally("a", arm), EnvironmentTally("a", arm))
    pair.streams.compared = dict.fromkeys(range(1, 7), 1)
    if parted is not None:
        stream = Stream(METRIC, "loss")
        steps = {parted: StepTally(1, 1, 0)}
        pair.streams.streams[stream] = StreamTally(stream, parted, [0], METRIC_A, METRIC_B, steps)
    found = AttemptEvidence(ArmEvidence(arm, "control", number, JobFile(arm=arm, attempt=number, state="done")), pair)
    if number:
        found.restored, found.saved = Boundary(Position(3)), Boundary(Position(3))
    if sabotage:
        found.sabotage[0] = sabotage
    return found


def findings(*controls: ControlEvidence, interrupted: AttemptEvidence | None = None) -> list[Finding]:
    evidence = ResumeEvidence(
        Asked(steps=6, ranks=1), ArmEvidence("a", "reference"), [interrupted or attempt("b")], list(controls)
    )
    return [f for f in control_findings(evidence) if f.kind in ("self-test", "saving-changes", "saving-harmless")]


def test_what_is_broken_and_not_seen_makes_the_check_untrustworthy() -> None:
    (finding,) = findings(ControlEvidence("self-test:moment", attempt("c", number=1, done=True)))
    assert finding.severity == "not-verified"
    assert "cannot be trusted" in finding.what


def test_what_is_broken_and_seen_is_told() -> None:
    (finding,) = findings(ControlEvidence("self-test:moment", attempt("c", 5, number=1, done=True)))
    assert (finding.severity, len(finding.evidence["seen"])) == ("info", 1)


def test_what_could_not_be_broken_proves_nothing() -> None:
    idle = ControlEvidence("self-test:scheduler", attempt("c", number=1, done=False, what="no scheduler was found"))
    (finding,) = findings(idle)
    assert finding.severity == "not-verified"
    seen = ControlEvidence("self-test:rng", attempt("d", 4, number=1, done=True))
    told = findings(idle, seen)
    assert {f.severity for f in told} == {"info"}
    assert any("no scheduler was found" in f.what for f in told)


def test_an_arm_that_never_saves_and_agrees_clears_saving() -> None:
    (finding,) = findings(ControlEvidence("observer", attempt("c")))
    assert finding.kind == "saving-harmless"


def test_an_arm_that_never_saves_and_parts_forbids_a_verdict() -> None:
    (finding,) = findings(ControlEvidence("observer", attempt("c", 4)))
    assert (finding.kind, finding.severity) == ("saving-changes", "not-verified")
    assert "step 4" in finding.what
    assert finding.what.endswith("saving changes the run"), "the runs that save agree with each other there"


def test_where_the_saving_runs_disagree_too_saving_is_not_blamed_alone() -> None:
    (finding,) = findings(ControlEvidence("observer", attempt("c", 4)), interrupted=attempt("b", 5))
    assert "does not repeat itself" in finding.what
