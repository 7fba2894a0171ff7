"""Waits for the arms of an experiment: what the driver wrote decides how an arm ended, the scheduler whether it lives.

Nothing here is needed for the jobs to go on: the command may die at any moment, and another one follows
the same folder from where things stand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone

from detrun.errors import ArchiveError, RecordError
from detrun.launch.attempts import planned_end
from detrun.launch.cluster import Cluster, JobStatus, SubmittedJob
from detrun.launch.outcome import last_steps, outcome_of, tail
from detrun.launch.placement import place, start_now
from detrun.launch.spec import JobSpec, Segment
from detrun.launch.submitted import read_submitted
from detrun.records.jobs import FINAL_STATES, JobFile, JobState
from detrun.records.layout import AttemptFolder, ExperimentFolder
from detrun.report.live import ArmView

FINAL = FINAL_STATES

# Scheduler's words for an end that our driver had no chance to write down.
_WORDS: dict[str, tuple[JobState, str]] = {
    "CANCELLED": ("cancelled", "the job was cancelled"),
    "TIMEOUT": ("failed", "the job ran into its time limit (slurm.time)"),
    "DEADLINE": ("failed", "the job ran into its deadline"),
    "NODE_FAIL": ("failed", "a node of the job failed"),
    "BOOT_FAIL": ("failed", "a node of the job did not boot"),
    "OUT_OF_MEMORY": ("failed", "the job ran out of memory"),
    "PREEMPTED": ("failed", "the job was preempted"),
}


@dataclass(frozen=True)
class Pace:
    """Seconds between looks. at_rest: how long polls may back off to; grace: from a job's end to its last file
    being visible; lost: absence everywhere that counts as a loss."""

    look: float = 0.25
    poll: float = 1.0
    at_rest: float = 30.0
    grace: float = 6.0
    lost: float = 120.0

    @classmethod
    def of(cls, cluster: str) -> Pace:
        """What suits a cluster: a scheduler is asked seldom, this machine often."""
        if cluster == "slurm":
            return cls(look=1.0, poll=2.0, at_rest=30.0, grace=10.0)
        return cls(look=0.2, poll=0.5, at_rest=2.0, grace=2.0, lost=60.0)


@dataclass
class _Job:
    spec: JobSpec
    submitted: SubmittedJob | None
    status: JobStatus = field(default_factory=lambda: JobStatus("unknown"))
    gone_since: float | None = None
    absent_since: float | None = None


def read_jobs(folder: ExperimentFolder) -> list[tuple[JobSpec, SubmittedJob | None]]:
    """The jobs of an experiment in the order in which they were planned, with their ids if submitted."""
    specs = sorted(folder.jobs_dir.glob("*/spec.json"))
    found = [(JobSpec.read(path), read_submitted(path.parent)) for path in specs]
    return sorted(found, key=lambda job: [(segment.arm, segment.attempt) for segment in job[0].segments])


class Follower:
    """Follows one experiment until every attempt of every arm has ended."""

    def __init__(
        self,
        cluster: Cluster,
        folder: ExperimentFolder,
        pace: Pace | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.cluster = cluster
        self.folder = folder
        self.pace = pace or Pace()
        self.clock = clock
        self.sleep = sleep
        self.jobs = [_Job(spec, submitted) for spec, submitted in read_jobs(folder)]
        self._next_poll = 0.0
        self._interval = self.pace.poll

    def follow(self, show: Callable[[Sequence[ArmView]], None]) -> None:
        """Returns when no arm can change any more; `show` is called at every look."""
        while True:
            views = self.look()
            show(views)
            if all(view.state in FINAL for view in views):
                return
            self.sleep(self.pace.look)

    def look(self) -> list[ArmView]:
        """Every arm as it stands now; the scheduler is asked where that is due."""
        if self.clock() >= self._next_poll:
            self._poll()
        return self.views()

    def views(self) -> list[ArmView]:
        """Every arm as it stands on disk, completed by what the scheduler says: its first attempt that has not ended,
        else its last."""
        views: dict[str, ArmView] = {}
        for job in self.jobs:
            for segment in job.spec.segments:
                shown = views.get(segment.arm)
                if shown is None or shown.state in FINAL:
                    views[segment.arm] = self._view(job, segment)
        return list(views.values())

    def poll_once(self) -> None:
        """Asks the scheduler now."""
        self._poll()

    def _poll(self) -> None:
        known = [job.submitted for job in self.jobs if job.submitted]
        before = [(job.status.state, job.status.reason) for job in self.jobs]
        answers = self.cluster.poll(known)
        now = self.clock()
        for job in self.jobs:
            if job.submitted is None:
                job.submitted = read_submitted(job.spec.folder)
                # The command that was submitting may have died before it came to this job, and nobody else will.
                job.absent_since = None if job.submitted else (job.absent_since or now)
                continue
            answer = answers.get(job.submitted.name, JobStatus("unknown"))
            # Absent is the scheduler's word ("I know no such job"); an outage has a reason and is waited out.
            absent = answer.state == "unknown" and not answer.reason
            job.absent_since = (job.absent_since or now) if absent else None
            job.gone_since = (job.gone_since or now) if answer.state == "ended" else None
            if answer.state != "unknown" or job.status.state == "unknown":
                job.status = answer
        self._settle_placement()
        self._hurry_requeued()
        changed = before != [(job.status.state, job.status.reason) for job in self.jobs]
        self._interval = self.pace.poll if changed else min(self._interval * 1.5, self.pace.at_rest)
        if any(job.gone_since is not None or job.absent_since is not None for job in self.jobs):
            self._interval = self.pace.poll
        self._next_poll = now + self._interval

    def _settle_placement(self) -> None:
        """Releases a job that is still held because the one before it ended without placing it."""
        by_name = {job.spec.job: job for job in self.jobs}
        for job in self.jobs:
            next_job = by_name.get(job.spec.follower or "")
            # A job that is absent for long enough is gone too: without accounting nobody says when it ended.
            if next_job is None or next_job.submitted is None or not (job.gone_since is not None or self._lost(job)):
                continue
            if next_job.status.state == "pending" and next_job.status.reason.startswith("JobHeld"):
                place(next_job.submitted.id, job.spec.placement, job.status.nodes)

    def _hurry_requeued(self) -> None:
        """A job that was requeued by plan need not wait in the queue for as long as Slurm would have it."""
        for job in self.jobs:
            kinds = {(segment.interrupt or {}).get("kind") for segment in job.spec.segments}
            planned = kinds & {"requeue", "node-failure"}
            if planned and job.submitted and job.status.state == "pending" and job.status.reason == "BeginTime":
                start_now(job.submitted.id)

    def _view(self, job: _Job, segment: Segment) -> ArmView:
        attempt = self.folder.attempt(segment.arm, segment.attempt)
        file = _read(attempt)
        if file is None or file.state not in FINAL:
            file = self._close_if_gone(job, segment, attempt, file)
        steps = min(last_steps(attempt, segment, _sample(segment)).values(), default=0)
        resumed = file.resumed_from if file else None
        waits = "waiting" if job.status.state in {"running", "completing"} else job.status.state
        state = file.state if file else waits
        return ArmView(
            segment.arm,
            state,
            max(steps, resumed.step) if resumed else steps,
            job.submitted.id if job.submitted else None,
            job.status.word,
            # What the scheduler says of a job that waits is no news once the arm has ended.
            (file.reason or "") if file and file.state in FINAL else job.status.reason,
            job.status.start,
            file.started if file else None,
            file.ended if file else None,
            tuple(file.nodes) if file else job.status.nodes,
            segment.attempt,
            resumed.step if resumed else None,
        )

    def _lost(self, job: _Job) -> bool:
        return job.absent_since is not None and self.clock() - job.absent_since >= self.pace.lost

    def _close_if_gone(
        self, job: _Job, segment: Segment, attempt: AttemptFolder, file: JobFile | None
    ) -> JobFile | None:
        """Writes job.json in the driver's stead, once the job is certainly gone and its files had time to appear."""
        now = self.clock()
        gone = job.gone_since is not None and now - job.gone_since >= self.pace.grace
        lost = self._lost(job)
        if not (gone or lost):
            return file
        last = _read(attempt)  # the driver's last word may have appeared within the grace
        if last is not None and last.state in FINAL:
            return last
        if not self.folder.jobs_dir.is_dir():
            raise ArchiveError(
                "the experiment's folder was removed while its arms ran",
                where=str(self.folder),
                hint="what they recorded is lost; start the experiment again",
            )
        closed = last or JobFile(arm=segment.arm, attempt=segment.attempt)
        closed.jobs = closed.jobs or ([job.submitted.id] if job.submitted else [])
        closed.nodes = closed.nodes or list(job.status.nodes)
        closed.ended = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        log = _job_log(job, self.folder)
        closed.log, closed.log_tail = log, tail(self.folder.path / log) if log else []
        outcome = outcome_of(attempt, segment, None, self.folder.path)
        if outcome.state == "done":
            closed.state, closed.exit_code = "done", 0
            closed.remark = "the job ended before it could say so itself; every task's marker says that it ended well"
        elif lost and job.submitted is None:
            closed.state, closed.reason = "lost", "its job was never submitted: the command that would have was stopped"
        elif lost:
            closed.state, closed.reason = "lost", "the scheduler knows the job no more, and it left no word"
        else:
            word = job.status.word
            planned = planned_end(attempt, segment, by_time=word == "TIMEOUT")
            if planned is not None:
                closed.state, closed.interruption = "interrupted", planned
                closed.write(attempt.job_file)
                return closed
            closed.state, closed.reason = _WORDS.get(word, ("failed", _no_word(last, word)))
        closed.write(attempt.job_file)
        return closed


def _no_word(file: JobFile | None, word: str) -> str:
    said = f" ({word})" if word else ""
    if file is None:
        return f"the job ended{said} before the arm began"
    return f"the job ended{said} while the arm ran, and it left no word"


def _job_log(job: _Job, folder: ExperimentFolder) -> str | None:
    if job.submitted is None:
        return None
    path = job.spec.folder / f"{job.submitted.id}_0_log.out"
    return path.relative_to(folder.path).as_posix() if path.exists() else None


def _read(attempt: AttemptFolder) -> JobFile | None:
    try:
        return JobFile.read(attempt.job_file)
    except RecordError:
        return None


def _sample(segment: Segment) -> list[int]:
    """Ranks whose files are looked at for the display: all of few, some of many."""
    if segment.ranks <= 16:
        return list(range(segment.ranks))
    return sorted({0, segment.ranks - 1, *range(0, segment.ranks, max(1, segment.ranks // 8))})
