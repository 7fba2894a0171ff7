"""What a job is to run, frozen as JSON before it is submitted.

The job's driver and the wrapper around the trainer read this file and nothing else: no user object
is pickled, and the wrapper may run under another Python (in a container, say).
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from detrun.errors import RecordError
from detrun.records.files import check_version, one_line, read_object

SPEC_VERSION = 1

CHECKPOINT = "@CHECKPOINT@"
"""Stands in argv for the checkpoint, which is found right before the attempt starts."""

HELD_KINDS = frozenset({"requeue", "node-failure", "timeout"})
"""Interruptions that the scheduler makes: the ranks only wait for them at the boundary."""
_ARM = re.compile(r"[a-z]{1,4}")


@dataclass(frozen=True)
class WatchdogLimits:
    """When an arm whose steps have stopped coming is ended.

    multiple: of the arm's median step time; at_least: floor in seconds; start: seconds granted until
    the first step, and again after the last one for the way out.
    """

    multiple: float = 30.0
    at_least: float = 120.0
    start: float = 1800.0


@dataclass(frozen=True)
class Segment:
    """One attempt of one arm: what every rank runs, where, and with which environment.

    argv is the program as one rank runs it; CHECKPOINT in it is replaced when the attempt starts. env is added to the
    job's own environment; unset names variables removed from it; prepend puts a folder before a path variable's value,
    whatever that is on the node. srun holds further arguments of the step (container, raw options). threads: the number
    of OpenMP threads is to be cores / ranks, counted where the job runs.

    interrupt: how this attempt is to be ended, as in DETRUN_INTERRUPT, but that its kind may be one of HELD_KINDS; with
    `command` (of a node failure; @NODE@ and @JOB@ stand for the node's name and the job's id) and `node` (its index).
    recorder: whether the ranks take the recorder along. sources: what they write of their metrics themselves, as
    `SourceSpec.as_dict` has it; the first one tells how far they are where there is no recorder. metrics: those wanted.
    checkpoints: `directory` and `pattern` of what this arm saves. continues: the arm whose interrupted attempt a later
    attempt goes on from; None for its own.
    """

    arm: str
    attempt: int
    argv: list[str]
    env: dict[str, str]
    unset: list[str]
    workdir: str
    launcher: str
    nodes: int
    ranks_per_node: int
    steps: int
    srun: list[str] = field(default_factory=list)
    wrapper_python: str | None = None
    prepend: dict[str, str] = field(default_factory=dict)
    threads: bool = False
    interrupt: dict[str, Any] | None = None
    checkpoints: dict[str, str | None] | None = None
    continues: str | None = None
    recorder: bool = True
    sources: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)

    @property
    def given_a_checkpoint(self) -> bool:
        """Whether the program is told where to resume; else it looks in its own folder."""
        return any(CHECKPOINT in text for text in self.argv)

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def tasks(self) -> int:
        """How many wrappers run: one a rank where Slurm starts the ranks, else one a node."""
        return self.ranks if self.launcher == "srun" else self.nodes


@dataclass(frozen=True)
class JobSpec:
    """One job: its segments run one after the other in the same allocation.

    follower is the job (if any) whose nodes are settled when this one has its own: placement `pinned`
    gives it the same nodes, `disjoint` others. minutes: the job's time limit, 0 for none. reference: the attempt folder
    of the uninterrupted arm, which may be another experiment's.
    """

    job: str
    experiment: str
    cluster: str
    placement: str
    segments: list[Segment]
    watchdog: WatchdogLimits
    follower: str | None = None
    minutes: int = 0
    reference: str | None = None
    schema_version: int = SPEC_VERSION

    @property
    def folder(self) -> Path:
        return Path(self.experiment) / "jobs" / self.job

    def write(self) -> Path:
        """Writes jobs/<job>/spec.json and returns its path."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "spec.json"
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> JobSpec:
        """The specification in a file; RecordError where it is missing, torn, or of another schema version."""
        data: dict[str, Any] = read_object(path)
        check_version(data, SPEC_VERSION, str(path))
        try:
            segments = [Segment(**segment) for segment in data["segments"]]
            spec = cls(**{**data, "segments": segments, "watchdog": WatchdogLimits(**data["watchdog"])})
        except (TypeError, KeyError) as error:
            raise RecordError(f"is not a valid job specification ({one_line(str(error))})", where=str(path)) from None
        for segment in segments:
            counts = (segment.attempt, segment.nodes, segment.ranks_per_node, segment.steps)
            arms = (segment.arm, segment.arm if segment.continues is None else segment.continues)
            named = all(_ARM.fullmatch(str(arm)) for arm in arms)
            if not named or not all(type(count) is int and count >= 0 for count in counts):
                raise RecordError("is not a valid job specification (arm, attempt, nodes or ranks)", where=str(path))
            if not all(part is None or isinstance(part, dict) for part in (segment.interrupt, segment.checkpoints)):
                raise RecordError("is not a valid job specification (interrupt or checkpoints)", where=str(path))
        return spec
