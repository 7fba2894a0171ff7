"""Runs inside a job, once: starts each attempt in turn, watches it, and writes down how it ended.

submitit calls `run_job` with the path of the job's specification, in the batch step on Slurm and in a
plain process on one machine. All it knows is in that file; all it says goes into the experiment's folder. A job that
the scheduler starts again goes on with the first attempt that has not ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType

from detrun.errors import DetrunError, RecordError
from detrun.launch.attempts import AttemptRefused, close_attempt, planned_end, start_of, take_along
from detrun.launch.command import srun_argv, torchrun_argv
from detrun.launch.interruption import Ending, ask_the_scheduler, interruption_of
from detrun.launch.job_host import (
    cores,
    free_port,
    job_nodes,
    kill_descendants,
    signal_tree,
    stay_with_the_family,
    wait_for_step,
)
from detrun.launch.outcome import last_steps, outcome_of
from detrun.launch.placement import run_quietly, settle_follower
from detrun.launch.spec import HELD_KINDS, JobSpec, Segment
from detrun.launch.watchdog import Watchdog
from detrun.launch.whereabouts import whereabouts
from detrun.launch.written import Watch, claim_interrupted, note_sources
from detrun.recorder.environment import redacted
from detrun.records.jobs import FINAL_STATES, JobFile, JobState
from detrun.records.layout import AttemptFolder, ExperimentFolder

TERMINATION_GRACE = 8.0

# Slurm looks at time limits about twice a minute, and we start a little after the job does.
TIME_LIMIT_MARGIN = 45.0

_STEP_VARIABLES = (
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
    "SLURM_CPUS_PER_TASK",
    "SLURM_DISTRIBUTION",
    "SLURM_OPEN_MODE",
)


def run_job(spec_path: str) -> None:
    """Runs the job's segments. Raises SystemExit(1) if one did not end well, which the scheduler shows."""
    failed = Driver(JobSpec.read(Path(spec_path))).run()
    if failed:
        raise SystemExit(1)


def utc_now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


