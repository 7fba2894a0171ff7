"""What detrun needs of Slurm, held against the real cluster that slurm/local-cluster brings up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SLURM_FOLDER = Path(__file__).parents[2] / "slurm"


@pytest.fixture
def submit(mended_cluster, tmp_path):
    """Submits a batch script of the given lines; returns the job's id. It prints to `tmp_path/<id>.out`."""

    def submit_(*lines: str, options: tuple[str, ...] = ()) -> str:
        script = tmp_path / f"job-{time.monotonic_ns()}.sh"
        script.write_text("\n".join(["#!/bin/bash", *lines, ""]))
        output = f"--output={tmp_path}/%j.out"
        return mended_cluster.run_slurm("sbatch", "--parsable", output, *options, str(script)).strip()

    return submit_


def pid_of(cluster, daemon: str) -> int:
    return int((cluster.root / "run" / f"{daemon}.started").read_text().split()[0])


def test_a_job_runs_consecutive_steps_on_two_nodes(slurm_cluster, submit, tmp_path):
    step = "srun -N 2 -n 4 --kill-on-bad-exit=1 bash -c 'echo step $SLURM_STEP_ID on $SLURMD_NODENAME'"
    job = submit(step, step, options=("-N", "2", "-n", "4"))
    slurm_cluster.wait_for_state(job, "COMPLETED")
    # On a busy machine srun may add "step creation temporarily disabled, retrying".
    printed = (tmp_path / f"{job}.out").read_text()
    lines = [line for line in printed.splitlines() if not line.startswith("srun: ")]
    assert [line.split()[1] for line in lines] == ["0"] * 4 + ["1"] * 4, printed
    assert len({line.split()[3] for line in lines}) == 2


def test_a_killed_task_ends_its_step_at_once_and_the_next_step_runs(slurm_cluster, submit, tmp_path):
    job = submit(
        "srun -n 4 --kill-on-bad-exit=1 bash -c '[ $SLURM_PROCID = 1 ] && kill -KILL $$; sleep 60'",
        "echo first ended after $SECONDS",
        "srun -n 4 true && echo second ran",
        options=("-N", "2", "-n", "4"),
    )
    slurm_cluster.wait_for_state(job, "COMPLETED")
    printed = (tmp_path / f"{job}.out").read_text()
    assert int(printed.partition("first ended after ")[2].split()[0]) < 20
    assert "second ran" in printed


def test_nodes_claim_more_cpus_than_the_host_has_and_resolve(slurm_cluster):
    listing = slurm_cluster.run_slurm("sinfo", "-N", "-h", "-p", "debug", "-o", "%N %c").split()
    assert listing == [word for node in slurm_cluster.nodes for word in (node, "4")]
    hosts = Path("/etc/hosts").read_text().splitlines()
    assert all(any(node in line.split() for line in hosts) for node in slurm_cluster.nodes)


def test_squeue_finds_a_job_by_name_and_scancel_ends_it(slurm_cluster, submit):
    job = submit("sleep 60", options=("--job-name=by-name",))
    found = slurm_cluster.run_slurm("squeue", "-h", "--name=by-name", "-o", "%A")
    assert found.split() == [job]
    slurm_cluster.run_slurm("scancel", job)
    slurm_cluster.wait_for_state(job, "CANCELLED")


def test_a_requeued_job_keeps_its_id_and_starts_again(slurm_cluster, submit, tmp_path):
    marker = tmp_path / "starts"
    job = submit(
        f"echo start ${{SLURM_RESTART_COUNT:-0}} >> {marker}",
        "[ ${SLURM_RESTART_COUNT:-0} = 1 ] || sleep 60",
        options=("--requeue",),
    )
    slurm_cluster.wait_until(marker.exists)
    slurm_cluster.run_slurm("scontrol", "requeue", job)

    slurm_cluster.wait_until(lambda: slurm_cluster.jobs().get(job) == "PENDING")
    # Slurm would hold it back for two minutes. But slurmd refuses a job that starts in the second in which it killed
    # the old attempt ("already killed, do not launch"), and the job then counts as FAILED.
    time.sleep(2)
    slurm_cluster.run_slurm("scontrol", "update", f"JobId={job}", "StartTime=now")
    slurm_cluster.wait_for_state(job, "COMPLETED")
    assert marker.read_text().split() == ["start", "0", "start", "1"]


def test_there_is_a_default_partition_and_one_with_a_short_limit(slurm_cluster):
    limits = slurm_cluster.run_slurm("sinfo", "-h", "-o", "%P %l").splitlines()
    assert sorted(line.strip() for line in limits) == ["debug* infinite", "small 2:00"]


