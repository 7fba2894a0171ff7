"""A cluster whose timeline is written down beforehand, for what the real one cannot be made to play."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from detrun.launch.cluster import JobRequest, JobStatus, SubmittedJob
from detrun.launch.submitted import write_submitted


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waiting: list[tuple[float, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        due = [entry for entry in self.waiting if entry[0] <= self.now]
        self.waiting = [entry for entry in self.waiting if entry[0] > self.now]
        for _, action in due:
            action()

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Has something happen once that time has come."""
        self.waiting.append((when, action))


@dataclass
class ScriptedCluster:
    """Answers each poll with what the script says of that moment.

    script: by job name, (from when on, status) in order of time.
    """

    clock: Clock
    script: dict[str, list[tuple[float, JobStatus]]] = field(default_factory=dict)
    name: str = "slurm"
    polls: list[float] = field(default_factory=list)
    requests: list[JobRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    refuse: Exception | None = None

    def submit(self, request: JobRequest) -> SubmittedJob:
        if self.refuse is not None and self.requests:
            raise self.refuse
        self.requests.append(request)
        request.spec.write()
        job = SubmittedJob(request.spec.job, str(4100 + len(self.requests)), 0.0, {})
        write_submitted(request.spec.folder, job)
        return job

    def poll(self, jobs: Sequence[SubmittedJob]) -> dict[str, JobStatus]:
        self.polls.append(self.clock.now)
        answers = {}
        for job in jobs:
            status = JobStatus("pending", "PENDING")
            for since, then in self.script.get(job.name, []):
                if since <= self.clock.now:
                    status = then
            answers[job.name] = status
        return answers

    def cancel(self, jobs: Sequence[SubmittedJob]) -> None:
        self.cancelled += [job.id for job in jobs]
