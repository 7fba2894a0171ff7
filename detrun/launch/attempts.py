"""What an attempt begins with and what its end means: where it goes on, and whether it was interrupted as planned."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from detrun.errors import DetrunError, RecordError
from detrun.launch.interruption import for_the_recorder, interruption_of, ranks_of
from detrun.launch.microbatches import microbatches_by_step
from detrun.launch.outcome import Outcome, last_steps
from detrun.launch.resumption import NoCheckpoint, find_start
from detrun.launch.spec import CHECKPOINT, JobSpec, Segment
from detrun.records.environment_reader import read_recorder_cost
from detrun.records.jobs import FINAL_STATES, Interruption, JobFile, JobState, ResumedFrom
from detrun.records.layout import AttemptFolder, ExperimentFolder


class AttemptRefused(Exception):  # noqa: N818 - an answer, which the driver writes down
    """Why an attempt is not started."""


@dataclass(frozen=True)
class Start:
    """What is known of an attempt only right before it starts. env: added to the segment's own."""

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    resumed_from: ResumedFrom | None = None


def start_of(spec: JobSpec, segment: Segment) -> Start:
    """How an attempt starts. Raises AttemptRefused where the one before was not interrupted or left no checkpoint."""
    resumed = _resumed_from(spec, segment) if segment.attempt else None
    argv, env = list(segment.argv), {}
    if resumed is not None:
        argv = [text.replace(CHECKPOINT, resumed.path or "") for text in argv]
        env = {"DETRUN_STEPS_DONE": str(resumed.step), "DETRUN_MICROBATCHES_DONE": str(resumed.microbatch)}
    asked = for_the_recorder(segment, _at_microbatch(spec, segment, resumed))
    if asked is not None:
        env["DETRUN_INTERRUPT"] = json.dumps(asked)
    return Start(argv, env, resumed)


def take_along(spec: JobSpec, segment: Segment) -> None:
    """Before the interrupted arm goes on, gives its checkpoints as they are now to the arms that start from the same
    place and look in their own folder: later they would find newer ones there."""
    if segment.attempt == 0 or segment.continues is not None or segment.checkpoints is None:
        return
    source = Path(segment.checkpoints["directory"] or "")
    for path in ExperimentFolder(Path(spec.experiment)).jobs_dir.glob("*/spec.json"):
        for other in JobSpec.read(path).segments:
            if (other.continues, other.attempt) != (segment.arm, segment.attempt) or other.given_a_checkpoint:
                continue
            target = Path((other.checkpoints or {}).get("directory") or "")
            if source.is_dir() and not target.exists():
                shutil.copytree(source, target, symlinks=True)


def close_attempt(
    job: JobFile,
    outcome: Outcome,
    folder: AttemptFolder,
    segment: Segment,
    *,
    stalled: str | None = None,
    refused: str | None = None,
    told: tuple[JobState, str] | None = None,
) -> None:
    """Fills in how an attempt ended.

    stalled: why the watchdog gave it up; refused: why the scheduler did not interrupt it; told: state and reason where
    the job itself was ended from outside.
    """
    job.exit_code = outcome.exit_code
    job.state = "done" if outcome.state == "done" else "failed"
    job.reason, job.failed_rank = outcome.reason, outcome.failed_rank
    job.log, job.log_tail = outcome.log, list(outcome.log_tail)
    interruption = planned_end(folder, segment, by_time=told is not None and told[0] == "failed")
    if interruption is not None and interruption.detail.get("left_by_itself") and outcome.exit_code:
        interruption = None  # it left at its step because it failed there
    if refused:
        job.state, job.reason = "failed", f"it could not be interrupted: {refused}"
    elif interruption is not None and outcome.state == "done" and _ran_on(folder, segment, interruption):
        job.interruption = interruption
        job.remark = f"it was to end after step {interruption.step} ({interruption.kind}) and ran on to its last step"
    elif interruption is not None:
        job.state, job.interruption = "interrupted", interruption
        # Those that were left behind, and what their launcher says of it, explain nothing.
        job.reason = job.failed_rank = job.log = None
        job.log_tail = []
        job.remark = f"what was left of it had to be ended: {stalled}" if stalled else None
    elif stalled:
        job.state, job.reason, job.failed_rank = "stalled", stalled, None
    elif told is not None:
        job.state, job.reason = told


def planned_end(folder: AttemptFolder, segment: Segment, *, by_time: bool = False) -> Interruption | None:
    """The interruption that was planned for this attempt, if it happened. by_time: its job ran into its limit."""
    found = interruption_of(folder, segment)
    if found is None and by_time and segment.interrupt is not None and segment.interrupt["kind"] == "timeout":
        steps = min(last_steps(folder, segment).values(), default=0)
        return Interruption(kind="timeout", step=steps, ranks=ranks_of(segment))
    return found


def _ran_on(folder: AttemptFolder, segment: Segment, interruption: Interruption) -> bool:
    """Whether every rank took all steps in spite of it: nobody cared for the signal, say."""
    last = min(last_steps(folder, segment).values(), default=0)
    return last >= segment.steps and (interruption.step or 0) < segment.steps