def test_a_node_set_down_fails_its_job_and_comes_back(slurm_cluster, submit):
    job = submit("srun sleep 60", options=("-N", "2", "-w", "node3,node4", "--no-requeue"))
    slurm_cluster.wait_until(lambda: slurm_cluster.jobs().get(job) == "RUNNING")
    slurm_cluster.node_down("node4")
    slurm_cluster.wait_for_state(job, "NODE_FAIL")
    slurm_cluster.node_up("node4")
    assert slurm_cluster.run_slurm("srun", "-w", "node4", "bash", "-c", "echo $SLURMD_NODENAME") == "node4\n"


def test_a_job_outlives_a_restart_of_the_controller(slurm_cluster, submit):
    job = submit("sleep 10")
    slurm_cluster.wait_until(lambda: slurm_cluster.jobs().get(job) == "RUNNING")
    slurm_cluster.restart_controller()
    assert job in slurm_cluster.jobs()
    slurm_cluster.wait_for_state(job, "COMPLETED")


def test_jobs_run_without_accounting_and_are_accounted_for_later(slurm_cluster, submit, tmp_path):
    slurm_cluster.stop_accounting()
    job = submit("echo ran")
    slurm_cluster.wait_until(lambda: (tmp_path / f"{job}.out").exists() and job not in slurm_cluster.jobs())
    slurm_cluster.start_accounting()
    slurm_cluster.wait_for_state(job, "COMPLETED")


def test_a_second_up_starts_only_what_is_missing(mended_cluster):
    controller, node = pid_of(mended_cluster, "slurmctld"), pid_of(mended_cluster, "node2")
    os.kill(node, signal.SIGKILL)
    mended_cluster.wait_until(lambda: mended_cluster.local_cluster("status", check=False).returncode == 3, 10)
    mended_cluster.local_cluster("up")
    assert pid_of(mended_cluster, "slurmctld") == controller
    assert pid_of(mended_cluster, "node2") != node
    assert mended_cluster.local_cluster("status").returncode == 0


def test_up_refuses_to_change_a_running_clusters_shape(slurm_cluster):
    refused = slurm_cluster.local_cluster("up", "--nodes", "2", check=False)
    assert refused.returncode == 2
    assert "has nodes=4" in refused.stderr


def test_a_cluster_beside_it_needs_no_accounting_and_down_leaves_nothing(slurm_cluster, tmp_path, monkeypatch):
    # Not under tmp_path: pytest's own folders are closed to the users that munge and MariaDB run as.
    beside = type(slurm_cluster)(slurm_cluster.root.with_name(f"{slurm_cluster.root.name}-beside"))
    beside.local_cluster("up", "--nodes", "2", "--no-accounting")
    try:
        with monkeypatch.context() as patch:
            patch.setenv("SLURM_CONF", str(beside.root / "etc" / "slurm.conf"))
            assert beside.run_slurm("srun", "-N", "2", "bash", "-c", "echo ran") == "ran\n" * 2
            # A daemonized process escapes Slurm's own tracking, and must not outlive the cluster.
            escape = f"(setsid bash -c 'echo $$ > {tmp_path}/escaped; exec sleep 600' &) ; sleep 600"
            beside.run_slurm("sbatch", "--output=/dev/null", f"--wrap={escape}")
            beside.wait_until((tmp_path / "escaped").exists)
    finally:
        beside.local_cluster("down")
        beside.root.with_name(f"{beside.root.name}.lock").unlink()
    assert not beside.root.exists()
    assert str(beside.root) not in Path("/etc/hosts").read_text()
    pid = int((tmp_path / "escaped").read_text())
    beside.wait_until(lambda: not Path(f"/proc/{pid}/cmdline").exists(), 10)
    assert slurm_cluster.local_cluster("status").returncode == 0


def test_a_root_that_the_daemons_cannot_reach_is_refused(slurm_cluster, tmp_path):
    tmp_path.chmod(0o700)
    refused = type(slurm_cluster)(tmp_path / "cluster").local_cluster("up", check=False)
    assert refused.returncode == 2
    assert "choose another --root" in refused.stderr
    assert not (tmp_path / "cluster").exists()


def test_without_root_or_packages_it_says_what_to_do():
    ask = "import os, sys; sys.path.insert(0, sys.argv[1]); from local_cluster import machine\n{}"
    scenes = {
        "os.setuid(65534); machine.require_root()": "hint: sudo ",
        "machine.PATH = '/nowhere'; os.environ['PATH'] = '/nowhere'; machine.ensure_packages(True)": "hint: install ",
    }
    for scene, hint in scenes.items():
        program = ask.format(scene)
        done = subprocess.run([sys.executable, "-c", program, str(SLURM_FOLDER)], capture_output=True, text=True)
        assert "UnsuitableMachineError" in done.stderr
        assert hint in done.stderr
