"""What the driver asks of the machine that its job runs on: nodes, cores, a free port, its own family of processes."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import time
from contextlib import closing, suppress

import psutil

from detrun.launch.placement import ask, run_quietly
from detrun.launch.queue import expand_nodes
from detrun.launch.wrapper import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG

STEP_PATIENCE = 40.0


def stay_with_the_family() -> None:
    """On one machine: end with the controller that started us, and adopt ranks whose wrapper died.

    Slurm does both for a job; here a process that is killed would leave its children running on.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_descendants(patience: float) -> None:
    """Until none is left; one that is just being started may slip through a round."""
    for _ in range(5):
        family = psutil.Process().children(recursive=True)
        if not family:
            return
        for process in family:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(family, timeout=patience)  # they are ours by now, and ours to collect


def signal_tree(pid: int, number: signal.Signals) -> None:
    """Signals a process and all its descendants; ranks sit in sessions of their own, so a group is not enough."""
    try:
        root = psutil.Process(pid)
        family = [*root.children(recursive=True), root] if number == signal.SIGKILL else [root]
    except psutil.NoSuchProcess:
        return
    for process in family:
        try:
            process.send_signal(number)
        except psutil.Error:
            continue


def wait_for_step(job: str, step: int) -> None:
    """Returns once Slurm knows no process of the step any more, or after STEP_PATIENCE seconds without an answer."""
    name, insisted = f"{job}.{step}", False
    began = time.monotonic()
    while time.monotonic() - began < STEP_PATIENCE:
        told = ask(["squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i"])
        if told is not None and name not in told.split():
            return
        if not insisted and time.monotonic() - began > STEP_PATIENCE / 4:
            insisted = True
            run_quietly(["scancel", "--signal=KILL", name])
        time.sleep(0.5)


def job_nodes() -> list[str]:
    """The names of the job's nodes; of this machine where it is no Slurm job."""
    nodelist = os.environ.get("SLURM_JOB_NODELIST")
    if not nodelist:
        return [socket.gethostname()]
    return expand_nodes(nodelist) or [nodelist]


def cores() -> int:
    """Cores of this node that the job may use."""
    on_node = os.environ.get("SLURM_CPUS_ON_NODE", "")
    return int(on_node) if on_node.isdigit() else len(os.sched_getaffinity(0))


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
