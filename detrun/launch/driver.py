"""Runs inside a job, once: starts each arm's attempt in turn, watches it, and writes down how it ended.

submitit calls `run_job` with the path of the job's specification, in the batch step on Slurm and in a
plain process on one machine. All it knows is in that file; all it says goes into the experiment's folder.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, suppress
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType

import psutil

from detrun.errors import RecordError
from detrun.launch.command import srun_argv, torchrun_argv
from detrun.launch.outcome import Outcome, last_step, outcome_of
from detrun.launch.placement import run_quietly, settle_follower
from detrun.launch.queue import expand_nodes
from detrun.launch.spec import JobSpec, Segment
from detrun.launch.watchdog import Watchdog
from detrun.launch.wrapper import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG
from detrun.records.jobs import JobFile, JobState
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
        self.slurm = spec.cluster == "slurm"
        self.job_id = os.environ.get("SLURM_JOB_ID") or os.environ.get("SUBMITIT_LOCAL_JOB_ID") or str(os.getpid())
        self.nodes = _nodes()
        self.began = time.monotonic()
        self.steps_started = 0
        self.cancelled = False
        self.process: subprocess.Popen[bytes] | None = None

    def run(self) -> bool:
        """Runs every segment; True if any did not end well."""
        # submitit's own handlers swallow TERM and treat USR2 as preemption; neither suits an arm.
        signal.signal(signal.SIGTERM, self._on_cancel)
        signal.signal(signal.SIGINT, self._on_cancel)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        if not self.slurm:
            _stay_with_the_family()
        settled = self.spec.follower is None or not self.slurm
        failed = False
        for segment in self.spec.segments:
            if not settled:
                settled = settle_follower(self.spec, self.nodes)
            state = self._run_segment(segment)
            failed = failed or state != "done"
        return failed

    def _why_told_to_end(self) -> tuple[JobState, str]:
        limit = self.spec.minutes * 60
        if self.slurm and limit and time.monotonic() - self.began > limit - TIME_LIMIT_MARGIN:
            return "failed", f"the job ran into its time limit of {self.spec.minutes} minutes (slurm.time)"
        return "cancelled", "the job was cancelled"

    def _on_cancel(self, _number: int, _frame: FrameType | None) -> None:
        self.cancelled = True

    def _run_segment(self, segment: Segment) -> str:
        folder = ExperimentFolder(self.root).attempt(segment.arm, segment.attempt)
        if not self._wanted():
            return "failed"
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
        if why_not:
            job.state, job.reason, job.ended = "cancelled", why_not, utc_now()
            job.write(folder.job_file)
            return "cancelled"
        job.write(folder.job_file)
        self._write_launch(folder, segment)
        stalled = self._watch(folder, segment)
        outcome = outcome_of(folder, segment, self.process.returncode if self.process else None, self.root)
        self._close(job, outcome, stalled, folder, segment)
        return job.state

    def _hopeless(self, segment: Segment) -> str | None:
        """Why this arm need not run: another one failed before its first step, and node-hours cost money."""
        place = ExperimentFolder(self.root)
        for path in sorted((self.root / "arms").glob("*/attempt-0/job.json")):
            arm = path.parents[1].name
            if arm == segment.arm or segment.attempt:
                continue
            try:
                failed = JobFile.read(path).state == "failed"
            except RecordError:
                continue
            other = place.attempt(arm, 0)
            if failed and not any(last_step(other.metrics(rank)) for rank in range(segment.ranks)):
                return f"not started, since arm {arm} failed before its first step"
        return None

    def _wanted(self) -> bool:
        """Whether the experiment is still there; of one that was deleted under us nothing is to come back."""
        return self.spec.folder.is_dir()

    def _close(
        self, job: JobFile, outcome: Outcome, stalled: str | None, folder: AttemptFolder, segment: Segment
    ) -> None:
        if not self._wanted():
            return
        job.ended = utc_now()
        job.exit_code = outcome.exit_code
        job.state = "done" if outcome.state == "done" else "failed"
        job.reason, job.failed_rank = outcome.reason, outcome.failed_rank
        job.log, job.log_tail = outcome.log, list(outcome.log_tail)
        if stalled:
            job.state, job.reason = "stalled", f"{stalled}; {_whereabouts(folder, segment)}"
            job.failed_rank = None
        elif self.cancelled and outcome.state != "done":
            job.state, job.reason = self._why_told_to_end()
        job.write(folder.job_file)

    def _write_launch(self, folder: AttemptFolder, segment: Segment) -> None:
        """launch.json: what the wrapper starts, complete but for the number of its node."""
        env = dict(segment.env)
        argv = segment.argv
        port = _free_port()
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
            env["OMP_NUM_THREADS"] = str(max(1, _cores() // segment.ranks_per_node))
        unset = [*segment.unset, *(name for name in os.environ if name.startswith("SUBMITIT_"))]
        launch = {
            "argv": argv,
            "env": {**env, "DETRUN_LOG_DIR": str(folder.log_dir)},
            "unset": unset,
            "prepend": segment.prepend,
            "workdir": segment.workdir,
            "ranks_are_tasks": segment.launcher == "srun" or (segment.launcher == "none" and segment.ranks == 1),
        }
        (folder.path / "launch.json").write_text(json.dumps(launch, indent=1) + "\n", encoding="utf-8")

    def _watch(self, folder: AttemptFolder, segment: Segment) -> str | None:
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
        watchdog = Watchdog(self.spec.watchdog, segment.steps, time.monotonic())
        stalled = None
        # Looking at thousands of rank files takes the file system's time, so it is done less often.
        pause = max(1.0, segment.ranks / 100)
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
                    if not self.slurm:
                        _kill_descendants()  # what a wrapper that was killed itself could not take along
                    return stalled
                except subprocess.TimeoutExpired:
                    pass
                if self.cancelled:
                    self._end(signal.SIGTERM)
                elif time.monotonic() - looked >= pause:
                    looked = time.monotonic()
                    steps = {rank: last_step(folder.metrics(rank)) for rank in range(segment.ranks)}
                    # A step that is recorded while the arm is being ended does not undo that.
                    stalled = stalled or watchdog.observe(looked, steps)
                    if stalled:
                        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        """Ends the running attempt; SIGTERM first gives it a moment."""
        assert self.process is not None
        if self.slurm:
            step = f"{self.job_id}.{self.steps_started - 1}"
            run_quietly(["scancel", f"--signal={number.name[3:]}", step])
        else:
            _signal_tree(self.process.pid, number)
        try:
            self.process.wait(timeout=TERMINATION_GRACE)
        except subprocess.TimeoutExpired:
            if self.slurm:
                run_quietly(["scancel", "--signal=KILL", step])
            _signal_tree(self.process.pid, signal.SIGKILL)


def _stay_with_the_family() -> None:
    """On one machine: end with the controller that started us, and adopt ranks whose wrapper died.

    Slurm does both for a job; here a process that is killed would leave its children running on.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _kill_descendants() -> None:
    family = psutil.Process().children(recursive=True)
    for process in family:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(family, timeout=TERMINATION_GRACE)  # they are ours by now, and ours to collect


