"""Which process a job is, on this machine and on another one."""

from __future__ import annotations

import os
import subprocess

import psutil
import pytest

from detrun.errors import ClusterError
from detrun.launch.cluster import SubmittedJob
from detrun.launch.local import LocalCluster, describe_process


def job(pid: int, **more: str) -> SubmittedJob:
    return SubmittedJob("x", str(pid), 0.0, {**describe_process(os.getpid()), **more})


def state(job: SubmittedJob) -> str:
    return LocalCluster().poll([job])["x"].state


def test_a_running_job_runs_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    running = job(os.getpid())
    monkeypatch.setattr(psutil, "boot_time", lambda: 12.0)
    monkeypatch.setattr(psutil.Process, "create_time", lambda _self: 34.0)
    assert state(running) == "running"


def test_a_number_that_belongs_to_another_process_by_now_is_an_end() -> None:
    assert state(job(os.getpid(), start="1")) == "ended"


def test_a_process_that_is_gone_is_an_end() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert state(job(gone.pid)) == "ended"


def test_a_restart_of_this_machine_ended_the_job() -> None:
    assert state(job(os.getpid(), boot="before")) == "ended"


def test_a_job_of_another_machine_is_not_judged_from_here() -> None:
    elsewhere = job(os.getpid(), boot="theirs", host="far-away")
    status = LocalCluster().poll([elsewhere])["x"]
    assert status.state == "unknown" and "far-away" in status.reason
    with pytest.raises(ClusterError, match="far-away"):
        LocalCluster().cancel([elsewhere])


def test_a_job_that_this_user_may_not_end_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: psutil.Process) -> None:
        raise psutil.AccessDenied(self.pid)

    monkeypatch.setattr(psutil.Process, "terminate", denied)
    with pytest.raises(ClusterError, match="may not be ended by this user"):
        LocalCluster().cancel([job(os.getpid())])


def test_a_job_that_ends_by_itself_while_it_is_cancelled_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    going = subprocess.Popen(["sleep", "60"], start_new_session=True)

    def too_late(self: psutil.Process) -> None:
        going.kill()
        going.wait()
        raise psutil.NoSuchProcess(self.pid)

    monkeypatch.setattr(psutil.Process, "terminate", too_late)
    LocalCluster().cancel([SubmittedJob("x", str(going.pid), 0.0, describe_process(going.pid))])