class Driver:
    """One job at work."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self.root = Path(spec.experiment)
        self.place = ExperimentFolder(self.root)
        self.slurm = spec.cluster == "slurm"
        self.job_id = os.environ.get("SLURM_JOB_ID") or os.environ.get("SUBMITIT_LOCAL_JOB_ID") or str(os.getpid())
        self.nodes = job_nodes()
        self.began = time.monotonic()
        self.steps_started = 0
        self.cancelled = False
        self.refused: str | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def run(self) -> bool:
        """Runs every segment; True if any did not end well."""
        # submitit's own handlers swallow TERM and treat USR2 as preemption; neither suits an arm.
        signal.signal(signal.SIGTERM, self._on_cancel)
        signal.signal(signal.SIGINT, self._on_cancel)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        if not self.slurm:
            stay_with_the_family()
        settled = self.spec.follower is None or not self.slurm
        failed = False
        for segment in self.spec.segments:
            if not settled:
                settled = settle_follower(self.spec, self.nodes)
            state = self._run_segment(segment)
            failed = failed or state not in ("done", "interrupted")
            if self.cancelled and state == "interrupted" and _held(segment):
                # The scheduler is taking this job's nodes away; the next attempt is another start of it.
                return failed
        return failed

    def _why_told_to_end(self) -> tuple[JobState, str]:
        limit = self.spec.minutes * 60
        if self.slurm and limit and time.monotonic() - self.began > limit - TIME_LIMIT_MARGIN:
            return "failed", f"the job ran into its time limit of {self.spec.minutes} minutes (slurm.time)"
        return "cancelled", "the job was cancelled"

    def _on_cancel(self, _number: int, _frame: FrameType | None) -> None:
        self.cancelled = True

    def _run_segment(self, segment: Segment) -> str:
        folder = self.place.attempt(segment.arm, segment.attempt)
        if not self._wanted():
            return "failed"
        if (earlier := self._earlier_start(folder, segment)) is not None:
            return earlier
        for path in (
            folder.marker_dir,
            folder.log_dir,
            folder.metrics_dir,
            folder.progress_dir,
            folder.environment_dir,
        ):
            path.mkdir(parents=True, exist_ok=True)
        job = JobFile(
            arm=segment.arm,
            attempt=segment.attempt,
            jobs=[self.job_id],
            nodes=self.nodes,
            state="running",
            started=utc_now(),
        )
        why_not = "the job was cancelled before this arm began" if self.cancelled else self._hopeless(segment)
        if why_not is None:
            try:
                start = start_of(self.spec, segment)
                take_along(self.spec, segment)
            except AttemptRefused as refused:
                why_not = str(refused)
            except (DetrunError, OSError) as error:
                why_not = f"it could not be set up: {error}"
        if why_not is not None:
            job.state, job.reason, job.ended = "cancelled", why_not, utc_now()
            job.write(folder.job_file)
            return "cancelled"
        segment = replace(segment, argv=start.argv, env={**segment.env, **start.env})
        job.resumed_from = start.resumed_from
        job.write(folder.job_file)
        self._write_launch(folder, segment)
        note_sources(folder, segment)
        stalled = self._watch(folder, segment, job)
        self._close(job, stalled, folder, segment)
        return job.state

    def _earlier_start(self, folder: AttemptFolder, segment: Segment) -> str | None:
        """The state of an attempt that an earlier start of this job ran; None if it has not begun yet."""
        try:
            job = JobFile.read(folder.job_file)
        except RecordError:
            return None
        if job.state in FINAL_STATES:
            return job.state
        # Its driver was ended with it, before it could say so.
        interruption = interruption_of(folder, segment)
        job.ended = job.ended or utc_now()
        if interruption is not None and _held(segment):
            job.state, job.interruption = "interrupted", interruption
        else:
            job.state, job.reason = "failed", "its job was started again by the scheduler while it ran"
        job.write(folder.job_file)
        return job.state

    def _hopeless(self, segment: Segment) -> str | None:
        """Why this arm need not run: another one failed before its first step, and node-hours cost money."""
        for path in sorted((self.root / "arms").glob("*/attempt-0/job.json")):
            arm = path.parents[1].name
            if arm == segment.arm or segment.attempt:
                continue
            try:
                failed = JobFile.read(path).state == "failed"
            except RecordError:
                continue
            other = self.place.attempt(arm, 0)
            if failed and not any(last_steps(other, segment).values()):
                return f"not started, since arm {arm} failed before its first step"
        return None

    def _wanted(self) -> bool:
        """Whether the experiment is still there; of one that was deleted under us nothing is to come back."""
        return self.spec.folder.is_dir()

    def _close(self, job: JobFile, stalled: str | None, folder: AttemptFolder, segment: Segment) -> None:
        if not self._wanted():
            return
        job.ended = utc_now()
        outcome = outcome_of(folder, segment, self.process.returncode if self.process else None, self.root)
        told = self._why_told_to_end() if self.cancelled and outcome.state != "done" else None
        if stalled:
            stalled = f"{stalled}; {whereabouts(folder, segment)}"
        close_attempt(job, outcome, folder, segment, stalled=stalled, refused=self.refused, told=told)
        job.write(folder.job_file)

    def _write_launch(self, folder: AttemptFolder, segment: Segment) -> None:
        """launch.json: what the wrapper starts, complete but for the number of its node."""
        env = dict(segment.env)
        argv = segment.argv
        port = free_port()
        if segment.launcher == "torchrun":
            script = str(self.root / "jobs" / "rank.sh")
            argv = torchrun_argv(segment, script, 0, self.nodes[0], port)
            argv = [a.replace("--node-rank=0", "--node-rank=@NODE@") for a in argv]
        else:
            env.setdefault("MASTER_ADDR", self.nodes[0] if segment.nodes > 1 else "localhost")
            env.setdefault("MASTER_PORT", str(port))
            if segment.launcher == "srun":
                env["WORLD_SIZE"] = str(segment.ranks)
                env["LOCAL_WORLD_SIZE"] = str(segment.ranks_per_node)
        if segment.threads:
            env["OMP_NUM_THREADS"] = str(max(1, cores() // segment.ranks_per_node))
        unset = [*segment.unset, *(name for name in os.environ if name.startswith("SUBMITIT_"))]
        launch = {
            "argv": argv,
            "env": {**env, "DETRUN_LOG_DIR": str(folder.log_dir)},
            "unset": unset,
            "prepend": segment.prepend,
            "workdir": segment.workdir,
            # For whoever asks later whether another run would start from the same: what is secret is left out.
            "inherited": redacted(os.environ)["clear"],
            "ranks_are_tasks": segment.launcher == "srun" or (segment.launcher == "none" and segment.ranks == 1),
        }
        (folder.path / "launch.json").write_text(json.dumps(launch, indent=1) + "\n", encoding="utf-8")

    def _watch(self, folder: AttemptFolder, segment: Segment, job: JobFile) -> str | None:
        """Starts the attempt and stays until it is gone. Why it was given up, or None."""
        wrapper = [
            segment.wrapper_python or sys.executable,
            str(self.root / "jobs" / "wrapper.py"),
            str(folder.path),
        ]
        argv, env = wrapper, dict(os.environ)
        if self.slurm:
            # A task that stands for a node has all of the job's cores there.
            cpus = os.environ.get("SLURM_CPUS_PER_TASK" if segment.launcher == "srun" else "SLURM_CPUS_ON_NODE")
            argv = srun_argv(segment, wrapper, cpus)
            # srun takes these for options of the step; the step says all of it itself.
            for name in _STEP_VARIABLES:
                env.pop(name, None)
        watch = Watch(folder, segment)
        limits = self.spec.watchdog
        if watch.active:  # what a program writes itself may come late, and in heaps
            limits = replace(limits, at_least=max(limits.at_least, limits.start))
        watchdog = Watchdog(limits, segment.steps, time.monotonic())
        ending = Ending(segment, folder)
        stalled = None
        # Looking at thousands of rank files takes the file system's time, so it is done less often.
        pause = max(1.0, segment.ranks / 100) if segment.recorder else 0.2
        looked = time.monotonic()
        with (folder.log_dir / "launch.log").open("ab") as log:
            try:
                self.process = subprocess.Popen(
                    argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            except OSError as error:
                log.write(f"could not start {argv[0]}: {error.strerror}\n".encode())
                return None
            self.steps_started += 1
            while True:
                try:
                    self.process.wait(timeout=0.2)
                    self._see_it_gone()
                    watch.look()
                    return stalled
                except subprocess.TimeoutExpired:
                    pass
                now = time.monotonic()
                todo = ending.look(now)
                if self.cancelled:
                    if not self._interrupted_by_the_scheduler(job, folder, segment):
                        self._end(signal.SIGTERM)
                elif todo == "end":
                    self._end(signal.SIGKILL)
                elif todo == "ask":
                    self.refused = ask_the_scheduler(segment, self.job_id, self.nodes)
                    if self.refused:
                        self._end(signal.SIGKILL)
                elif now - looked >= pause and not (ending.began and _held(segment)):
                    looked = now
                    step = watch.look()
                    if watch.active and self._is_due(step, ending, segment):
                        self._interrupt(folder, segment, step)
                    steps = {0: step, 1: -watch.alive} if watch.active else last_steps(folder, segment)
                    # A step that is recorded while the arm is being ended does not undo that.
                    stalled = stalled or watchdog.observe(looked, steps)
                    if stalled:
                        self._end(signal.SIGKILL)

    def _is_due(self, step: int, ending: Ending, segment: Segment) -> bool:
        """Whether an attempt without a recorder, which nobody ends from within, has come to its interruption."""
        asked = segment.interrupt
        return asked is not None and not ending.began and bool(asked.get("at_step")) and step >= int(asked["at_step"])

    def _interrupt(self, folder: AttemptFolder, segment: Segment, step: int) -> None:
        """Ends it from outside, once its step can be seen, and writes down that it was planned."""
        assert segment.interrupt is not None
        kind = str(segment.interrupt["kind"])
        claim_interrupted(folder, list(range(segment.ranks)), kind, step)
        if kind == "signal":
            self._send(getattr(signal, f"SIG{segment.interrupt.get('signal') or 'TERM'}"))
        else:
            self._end(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        assert self.process is not None
        if self.slurm:
            run_quietly(["scancel", f"--signal={number.name[3:]}", f"{self.job_id}.{self.steps_started - 1}"])
        else:
            signal_tree(self.process.pid, number)

    def _interrupted_by_the_scheduler(self, job: JobFile, folder: AttemptFolder, segment: Segment) -> bool:
        """Whether it ends the ranks by plan. Written down at once: this process will be ended too, within moments."""
        if not _held(segment):
            return False
        by_time = self._why_told_to_end()[0] == "failed"
        if job.interruption is None and self._wanted():
            job.interruption = planned_end(folder, segment, by_time=by_time)
            if job.interruption is not None:
                job.state, job.ended = "interrupted", utc_now()
                job.write(folder.job_file)
        return job.interruption is not None

    def _see_it_gone(self) -> None:
        """Waits until no process of the attempt is left: the next one may write to the same folder."""
        if self.slurm:
            wait_for_step(self.job_id, self.steps_started - 1)
        else:
            kill_descendants(TERMINATION_GRACE)  # what a wrapper that was killed itself could not take along

    def _end(self, number: signal.Signals) -> None:
        """Ends the running attempt; SIGTERM first gives it a moment."""
        assert self.process is not None
        if self.slurm:
            step = f"{self.job_id}.{self.steps_started - 1}"
            run_quietly(["scancel", f"--signal={number.name[3:]}", step])
        else:
            signal_tree(self.process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=TERMINATION_GRACE)
            return
        if self.slurm:
            run_quietly(["scancel", "--signal=KILL", step])
        signal_tree(self.process.pid, signal.SIGKILL)


def _held(segment: Segment) -> bool:
    """Whether it is the scheduler that interrupts this attempt."""
    return segment.interrupt is not None and segment.interrupt["kind"] in HELD_KINDS