def _signal_tree(pid: int, number: signal.Signals) -> None:
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


def _whereabouts(folder: AttemptFolder, segment: Segment) -> str:
    """Which ranks were where: `last step 11 on every rank; rank 1 in forward, 1 other in backward`."""
    steps = {rank: last_step(folder.metrics(rank)) for rank in range(segment.ranks)}
    low, high = min(steps.values()), max(steps.values())
    if low == high:
        text = f"last step {low} on every rank"
    else:
        behind = [rank for rank, step in steps.items() if step == low]
        text = f"last step {low} on rank {_few(behind)}, up to {high} elsewhere"
    phases: dict[str, list[int]] = {}
    for rank in steps:
        try:
            words = folder.progress(rank).read_text(encoding="utf-8", errors="replace").split()
        except OSError:
            continue
        if len(words) >= 2:
            phases.setdefault(words[1], []).append(rank)
    if phases:
        text += "; now " + ", ".join(
            f"rank {_few(ranks)} in {phase}" for phase, ranks in sorted(phases.items(), key=lambda item: len(item[1]))
        )
    return text


def _few(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:6]))
    return shown if len(ranks) <= 6 else f"{shown} and {len(ranks) - 6} more"


def _nodes() -> list[str]:
    nodelist = os.environ.get("SLURM_JOB_NODELIST")
    if not nodelist:
        return [socket.gethostname()]
    return expand_nodes(nodelist) or [nodelist]


def _cores() -> int:
    """Cores of this node that the job may use."""
    on_node = os.environ.get("SLURM_CPUS_ON_NODE", "")
    return int(on_node) if on_node.isdigit() else len(os.sched_getaffinity(0))


def _free_port() -> int:
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
