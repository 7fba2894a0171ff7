"""Timelines that a real scheduler cannot be made to play on demand."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from detrun.errors import ArchiveError
from detrun.experiments import follow
from detrun.experiments.follow import Follower, Pace
from detrun.launch.cluster import JobRequest, JobStatus
from detrun.launch.spec import JobSpec, Segment, WatchdogLimits
from detrun.records.files import write_atomically
from detrun.records.jobs import JobFile, TaskMarker
from detrun.records.layout import ExperimentFolder
from detrun.report.live import ArmView
from tests.fakes import Clock, ScriptedCluster

RUNNING = JobStatus("running", "RUNNING", nodes=("node1",))
ABSENT = JobStatus("unknown")
OUTAGE = JobStatus("unknown", reason="slurm_load_jobs error: Unable to contact slurm controller")


class Stage:
    """Two jobs, an arm each, on a scripted cluster."""

    def __init__(self, tmp_path: Path) -> None:
        self.clock = Clock()
        self.cluster = ScriptedCluster(self.clock)
        self.folder = ExperimentFolder(tmp_path)
        self.seen: list[list[str]] = []
        for arm in "ab":
            segment = Segment(arm, 0, ["true"], {}, [], "/", "none", 1, 1, 5)
            spec = JobSpec(f"x-{arm}", str(tmp_path), "slurm", "pinned", [segment], WatchdogLimits())
            self.cluster.submit(JobRequest(spec, 10, {}))

    def ends(self, arm: str, when: float, state: str = "done") -> None:
        def write() -> None:
            job = JobFile(arm=arm, jobs=["1"], state=state, exit_code=0, started="2026-01-01T00:00:00+00:00", ended="x")
            job.write(self.folder.attempt(arm, 0).job_file)

        self.clock.at(when, write)

    def follow(self, until: float = 1000.0) -> dict[str, JobFile]:
        pace = Pace(look=1.0, poll=2.0, at_rest=30.0, grace=10.0, lost=120.0)
        follower = Follower(self.cluster, self.folder, pace, self.clock, self.clock.sleep)

        def show(views: Sequence[ArmView]) -> None:
            self.seen.append([view.state for view in views])
            if self.clock.now > until:
                pytest.fail(f"still waiting after {until} s: {self.seen[-1]}")

        follower.follow(show)
        return {arm: JobFile.read(self.folder.attempt(arm, 0).job_file) for arm in "ab"}


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_the_drivers_word_decides_whatever_the_scheduler_shows(stage: Stage) -> None:
    stage.cluster.script = {"x-a": [(0, RUNNING)], "x-b": [(0, RUNNING)]}
    stage.ends("a", 20)
    stage.ends("b", 40)
    stage.follow()
    assert 40 <= stage.clock.now <= 42


def test_an_outage_of_the_scheduler_is_waited_out(stage: Stage) -> None:
    stage.cluster.script = {name: [(0, RUNNING), (10, OUTAGE), (700, RUNNING)] for name in ("x-a", "x-b")}
    stage.ends("a", 800)
    stage.ends("b", 800)
    jobs = stage.follow()
    assert {job.state for job in jobs.values()} == {"done"}
    assert ["running", "running"] in stage.seen or ["waiting", "waiting"] in stage.seen


def test_a_job_that_ended_without_a_word_is_closed_with_the_schedulers_reason(stage: Stage) -> None:
    ended = JobStatus("ended", "NODE_FAIL", nodes=("node1",))
    stage.cluster.script = {"x-a": [(0, RUNNING), (30, ended)], "x-b": [(0, RUNNING)]}
    stage.ends("b", 60)
    jobs = stage.follow()
    assert jobs["a"].state == "failed"
    assert jobs["a"].reason == "a node of the job failed"
    assert jobs["a"].nodes == ["node1"]


def test_cancelled_behind_our_back(stage: Stage) -> None:
    stage.cluster.script = {
        "x-a": [(0, JobStatus("ended", "CANCELLED"))],
        "x-b": [(0, JobStatus("ended", "CANCELLED"))],
    }
    jobs = stage.follow()
    assert {(job.state, job.reason) for job in jobs.values()} == {("cancelled", "the job was cancelled")}


def test_files_that_appear_late_on_a_shared_file_system_are_waited_for(stage: Stage) -> None:
    ended = JobStatus("ended", "COMPLETED")
    stage.cluster.script = {"x-a": [(0, RUNNING), (20, ended)], "x-b": [(0, RUNNING), (20, ended)]}
    stage.ends("a", 27)
    stage.ends("b", 28)
    jobs = stage.follow()
    assert {job.state for job in jobs.values()} == {"done"}


def test_completing_is_not_ended(stage: Stage) -> None:
    completing = JobStatus("completing", "COMPLETING")
    stage.cluster.script = {"x-a": [(0, RUNNING), (10, completing)], "x-b": [(0, RUNNING)]}
    stage.ends("a", 90)
    stage.ends("b", 90)
    assert stage.follow()["a"].state == "done"


def test_a_job_absent_everywhere_ends_as_lost_and_never_as_done(stage: Stage) -> None:
    stage.cluster.script = {"x-a": [(0, RUNNING), (10, ABSENT)], "x-b": [(0, RUNNING)]}
    stage.ends("b", 20)
    jobs = stage.follow()
    assert jobs["a"].state == "lost"
    assert 125 <= stage.clock.now <= 150


def test_a_moment_of_absence_is_normal(stage: Stage) -> None:
    stage.cluster.script = {"x-a": [(0, ABSENT), (20, RUNNING)], "x-b": [(0, ABSENT), (20, RUNNING)]}
    stage.ends("a", 200)
    stage.ends("b", 200)
    assert {job.state for job in stage.follow().values()} == {"done"}


def test_markers_that_all_say_well_count_though_the_driver_died(stage: Stage) -> None:
    ended = JobStatus("ended", "FAILED")
    stage.cluster.script = {"x-a": [(0, ended)], "x-b": [(0, RUNNING)]}
    TaskMarker(task=0, exit_code=0).write(stage.folder.attempt("a", 0).marker(0))
    stage.ends("b", 5)
    jobs = stage.follow()
    assert jobs["a"].state == "done"
    assert jobs["a"].remark is not None


def test_one_poll_serves_all_jobs_and_backs_off_while_nothing_changes(stage: Stage) -> None:
    stage.cluster.script = {"x-a": [(0, RUNNING)], "x-b": [(0, RUNNING)]}
    stage.ends("a", 600)
    stage.ends("b", 600)
    stage.follow()
    gaps = [later - earlier for earlier, later in zip(stage.cluster.polls, stage.cluster.polls[1:], strict=False)]
    assert max(gaps) <= 31
    assert len(stage.cluster.polls) < 35


def test_a_change_resets_the_pace_of_polling(stage: Stage) -> None:
    pending = JobStatus("pending", "PENDING", "Priority")
    stage.cluster.script = {"x-a": [(0, RUNNING)], "x-b": [(0, pending), (300, RUNNING)]}
    stage.ends("a", 400)
    stage.ends("b", 400)
    stage.follow()
    after = [poll for poll in stage.cluster.polls if poll >= 300]
    assert after[1] - after[0] <= 3


def test_another_follower_takes_up_where_the_first_was_killed(stage: Stage) -> None:
    stage.cluster.script = {"x-a": [(0, RUNNING)], "x-b": [(0, RUNNING)]}
    follower = Follower(stage.cluster, stage.folder, Pace(), stage.clock, stage.clock.sleep)
    follower.poll_once()
    del follower
    stage.ends("a", 10)
    stage.ends("b", 10)
    assert stage.follow()["b"].state == "done"


def test_an_unreadable_job_file_is_not_taken_for_an_end(stage: Stage) -> None:
    stage.cluster.script = {"x-a": [(0, RUNNING)], "x-b": [(0, RUNNING)]}
    path = stage.folder.attempt("a", 0).job_file
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"schema_version": 1, "arm": "a", "state": "perhaps"}))
    stage.ends("a", 30)
    stage.ends("b", 30)
    assert stage.follow()["a"].state == "done"


def test_a_job_that_was_never_submitted_is_lost_and_not_waited_for(stage: Stage) -> None:
    # The command that was submitting died between the two.
    stage.cluster.script = {"x-a": [(0, RUNNING)]}
    (stage.folder.jobs_dir / "x-b" / "submitted.json").unlink()
    stage.ends("a", 20)
    jobs = stage.follow()
    assert jobs["a"].state == "done"
    assert jobs["b"].state == "lost"
    assert jobs["b"].reason is not None and "never submitted" in jobs["b"].reason


def test_a_job_that_is_submitted_while_it_is_followed_is_taken_up(stage: Stage) -> None:
    stage.cluster.script = {name: [(0, RUNNING)] for name in ("x-a", "x-b")}
    note = stage.folder.jobs_dir / "x-b" / "submitted.json"
    content = note.read_bytes()
    note.unlink()
    stage.clock.at(30, lambda: write_atomically(note, content))
    stage.ends("a", 100)
    stage.ends("b", 200)
    assert {job.state for job in stage.follow().values()} == {"done"}


def test_a_held_job_is_released_though_the_first_one_is_only_absent(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A site without accounting: the first job failed before its driver began, and squeue forgot it.
    placed: list[str] = []
    monkeypatch.setattr(follow, "place", lambda job, _placement, _nodes: placed.append(job) is None)
    spec = replace(JobSpec.read(stage.folder.jobs_dir / "x-a" / "spec.json"), follower="x-b", placement="disjoint")
    spec.write()
    stage.cluster.script = {"x-a": [(0, ABSENT)], "x-b": [(0, JobStatus("pending", "PENDING", "JobHeldUser"))]}
    stage.ends("b", 300)
    assert stage.follow()["a"].state == "lost"
    assert set(placed) == {"4102"}


def test_an_experiment_that_was_removed_is_not_made_anew(stage: Stage) -> None:
    stage.cluster.script = {name: [(0, RUNNING), (20, JobStatus("ended", "FAILED"))] for name in ("x-a", "x-b")}
    stage.clock.at(10, lambda: shutil.rmtree(stage.folder.path))
    with pytest.raises(ArchiveError, match="removed while its arms ran"):
        stage.follow()
    assert not stage.folder.path.exists()


def test_an_arm_of_several_attempts_is_shown_by_the_one_that_runs_and_over_with_the_last(tmp_path: Path) -> None:
    clock, seen = Clock(), []
    cluster = ScriptedCluster(clock, {"x-b": [(0, RUNNING)]})
    segments = [Segment("b", n, ["true"], {}, [], "/", "none", 1, 1, 5) for n in range(2)]
    cluster.submit(JobRequest(JobSpec("x-b", str(tmp_path), "slurm", "pinned", segments, WatchdogLimits()), 10, {}))
    folder = ExperimentFolder(tmp_path)
    began = {"jobs": ["1"], "started": "2026-01-01T00:00:00+00:00"}
    resumed = {"path": "/x/step-3", "step": 3}

    def write(number: int, **keys: object) -> Callable[[], None]:
        document = {"schema_version": 1, "arm": "b", "attempt": number, **began, **keys}
        return lambda: JobFile.model_validate(document).write(folder.attempt("b", number).job_file)

    clock.at(10, write(0, state="running"))
    clock.at(20, write(0, state="interrupted", ended="x"))
    clock.at(30, write(1, state="running", resumed_from=resumed))
    clock.at(40, write(1, state="done", resumed_from=resumed, ended="y"))
    follower = Follower(cluster, folder, Pace(look=1.0), clock, clock.sleep)
    follower.follow(lambda views: seen.append([(view.attempt, view.state, view.steps) for view in views]))
    told = list(dict.fromkeys(tuple(look) for look in seen))
    assert told == [
        ((0, "waiting", 0),),
        ((0, "running", 0),),
        ((1, "waiting", 0),),
        ((1, "running", 3),),
        ((1, "done", 3),),
    ]
    assert 40 <= clock.now <= 42


def test_a_requeued_job_is_hurried_and_its_end_without_a_word_is_the_planned_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, hurried = Clock(), []
    monkeypatch.setattr(follow, "start_now", hurried.append)
    waits = JobStatus("pending", "PENDING", "BeginTime")
    cluster = ScriptedCluster(clock, {"x-b": [(0, RUNNING), (10, waits), (20, JobStatus("ended", "NODE_FAIL"))]})
    how = {"kind": "requeue", "at_step": 4}
    segment = Segment("b", 0, ["true"], {}, [], "/", "none", 1, 1, 5, interrupt=how)
    cluster.submit(JobRequest(JobSpec("x-b", str(tmp_path), "slurm", "pinned", [segment], WatchdogLimits()), 10, {}))
    folder = ExperimentFolder(tmp_path)
    attempt = folder.attempt("b", 0)
    JobFile(arm="b", jobs=["1"], state="running", started="x").write(attempt.job_file)
    attempt.interrupt_dir.mkdir()
    attempt.interrupt(0).write_text('{"kind": "hold", "step": 4, "microbatch": 0}')
    Follower(cluster, folder, Pace(look=1.0, poll=2.0, grace=5.0), clock, clock.sleep).follow(lambda _: None)
    assert set(hurried) == {"4101"}
    job = JobFile.read(attempt.job_file)
    assert job.state == "interrupted"
    assert job.interruption is not None and (job.interruption.kind, job.interruption.step) == ("requeue", 4)
