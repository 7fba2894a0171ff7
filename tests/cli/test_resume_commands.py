"""What the commands that look at an experiment say of a resume check."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from detrun.cli import main
from detrun.cli.common import arm_names
from detrun.records.jobs import ArmPlan, JobFile, Reference, ResumedFrom
from tests.records_factory import MadeExperiment, make_experiment
from tests.report.resume_scenes import experiment, lost_moments

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DETRUN_ARCHIVE", str(tmp_path))
    return tmp_path


@pytest.fixture
def resumed(archive: Path) -> MadeExperiment:
    """Arm b with two attempts; arm a is another experiment's."""
    made = make_experiment(archive)
    plans = [ArmPlan(id="a", role="reference"), ArmPlan(id="b", role="interrupted")]
    other = Reference(experiment="clean-pair-20261128T020000-77aa", path=str(archive / "x"), arm="c")
    made.edit_experiment(experiment="resume-check", arms=plans, reference=other)
    for path in (made.folder.path / "arms" / "a").rglob("*"):
        if path.is_file():
            path.unlink()
    for path in sorted((made.folder.path / "arms" / "a").rglob("*"), reverse=True):
        path.rmdir()
    (made.folder.path / "arms" / "a").rmdir()
    second = made.folder.attempt("b", 1)
    second.log_dir.mkdir(parents=True)
    second.log(0).write_text("the second attempt\n")
    made.folder.attempt("b", 0).log(0).write_text("the first attempt\n")
    start = ResumedFrom(path="/ckpt/3", step=3, source="saves")
    JobFile(arm="b", attempt=1, state="done", resumed_from=start).write(second.job_file)
    return made


def test_logs_of_an_attempt(resumed: MadeExperiment, capsys: Captured) -> None:
    assert main(["logs", resumed.folder.id, "--arm", "b", "--rank", "0"]) == 0
    assert capsys.readouterr().out == "the second attempt\n"
    assert main(["logs", resumed.folder.id, "--arm", "b", "--attempt", "0", "--rank", "0"]) == 0
    assert capsys.readouterr().out == "the first attempt\n"
    assert main(["logs", resumed.folder.id, "--arm", "b", "--attempt", "5"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "hint: its attempts: 0, 1"


def test_logs_of_a_reference_that_was_not_run(resumed: MadeExperiment, capsys: Captured) -> None:
    assert main(["logs", resumed.folder.id]) == 2
    said = capsys.readouterr().err
    assert "arm c of clean-pair-20261128T020000-77aa stands in for it" in said
    assert said.splitlines()[-1] == "hint: detrun logs clean-pair-20261128T020000-77aa --arm c"


def test_list_names_the_culprit(resumed: MadeExperiment, capsys: Captured) -> None:
    lost_moments()[0].write(resumed.folder.verdict_file)
    assert main(["list"]) == 0
    line = capsys.readouterr().out
    assert line == f"{resumed.folder.id}  diverged  step 12  the optimizer's exp_avg, exp_avg_sq and step\n"
    assert main(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["culprit"] == "the optimizer's exp_avg, exp_avg_sq and step"


def test_control_arms_are_called_by_what_they_are_for() -> None:
    plans = [
        ArmPlan(id="a", role="reference"),
        ArmPlan(id="b", role="interrupted"),
        ArmPlan(id="c", role="control", purpose="observer"),
        ArmPlan(id="d", role="control", purpose="self-test:moment"),
        ArmPlan(id="e", role="control", purpose="of a newer version"),
    ]
    assert arm_names(experiment(arms=plans)) == {
        "a": "uninterrupted",
        "b": "interrupted",
        "c": "never saves",
        "d": "broken: moment",
        "e": "of a newer version",
    }
    assert arm_names(experiment(experiment="pair")) == {}
