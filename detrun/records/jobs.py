"""What was asked and how each attempt went: experiment.json, job.json, the task markers.

Each has `read(path)` and `write(path)`; writing is by rename, so that whoever follows an experiment never
sees half a document. Unknown keys are kept: what a newer writer added survives an older one's rewriting.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from typing_extensions import Self

from detrun.errors import RecordError
from detrun.records.files import check_version, one_line, read_object, write_atomically

SCHEMA_VERSION = 1
MAX_RANKS = 1_000_000
"""More than any machine has; each is a file to look for."""

Role = Literal["reference", "repeat", "interrupted", "control"]
JobState = Literal["pending", "running", "done", "interrupted", "failed", "stalled", "cancelled", "lost"]
FINAL_STATES = frozenset({"done", "interrupted", "failed", "stalled", "cancelled", "lost"})


class Document(BaseModel):
    """A JSON file of an experiment, with its schema's version."""

    model_config = ConfigDict(extra="allow", validate_assignment=True)
    called: ClassVar[str] = "document"

    schema_version: int = SCHEMA_VERSION

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """The document in a file; RecordError where missing, unreadable or of another schema version."""
        raw = read_object(Path(path))
        check_version(raw, SCHEMA_VERSION, str(path))
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            key = ".".join(str(part) for part in first["loc"])
            what = f"is not a valid {cls.called}: {one_line(key)}: {one_line(first['msg'])}"
            raise RecordError(what, where=str(path)) from None

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the document by rename, making the folder where needed; ArchiveError where that fails."""
        text = json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False)
        write_atomically(Path(path), f"{text}\n".encode("utf-8", "backslashreplace"))


class Declared(BaseModel):
    """What one arm has beside the rest, as its recipe's `arms:` says."""

    model_config = ConfigDict(extra="allow")

    args: list[str] = Field(default_factory=list)
    env: dict[str, str] = Field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.args or self.env)


class ArmPlan(BaseModel):
    """One arm as it was asked for. purpose: what a control arm is there for, such as `observer`, `self-test:rng`."""

    model_config = ConfigDict(extra="allow")

    id: str = Field(pattern=r"^[a-z]{1,4}$")
    role: Role
    declared: Declared = Field(default_factory=Declared)
    purpose: str | None = None


class Reference(BaseModel):
    """An arm of an earlier experiment that stands in for this one's: path is that experiment's folder."""

    model_config = ConfigDict(extra="allow")

    experiment: str
    path: str = Field(pattern=r"^[^\x00]+$")
    arm: str = Field(pattern=r"^[a-z]{1,4}$")


class Code(BaseModel):
    """The state of the program's repository when the experiment was created, and digests of its files by path."""

    model_config = ConfigDict(extra="allow")

    commit: str | None = None
    dirty: bool = False
    diff: str | None = None
    program: dict[str, str] = Field(default_factory=dict)


class ExperimentFile(Document):
    """experiment.json: what was asked, written before anything is started. options: of the command, where a later one
    that takes the experiment up has to know them. labels: what it belongs to, such as a night."""

    called: ClassVar[str] = "experiment.json"

    id: str
    experiment: str
    created: str
    recipe: dict[str, Any]
    recipe_path: str | None = None
    recipe_lines: dict[str, int] = Field(default_factory=dict)
    command_line: list[str] = Field(default_factory=list)
    cluster: str
    placement: str | None = None
    arms: list[ArmPlan] = Field(min_length=1)
    ranks: int = Field(ge=1, le=MAX_RANKS)
    steps: int = Field(ge=1)
    seed: int | None = None
    pinned: dict[str, str] = Field(default_factory=dict)
    determinism: str = "strict"
    versions: dict[str, str | None] = Field(default_factory=dict)
    code: Code = Field(default_factory=Code)
    reference: Reference | None = None
    interrupts: list[dict[str, Any]] = Field(default_factory=list)
    options: dict[str, Any] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)

    @field_validator("arms")
    @classmethod
    def _distinct(cls, arms: list[ArmPlan]) -> list[ArmPlan]:
        # An arm that is held against itself is always identical.
        if len({arm.id for arm in arms}) < len(arms):
            raise ValueError("an arm is named twice")
        return arms

    @property
    def recipe_name(self) -> str:
        """The recipe's own name; the experiment's id stands in where it has none."""
        name = self.recipe.get("name")
        return name if isinstance(name, str) and name else self.id

    @property
    def metric_rules(self) -> MetricRules:
        """The recipe's `metrics:` as far as the comparison needs it."""
        rules = self.recipe.get("metrics")
        try:
            return MetricRules.model_validate(rules if isinstance(rules, dict) else {})
        except ValidationError:
            raise RecordError("recipe.metrics is not as a recipe has it", where="experiment.json") from None


class MetricRules(BaseModel):
    """Which metrics the recipe asks for and how often it asks for state."""

    model_config = ConfigDict(extra="ignore")

    required: list[str] = Field(default_factory=list)
    optional: list[str] = Field(default_factory=list)
    absent: list[str] = Field(default_factory=list)
    ignore: list[str] = Field(default_factory=list)
    names: dict[str, str] = Field(default_factory=dict)
    state_every: int = Field(default=1, ge=0)


class Interruption(BaseModel):
    """Why an attempt ended by plan: after `microbatch` micro-batches of step `step + 1`, on these ranks."""

    model_config = ConfigDict(extra="allow")

    kind: str
    step: int | None = None
    microbatch: int = 0
    ranks: list[int] = Field(default_factory=list)
    moment: str = "end"
    planned: bool = True
    detail: dict[str, Any] = Field(default_factory=dict)


class RejectedCheckpoint(BaseModel):
    """What lies beside the checkpoint that was taken, or is newer, and why it does not count."""

    model_config = ConfigDict(extra="allow")

    path: str
    why: str


class ResumedFrom(BaseModel):
    """Where an attempt went on: the checkpoint it was given (None: it starts anew) and the position that stands for.

    source: whether the saves that were seen told the position, the checkpoint's name, or nothing. named: the step in
    its name, by the recipe's pattern; what is written in the background is written when training is further on.
    """

    model_config = ConfigDict(extra="allow")

    path: str | None
    step: int = Field(ge=0)
    microbatch: int = Field(default=0, ge=0)
    source: Literal["saves", "pattern", "none"] = "none"
    named: int | None = None
    rejected: list[RejectedCheckpoint] = Field(default_factory=list)


class JobFile(Document):
    """job.json: how one attempt of an arm was run and why it ended."""

    called: ClassVar[str] = "job.json"

    arm: str
    attempt: int = 0
    jobs: list[str] = Field(default_factory=list)
    nodes: list[str] = Field(default_factory=list)
    state: JobState = "pending"
    started: str | None = None
    ended: str | None = None
    exit_code: int | None = None
    reason: str | None = None
    failed_rank: int | None = None
    log: str | None = None
    log_tail: list[str] = Field(default_factory=list)
    remark: str | None = None
    interruption: Interruption | None = None
    resumed_from: ResumedFrom | None = None


class TaskMarker(Document):
    """marker/task00000.json: the true end of one task, written by the wrapper around the trainer."""

    called: ClassVar[str] = "task marker"

    task: int
    host: str | None = None
    exit_code: int | None = None
    signal: int | str | None = None
    started: str | float | None = None
    ended: str | float | None = None
