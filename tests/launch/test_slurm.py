"""Slurm's commands as they misbehave, played by stubs that stand first on PATH."""

from __future__ import annotations

from pathlib import Path

import pytest

from detrun.errors import ClusterError
from detrun.launch import slurm
from detrun.launch.cluster import SubmittedJob
from detrun.launch.slurm import SlurmCluster, describe_partition

JOBS = [SubmittedJob("x-a", "11", 1.7e9, {}), SubmittedJob("x-b", "12", 1.7e9, {})]


class Stubs:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, command: str, script: str) -> None:
        path = self.folder / command
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stubs:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    made = Stubs(tmp_path)
    made.put("squeue", "exit 0")
    made.put("sacct", "exit 0")
    return made


@pytest.mark.parametrize("script", ["exec sleep 30", "echo 'squeue: error: no controller' >&2; exit 1", "exit 1"])
def test_a_queue_that_does_not_answer_is_an_outage_and_no_absence(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    monkeypatch.setattr(slurm, "PATIENCE", 0.5)
    stubs.put("squeue", script)
    assert {status.state for status in SlurmCluster().poll(JOBS).values()} == {"unknown"}
    assert all(status.reason for status in SlurmCluster().poll(JOBS).values())


def test_an_outage_of_accounting_is_no_absence_either(stubs: Stubs) -> None:
    stubs.put("sacct", "echo 'sacct: error: Unable to connect to database' >&2; exit 1")
    status = SlurmCluster().poll(JOBS)["x-a"]
    assert (status.state, status.reason) == ("unknown", "sacct: error: Unable to connect to database")


def test_a_site_without_accounting_knows_a_purged_job_no_more(stubs: Stubs) -> None:
    stubs.put("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    status = SlurmCluster().poll(JOBS)["x-a"]
    assert (status.state, status.reason) == ("unknown", "")


def test_bytes_that_are_no_text_are_survived(stubs: Stubs) -> None:
    stubs.put("squeue", r"printf '\377\376|x\n11|RUNNING|node1|N/A|None\n'")
    assert SlurmCluster().poll(JOBS)["x-a"].state == "running"


def test_a_users_own_defaults_do_not_filter_the_answers(stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_PARTITION", "elsewhere")
    stubs.put("squeue", '[ -z "$SQUEUE_PARTITION" ] && echo "11|RUNNING|node1|N/A|None"')
    assert SlurmCluster().poll(JOBS)["x-a"].state == "running"


def test_a_job_that_cannot_be_cancelled_is_told_after_the_others_were(stubs: Stubs, tmp_path: Path) -> None:
    stubs.put("scancel", f'echo "$1" >>{tmp_path}/asked; echo "scancel: error: Access denied" >&2; exit 1')
    with pytest.raises(ClusterError, match="job 11: scancel: error: Access denied; job 12"):
        SlurmCluster().cancel(JOBS)
    assert (tmp_path / "asked").read_text().split() == ["11", "12"]


def test_a_job_that_is_gone_counts_as_cancelled(stubs: Stubs) -> None:
    stubs.put("scancel", 'echo "scancel: error: Kill job error on job id $1: Invalid job id specified" >&2; exit 1')
    SlurmCluster().cancel(JOBS)


def test_a_failing_sinfo_is_not_taken_for_a_missing_partition(stubs: Stubs) -> None:
    stubs.put("sinfo", "echo 'slurm_load_partitions: no route' >&2; exit 1")
    with pytest.raises(ClusterError, match="sinfo: slurm_load_partitions: no route"):
        describe_partition("gpu")
