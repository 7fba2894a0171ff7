"""This machine as a cluster: submitit's local executor."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress

import psutil

from detrun.errors import ClusterError
from detrun.launch.cluster import JobRequest, JobStatus, SubmittedJob
from detrun.launch.submit import submit
from detrun.records.processes import boot_id, describe_process

CANCEL_GRACE = 20.0


class LocalCluster:
    """Runs jobs as processes of this machine."""

    name = "local"

    def submit(self, request: JobRequest) -> SubmittedJob:
        return submit(request, "local", os.environ)

    def poll(self, jobs: Sequence[SubmittedJob]) -> dict[str, JobStatus]:
        return {job.name: _status(job) for job in jobs}

    def cancel(self, jobs: Sequence[SubmittedJob]) -> None:
        for job in jobs:
            if elsewhere := _elsewhere(job):
                raise ClusterError(f"job {job.id} runs on {elsewhere}", hint=f"run detrun cancel on {elsewhere}")
        processes = [process for job in jobs if (process := _process(job))]
        for process in processes:
            # submitit's controller passes it on to our driver, which ends the ranks and writes it down.
            with suppress(psutil.NoSuchProcess):
                try:
                    process.terminate()
                except psutil.AccessDenied:
                    raise ClusterError(
                        f"job {process.pid} may not be ended by this user", hint="whoever started it may"
                    ) from None
        _, alive = psutil.wait_procs(processes, timeout=CANCEL_GRACE)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                for child in process.children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        child.kill()
                process.kill()


def _status(job: SubmittedJob) -> JobStatus:
    if elsewhere := _elsewhere(job):
        # No process of that number here says nothing about the job.
        return JobStatus("unknown", reason=f"it runs on {elsewhere} and can be asked only there")
    return JobStatus("running" if _process(job) else "ended")


def _elsewhere(job: SubmittedJob) -> str | None:
    """The machine of a job that does not run on this one; the same name with another boot is a restart."""
    detail = job.detail or {}
    host = detail.get("host")
    return host if detail.get("boot") != boot_id() and host not in (None, socket.gethostname()) else None


def _process(job: SubmittedJob) -> psutil.Process | None:
    """The job's controller, unless it is gone or its number belongs to somebody else by now."""
    try:
        process = psutil.Process(int(job.id))
        same = describe_process(process.pid) == job.detail
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.Error, OSError, IndexError):
        return None