def _resumed_from(spec: JobSpec, segment: Segment) -> ResumedFrom:
    place = ExperimentFolder(Path(spec.experiment))
    arm = segment.continues or segment.arm
    whose = "" if arm == segment.arm else f" of arm {arm}"
    before = place.attempt(arm, segment.attempt - 1)
    earlier = _planned_segment(spec, before)
    try:
        job = _end_of(before, earlier)
    except RecordError as error:
        raise AttemptRefused(f"attempt {before.number}{whose} left no word of its end: job.json {error.what}") from None
    if job.state != "interrupted":
        raise AttemptRefused(_never_interrupted(before, whose, job, earlier or segment))
    if segment.continues is not None:
        return _same_as(place.attempt(arm, segment.attempt), whose)
    checkpoints = segment.checkpoints or {}
    attempts = [place.attempt(arm, number) for number in range(segment.attempt)]
    try:
        directory = Path(checkpoints.get("directory") or "")
        given, ranks = segment.given_a_checkpoint, segment.ranks
        return find_start(directory, checkpoints.get("pattern"), attempts, given=given, ranks=ranks)
    except NoCheckpoint as none:
        raise AttemptRefused(f"nothing to resume from: {none}") from None
    except (DetrunError, OSError) as error:
        raise AttemptRefused(f"the checkpoints cannot be looked at: {error}") from None


def _same_as(attempt: AttemptFolder, whose: str) -> ResumedFrom:
    """Where the attempt that this arm repeats went on from."""
    try:
        start = JobFile.read(attempt.job_file).resumed_from
    except RecordError:
        start = None
    if start is None:
        raise AttemptRefused(f"attempt {attempt.number}{whose} was not resumed, and this arm starts where it did")
    if start.path is not None and not Path(start.path).exists():
        raise AttemptRefused(f"the checkpoint that attempt {attempt.number}{whose} was given is gone: {start.path}")
    return start


def _planned_segment(spec: JobSpec, attempt: AttemptFolder) -> Segment | None:
    """An attempt as it was planned, in whichever job of the experiment."""
    segments = [*spec.segments]
    for path in ExperimentFolder(Path(spec.experiment)).jobs_dir.glob("*/spec.json"):
        segments += JobSpec.read(path).segments
    return next((each for each in segments if (each.arm, each.attempt) == (attempt.arm, attempt.number)), None)


def _end_of(attempt: AttemptFolder, segment: Segment | None) -> JobFile:
    """How an attempt ended whose job is over. One whose driver was killed before it could say so is closed here.

    Raises RecordError where it left no job.json.
    """
    job = JobFile.read(attempt.job_file)
    if job.state in FINAL_STATES or segment is None:
        return job
    planned = planned_end(attempt, segment, by_time=True)
    job.state, job.interruption = ("interrupted", planned) if planned else ("failed", None)
    job.reason = None if planned else "its job ended, and it left no word"
    job.write(attempt.job_file)
    return job


_ENDED = {"failed": "failed by itself", "stalled": "stalled", "cancelled": "was cancelled", "lost": "was lost"}


def _never_interrupted(before: AttemptFolder, whose: str, job: JobFile, segment: Segment) -> str:
    """One sentence: why there is nothing to resume. segment: the attempt before, as it was planned."""
    name = f"attempt {before.number}{whose}"
    if job.state == "cancelled" and (job.reason or "").startswith(("attempt ", "nothing to resume")):
        return str(job.reason)
    if job.state != "done":
        how = _ENDED.get(job.state, job.state)
        return f"{name} was never interrupted: it {how} ({job.reason or 'no reason is known'})"
    if job.interruption is not None:
        return f"{name} was never interrupted: {job.remark}"
    last = min(last_steps(before, segment).values(), default=0)
    if not last:
        return f"{name} was never interrupted: it ran to its end, and no step of it was recorded"
    asked = segment.interrupt or {}
    at = f"; at_step {asked['at_step']} never came to its {_moment(asked)}" if asked.get("at_step") else ""
    said = "".join(f"; {text}" for text in _missed(before))
    return f"{name} was never interrupted: it ran to its last step ({last}){at}{said}"


def _moment(asked: dict[str, object]) -> str:
    if asked.get("kind") == "kill-during-save":
        return "save"
    words = {"before-save": "save", "after-save": "next step", "epoch": "end of an epoch"}
    return words.get(str(asked.get("moment")), str(asked.get("moment") or "end"))


def _missed(before: AttemptFolder) -> Iterator[str]:
    """What the recorder says of saves that it failed to hit."""
    try:
        warnings = read_recorder_cost(before.recorder(0)).warnings
    except RecordError:
        return
    yield from [text for text in warnings if text.startswith("kill-during-save: ")][:3]


def _at_microbatch(spec: JobSpec, segment: Segment, resumed: ResumedFrom | None) -> int | None:
    """at_step in backward passes of this attempt, where the reference shows that the recipe counts those as steps."""
    asked = segment.interrupt or {}
    if not asked.get("at_step") or spec.reference is None:
        return None
    done = microbatches_by_step(AttemptFolder(Path(spec.reference), "a", 0), segment.ranks, segment.steps)
    if done is None:
        return None
    before = done[min(resumed.step, len(done) - 1)] + resumed.microbatch if resumed else 0
    return int(asked["at_step"]) - before
