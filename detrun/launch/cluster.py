"""What detrun asks of a cluster: submit a job, say how it stands, end it.

Slurm and this machine implement it; tests have a scripted one. A cluster reports *liveness*. How an
attempt *ended* is read from the marker files that our wrapper writes, since schedulers fold exit codes
and forget states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from detrun.launch.spec import JobSpec

# `unknown`: the scheduler could not be asked, or did not know the job at this moment.
JobState = Literal["pending", "running", "completing", "ended", "unknown"]


@dataclass(frozen=True)
class SubmittedJob:
    """A job that was submitted: its name in the experiment and the scheduler's id. submitted: unix time."""

    name: str
    id: str
    submitted: float
    detail: dict[str, str] | None = None


@dataclass(frozen=True)
class JobStatus:
    """How a job stands. word: the scheduler's own state word; reason and start: while it waits."""

    state: JobState
    word: str = ""
    reason: str = ""
    nodes: tuple[str, ...] = ()
    start: str = ""
    exit: str = ""

    @property
    def alive(self) -> bool:
        """Unknown counts as alive: an outage of the scheduler is waited out, not taken for an end."""
        return self.state != "ended"


@dataclass(frozen=True)
class JobRequest:
    """A job to submit: its frozen specification, and what it asks of the scheduler.

    options: raw sbatch options, setup: shell lines before the driver. after: the job that has to end
    first. hold: not to start before it is released (its nodes depend on the other job's). requeue: the
    scheduler may start it again, as its driver knows where it left off.
    """

    spec: JobSpec
    minutes: int
    options: dict[str, object]
    setup: tuple[str, ...] = ()
    after: str | None = None
    hold: bool = False
    requeue: bool = False


class Cluster(Protocol):
    """A place that runs jobs."""

    name: str

    def submit(self, request: JobRequest) -> SubmittedJob:
        """Submits and returns at once. Raises InfrastructureError with the scheduler's own words."""

    def poll(self, jobs: Sequence[SubmittedJob]) -> dict[str, JobStatus]:
        """One question for all jobs; the answer by job name. Never raises for an outage."""

    def cancel(self, jobs: Sequence[SubmittedJob]) -> None:
        """Ends the jobs; those already gone are no error."""
