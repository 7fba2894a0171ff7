"""Slurm as a cluster: jobs go in through submitit, their state comes from squeue, and sacct fills in."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from detrun.errors import ClusterError
from detrun.launch.cluster import JobRequest, JobStatus, SubmittedJob
from detrun.launch.queue import SACCT_FORMAT, SQUEUE_FORMAT, parse_sacct, parse_squeue
from detrun.launch.submit import submit

COMMANDS = ("sbatch", "squeue", "scancel", "srun", "scontrol")
PATIENCE = 20.0
_DEFAULTS = ("SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_")


def slurm_installed() -> bool:
    """Whether this host has Slurm's commands."""
    return all(shutil.which(command) is not None for command in COMMANDS)


def slurm_answers() -> bool:
    """Whether this host has Slurm's commands and a controller that answers them."""
    if not slurm_installed():
        return False
    try:
        return _run(["scontrol", "ping"]).returncode == 0
    except ClusterError:
        return False


class SlurmCluster:
    """Runs jobs through Slurm. A site without accounting works on markers and squeue alone."""

    name = "slurm"

    def __init__(self) -> None:
        self._accounting = shutil.which("sacct") is not None

    def submit(self, request: JobRequest) -> SubmittedJob:
        return submit(request, "slurm", os.environ)

    def poll(self, jobs: Sequence[SubmittedJob]) -> dict[str, JobStatus]:
        """One squeue for all jobs, by name: a purged id would fail the whole question, a name does not.

        What squeue no longer shows is asked of sacct. A scheduler or accounting that does not answer
        leaves the job `unknown`.
        """
        if not jobs:
            return {}
        names = ",".join(job.name for job in jobs)
        try:
            shown = _run(["squeue", "--noheader", "--states=all", f"--name={names}", f"--format={SQUEUE_FORMAT}"])
        except ClusterError as error:
            return {job.name: JobStatus("unknown", reason=error.what) for job in jobs}
        if shown.returncode != 0:
            reason = _last_line(shown.stderr) or f"squeue exited with code {shown.returncode}"
            return {job.name: JobStatus("unknown", reason=reason) for job in jobs}
        queued = parse_squeue(shown.stdout)
        gone = [job for job in jobs if job.id not in queued]
        told, outage = self._ask_accounting(gone) if gone else ({}, "")
        absent = JobStatus("unknown", reason=outage)
        return {job.name: queued.get(job.id) or told.get(job.id) or absent for job in jobs}

    def cancel(self, jobs: Sequence[SubmittedJob]) -> None:
        """Ends every job it can, then raises ClusterError if there is one that it could not."""
        failed = []
        for job in jobs:
            try:
                done = _run(["scancel", job.id])
            except ClusterError as error:
                failed.append(f"job {job.id}: {error.what}")
                continue
            # A job that is gone, or going, is what was wanted.
            if done.returncode != 0 and not any(word in done.stderr for word in ("Invalid job id", "already complet")):
                failed.append(f"job {job.id}: {_last_line(done.stderr)}")
        if failed:
            raise ClusterError(
                f"not every job could be cancelled: {'; '.join(failed)}",
                hint="squeue shows whether they still run; detrun cancel may be given again",
            )

    def _ask_accounting(self, jobs: Sequence[SubmittedJob]) -> tuple[dict[str, JobStatus], str]:
        """What sacct says of the jobs, and why it could not be asked where it has no answer at this moment."""
        if not self._accounting:
            return {}, ""
        # Ids are used again after a controller reset: names and the time of submission make it ours.
        since = datetime.fromtimestamp(min(job.submitted for job in jobs) - 60).strftime("%Y-%m-%dT%H:%M:%S")
        names = ",".join(job.name for job in jobs)
        try:
            told = _run(["sacct", "-n", "-P", "-X", "-D", "-S", since, f"--name={names}", f"--format={SACCT_FORMAT}"])
        except ClusterError as error:
            return {}, error.what
        if told.returncode != 0:
            # "accounting storage is disabled" stays so; an outage of slurmdbd is asked about again.
            self._accounting = "disabled" not in told.stderr
            return {}, (_last_line(told.stderr) or "sacct does not answer") if self._accounting else ""
        return parse_sacct(told.stdout), ""


@dataclass(frozen=True)
class Partition:
    """What a partition allows a job: minutes (None: no limit, or not told) and how many nodes it has (likewise)."""

    minutes: float | None = None
    nodes: int | None = None


def describe_partition(partition: str | None) -> Partition:
    """The limits of a partition, the default one for None. Raises ClusterError if Slurm knows no such partition."""
    if partition and "," in partition:
        return Partition()  # Slurm takes whichever of them is free first
    shown = _run(["sinfo", "--noheader", "--format=%R|%P|%l|%D", *([f"--partition={partition}"] if partition else [])])
    rows = [line.split("|") for line in shown.stdout.splitlines() if line.count("|") == 3]
    if shown.returncode != 0 and not rows:
        raise ClusterError(f"sinfo: {_last_line(shown.stderr) or f'exit code {shown.returncode}'}", hint="see sinfo")
    if partition and not rows:
        known = _run(["sinfo", "--noheader", "--format=%R"]).stdout.split()
        raise ClusterError(
            f"Slurm has no partition {partition}",
            hint=f"partitions here: {', '.join(dict.fromkeys(known))}" if known else "see sinfo",
        )
    ours = [row for row in rows if partition or row[1].endswith("*")]
    if not ours:
        return Partition()
    # One row for each state that nodes of the partition are in.
    return Partition(minutes_of(ours[0][2]), sum(int(row[3]) for row in ours if row[3].isdigit()) or None)


def minutes_of(text: str) -> float | None:
    """Slurm's `[D-]HH:MM:SS`, `MM:SS` or minutes; None for `infinite` and what is no time."""
    days, _, clock = text.strip().rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in parts) or (days and not days.isdigit()):
        return None
    numbers = [int(part) for part in parts]
    if days:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 1:
        hours, minutes, seconds = 0, numbers[0], 0
    elif len(numbers) == 2:
        hours, minutes, seconds = 0, numbers[0], numbers[1]
    else:
        hours, minutes, seconds = numbers[:3]
    return (int(days) if days else 0) * 1440 + hours * 60 + minutes + seconds / 60


def _run(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    # A user's own defaults (SQUEUE_PARTITION, SCANCEL_INTERACTIVE, …) would filter or hold up what is asked here.
    env = {name: value for name, value in os.environ.items() if not name.startswith(_DEFAULTS)}
    try:
        return subprocess.run(
            argv,
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
            stdin=subprocess.DEVNULL,
            env=env,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"{argv[0]} did not answer: {error}", hint="is this a login node of the cluster?") from None


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
