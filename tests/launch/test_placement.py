"""What is asked of Slurm to give the second job its nodes, told by a scontrol that only writes it down."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from detrun.launch import placement
from detrun.launch.cluster import SubmittedJob
from detrun.launch.spec import JobSpec, Segment, WatchdogLimits
from detrun.launch.submitted import write_submitted


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with what scontrol was asked, a line a call."""
    log = tmp_path / "asked"
    log.touch()
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >>"{log}"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(scontrol.parent), os.environ["PATH"]]))
    return log


def test_pinned_names_the_first_jobs_nodes(asked: Path) -> None:
    assert placement.place("7", "pinned", ["node1", "node2"])
    assert asked.read_text() == "update JobId=7 ReqNodeList=node1,node2\n"


def test_disjoint_excludes_them_and_only_then_lifts_the_hold(asked: Path) -> None:
    assert placement.place("7", "disjoint", ["node1"])
    assert asked.read_text() == "update JobId=7 ExcNodeList=node1\nrelease 7\n"


def test_nodes_that_nobody_knows_are_not_excluded_but_the_job_is_released(asked: Path) -> None:
    assert placement.place("7", "disjoint", [])
    assert asked.read_text() == "release 7\n"


def test_a_scontrol_that_is_not_there_is_no_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(placement, "time", SimpleNamespace(sleep=lambda _seconds: None))
    assert not placement.place("7", "pinned", ["node1"])


def test_the_following_job_is_waited_for_until_it_is_submitted(
    asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = Segment("a", 0, ["true"], {}, [], "/", "none", 1, 1, 5)
    spec = JobSpec("x-a", str(tmp_path), "slurm", "pinned", [segment], WatchdogLimits(), follower="x-b")
    folder = tmp_path / "jobs" / "x-b"
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            folder.mkdir(parents=True)
            write_submitted(folder, SubmittedJob("x-b", "8", 0.0, {}))

    monkeypatch.setattr(placement, "time", SimpleNamespace(sleep=nap, monotonic=time.monotonic))
    assert placement.settle_follower(spec, ["node3"])
    assert len(naps) == 3
    assert asked.read_text() == "update JobId=8 ReqNodeList=node3\n"
