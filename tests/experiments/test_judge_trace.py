"""An experiment that only traces: done where everything that was asked for was recorded, and not verified otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from detrun.experiments.judge import judge
from detrun.records.verdict import Finding, Verdict
from tests.records_factory import MadeExperiment, make_experiment
from tests.trace_factory import Arm, Value


def traced(folder: Path, ranks: list[int] | None = None, **settings: Any) -> MadeExperiment:
    """Two ranks that were asked for a trace of step 1, and rank 0's trace."""
    made = make_experiment(folder, id="plain-trace", arms=("a",))
    made.edit_experiment(experiment="trace")
    asked = {"level": 4, "steps": [1, 1], "ranks": ranks}
    launch = made.attempt("a").path / "launch.json"
    launch.write_text(json.dumps({"env": {"DETRUN_TRACE": json.dumps(asked)}}))
    trace(made, 0, **settings)
    return made


def trace(made: MadeExperiment, rank: int, **settings: Any) -> None:
    arm = Arm(rank=rank)
    arm.op("aten.mm.default", [Value("x")])
    arm.op("aten.add.Tensor", [Value("y")])
    arm.write(made.attempt("a"), **settings)


def judged(made: MadeExperiment) -> Verdict:
    return judge(made.folder.path, report=False)


def broken(verdict: Verdict) -> list[Finding]:
    return [finding for finding in verdict.findings if finding.kind == "trace"]


def test_everything_that_was_asked_for_is_there(tmp_path: Path) -> None:
    made = traced(tmp_path)
    trace(made, 1, coverage={"not_captured": ["CUDA graphs"], "opaque": {"fused_adam": 2}})
    verdict = judged(made)
    assert (verdict.verdict, verdict.exit_code, broken(verdict)) == ("identical", 0, [])
    assert verdict.figures["trace_events"].value == 4
    assert verdict.figures["trace_bytes"].value > 0
    (coverage,) = [finding for finding in verdict.findings if finding.kind == "coverage"]
    assert coverage.evidence == {
        "level": 4,
        "steps": [1, 1],
        "ranks": [0, 1],
        "not_captured": ["CUDA graphs"],
        "opaque": {"fused_adam": 2},
    }


def test_a_rank_that_was_not_asked_owes_nothing(tmp_path: Path) -> None:
    assert judged(traced(tmp_path, ranks=[0])).verdict == "identical"


def test_a_rank_without_a_trace_is_named(tmp_path: Path) -> None:
    verdict = judged(traced(tmp_path))
    assert (verdict.verdict, verdict.exit_code) == ("not-verified", 3)
    (finding,) = broken(verdict)
    assert finding.where == {"arm": "a", "ranks": [1]}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"complete": False, "reason": "byte budget"}, "incomplete: byte budget"),
        ({"complete": False, "reason": "tracer failed: KeyError"}, "tracer failed: KeyError"),
        ({"end": False}, "incomplete"),
        ({"steps": (1, 2)}, "its trace has no step 2"),
    ],
)
def test_a_trace_that_is_not_whole_is_not_verified(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    verdict = judged(traced(tmp_path, ranks=[0], **settings))
    assert (verdict.verdict, verdict.exit_code) == ("not-verified", 3)
    (finding,) = broken(verdict)
    assert said in finding.what
    assert any(said in reason for reason in verdict.not_verified)
