"""This machine as a cluster: submitit's local executor."""

from __future__ import annotations

import os
from collections.abc import Sequence

import psutil

from detrun.launch.cluster import JobRequest, JobStatus, SubmittedJob
from detrun.launch.submit import submit

CANCEL_GRACE = 20.0


class LocalCluster:
    """Runs jobs as processes of this machine."""

    name = "local"

    def submit(self, request: JobRequest) -> SubmittedJob:
        return submit(request, "local", os.environ)

    def poll(self, jobs: Sequence[SubmittedJob]) -> dict[str, JobStatus]:
        return {job.name: JobStatus("running" if _process(job) else "ended") for job in jobs}

    def cancel(self, jobs: Sequence[SubmittedJob]) -> None:
        processes = [process for job in jobs if (process := _process(job))]
        for process in processes:
            # submitit's controller passes it on to our driver, which ends the ranks and writes it down.
            process.terminate()
        _, alive = psutil.wait_procs(processes, timeout=CANCEL_GRACE)
        for process in alive:
            for child in [*process.children(recursive=True), process]:
                child.kill()


def _process(job: SubmittedJob) -> psutil.Process | None:
    """The job's controller, unless it is gone or its number belongs to somebody else by now."""
    try:
        process = psutil.Process(int(job.id))
        same = abs(process.create_time() - float((job.detail or {}).get("created", "0"))) < 1.0
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None
