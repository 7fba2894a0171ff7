"""What the driver decides by itself, without starting anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from detrun.launch.driver import Driver
from detrun.launch.spec import JobSpec, Segment, WatchdogLimits
from detrun.records.jobs import JobFile
from detrun.records.layout import ExperimentFolder


def segment(arm: str) -> Segment:
    return Segment(arm, 0, ["true"], {}, [], "/", "none", 1, 2, 5)


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    spec = JobSpec("x", str(tmp_path), "local", "allocation", [segment("a"), segment("b")], WatchdogLimits())
    spec.write()
    return Driver(spec)


def ended(root: Path, state: str, steps: int) -> None:
    attempt = ExperimentFolder(root).attempt("a", 0)
    JobFile(arm="a", state=state, exit_code=1).write(attempt.job_file)
    attempt.metrics_dir.mkdir(exist_ok=True)
    attempt.metrics(1).write_text("".join(f'{{"v":1,"step":{n}}}\n' for n in range(1, steps + 1)))


def test_an_arm_is_not_started_after_one_that_failed_before_its_first_step(driver: Driver, tmp_path: Path) -> None:
    ended(tmp_path, "failed", steps=0)
    assert driver._hopeless(segment("b")) == "not started, since arm a failed before its first step"
    assert driver._hopeless(segment("a")) is None


@pytest.mark.parametrize(("state", "steps"), [("failed", 1), ("done", 5), ("stalled", 0), ("running", 0)])
def test_every_other_end_lets_the_next_arm_run(driver: Driver, tmp_path: Path, state: str, steps: int) -> None:
    ended(tmp_path, state, steps)
    assert driver._hopeless(segment("b")) is None
