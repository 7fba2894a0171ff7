"""The keys of a recipe, as frozen pydantic models: one class a section, a line of description under each key.

Nothing here reads a file or knows a line number (`load.py` does). `Recipe.model_dump(mode="json")` is what an
experiment stores; `Recipe.model_validate` of it gives the same recipe back. The descriptions are the reference in
docs/recipe.md and what an editor shows; they have no second home.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, model_validator

from detrun.recipe.values import (
    Args,
    ArmName,
    Command,
    EnvName,
    Gpus,
    Lines,
    MetricName,
    Names,
    OptionName,
    OptionValue,
    RecipeName,
    SbatchOption,
    Text,
    TimeLimit,
    one_or_many,
    refuse,
    seconds_of,
)

Cluster = Literal["auto", "slurm", "local"]
Launcher = Literal["torchrun", "srun", "none"]
Determinism = Literal["strict", "observe", "none"]
Pin = Literal["default", "none"]
Placement = Literal["pinned", "allocation", "parallel", "disjoint"]
Source = Literal["recorder", "tensorboard", "jsonl", "csv", "wandb", "log"]
Written = Literal["tensorboard", "jsonl", "csv", "wandb", "log"]
InterruptKind = Literal["stop", "signal", "kill", "kill-during-save", "requeue", "node-failure", "timeout"]
InterruptMoment = Literal["end", "before-save", "after-save", "accumulation", "epoch"]
SignalName = Literal["TERM", "INT", "HUP", "QUIT", "USR1", "USR2"]

Count = Annotated[int, Strict(), Field(ge=1)]
CountOrZero = Annotated[int, Strict(), Field(ge=0)]
Seed = Annotated[int, Strict(), Field(ge=0, le=2**63 - 1)]
Positive = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)]
Ranks = Annotated[
    Literal["all"] | CountOrZero | Annotated[tuple[CountOrZero, ...], Field(min_length=1)],
    Field(union_mode="smart"),
]


class Section(BaseModel):
    """What all sections share: unknown keys are refused, and a recipe is never changed after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Launch(Section):
    """How the training is started."""

    launcher: Launcher = Field(
        default="none",
        description="What starts the ranks: torchrun (given the command with --no-python), srun (a task a "
        "rank), or none "
        "(the command is started once a node). Without this key: torchrun if there is more than one rank, "
        "else none.",
    )
    command: Command = Field(description="The program as one rank runs it, as a list. No shell reads it.")
    args: Args = Field(default=(), description="Appended to the command.")
    nodes: Count = Field(default=1, description="How many nodes an arm runs on.")
    ranks_per_node: Count = Field(default=1, description="How many ranks (training processes) run on each node.")
    env: dict[EnvName, Text] = Field(
        default_factory=dict,
        description="Environment variables of every rank. OMP_NUM_THREADS is cores / ranks unless it is given here.",
    )
    workdir: Text = Field(default=".", description="Where the command runs; relative to the recipe's folder.")

    @model_validator(mode="before")
    @classmethod
    def _launcher_by_ranks(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "launcher" in data:
            return data
        sizes = (data.get("nodes", 1), data.get("ranks_per_node", 1))
        several = all(type(size) is int and size >= 1 for size in sizes) and max(sizes) > 1
        return {**data, "launcher": "torchrun" if several else "none"}


class SecondSource(Section):
    """What the program writes of its metrics itself, held against metrics.source."""

    source: Written = Field(description="tensorboard, jsonl, csv, wandb (offline files) or log.")
    path: Text | None = Field(default=None, description="As metrics.path.")
    pattern: Text | None = Field(default=None, description="As metrics.pattern.")
    step: Text = Field(default="step", description="As metrics.step.")
    every: Count = Field(default=1, description="As metrics.every.")
    first_step: CountOrZero = Field(default=1, description="As metrics.first_step.")
    names: dict[MetricName, Text] = Field(
        default_factory=dict, description="As metrics.names, for this source; wins over those."
    )

    @model_validator(mode="after")
    def _can_be_found(self) -> SecondSource:
        _check_source(self.source, self.path, self.pattern)
        return self


def _check_source(source: str, path: str | None, pattern: str | None) -> None:
    """What a source cannot be found without."""
    if source == "log" and pattern is None:
        raise refuse(
            "source log needs pattern",
            hint="add pattern: the name of a shipped one, or a YAML file's path; see docs/sources.md.",
        )
    if source not in ("log", "recorder") and path is None:
        raise refuse(f"source {source} needs path", hint='add path: a file, a folder or a glob, such as "{out}/logs".')


class Metrics(Section):
    """Which numbers are held against each other."""

    source: Source = Field(
        default="recorder",
        description="Where the numbers come from: recorder (inside the process, every bit), or what the "
        "program writes itself: tensorboard, jsonl, csv, wandb (offline files), log. The arms then run without the "
        "recorder. A source that prints decimals can show a divergence and can never prove identity; see "
        "docs/sources.md.",
    )
    path: Text | None = Field(
        default=None,
        description="Where the program writes them: a file, a folder or a glob. For source log without it: what the "
        "ranks print.",
    )
    pattern: Text | None = Field(
        default=None,
        description="How the log's lines are read, and what the program calls its metrics: a shipped pattern's name, "
        "or a YAML file's path, relative to the recipe's folder.",
    )
    step: Text = Field(default="step", description="The key or the column that holds the step, for jsonl, csv, wandb.")
    every: Count = Field(default=1, description="The program writes its metrics every so many steps.")
    first_step: CountOrZero = Field(
        default=1, description="The number that the program gives to its first step: 1, or 0 if it counts from 0."
    )
    also: Annotated[tuple[SecondSource, ...], BeforeValidator(one_or_many)] = Field(
        default=(),
        description="Second sources: what the program writes itself, held against the first as far as its resolution "
        "allows. A contradiction forbids `identical`.",
    )
    required: Names = Field(
        default=("loss", "grad_norm"),
        description="Metrics that every rank must yield at every step; one missing forbids `identical`.",
    )
    optional: Names = Field(default=(), description="Metrics that are compared where they are there.")
    absent: Names = Field(
        default=(), description="Metrics known not to exist in this program; one that shows up is a finding."
    )
    ignore: Names = Field(
        default=(),
        description="Bookkeeping that is not compared, such as a timer or a counter that restarts on resume.",
    )
    names: dict[MetricName, Text] = Field(
        default_factory=dict, description="detrun's name of a metric: the program's own name of it."
    )
    state_every: CountOrZero = Field(
        default=1,
        description="Parameters, gradients, optimizer state and RNG streams are digested every so many "
        "steps; 0 leaves them out.",
    )

    @model_validator(mode="after")
    def _can_be_found(self) -> Metrics:
        _check_source(self.source, self.path, self.pattern)
        return self

    @model_validator(mode="after")
    def _one_list_each(self) -> Metrics:
        seen: dict[str, str] = {}
        for where in ("required", "optional", "absent", "ignore"):
            for metric in getattr(self, where):
                if metric in seen:
                    raise refuse(
                        f"{metric} is listed in both {seen[metric]} and {where}",
                        hint="a metric belongs to one of required, optional, absent and ignore.",
                    )
                seen[metric] = where
        return self


class Checkpoint(Section):
    """How the program saves and resumes. Only experiments that interrupt an arm need it."""

    directory: Text = Field(default="{out}/checkpoints", description="Where the program writes its checkpoints.")
    pattern: Text | None = Field(
        default=None,
        description="How a checkpoint's name tells its step, such as step-{step}. Without it the last "
        "number in the name is taken.",
    )
    save_every: Count | None = Field(
        default=None,
        description="How often the program saves, in steps; reaches it through {save_every}. Without it nothing is "
        "known of its schedule.",
    )
    save_args: Args = Field(default=(), description="Appended to the command of every arm that saves.")
    resume_args: Args = Field(
        default=(),
        description="Appended to the command of every later attempt; {checkpoint} is the checkpoint to resume from.",
    )


class Interrupt(Section):
    """How an arm is interrupted."""

    kind: InterruptKind = Field(
        description="stop (the program's own exit at a step), signal (sent, then its save is waited for), "
        "kill (SIGKILL after a step), "
        "kill-during-save, requeue, node-failure, timeout (the scheduler's time limit)."
    )
    at_step: Count | None = Field(
        default=None,
        description="The step at whose end it happens; of kill-during-save, the first step whose save may be hit. "
        "Every kind but timeout needs it.",
    )
    moment: InterruptMoment = Field(
        default="end",
        description="end (the optimizer has stepped, nothing is saved yet), before-save (the next save begins), "
        "after-save (the next step begins), accumulation (one micro-batch of the next step is done), or epoch (the "
        "next time that the data loader is exhausted).",
    )
    ranks: Ranks = Field(default="all", description="Which ranks are hit: all, one rank, or a list of ranks.")
    node: CountOrZero | None = Field(
        default=None, description="All ranks of this node (0 is the first) in place of `ranks`."
    )
    signal: SignalName = Field(default="TERM", description="The signal that kind signal sends.")
    command: Args = Field(
        default=(),
        description="What makes a node fail, for kind node-failure: a command that an administrator may run; {node} is "
        "the node's name, {job} the job's id.",
    )
    minutes: Count | None = Field(
        default=None, description="For kind timeout: the time limit of the job that is to run into it; 1 if not given."
    )

    @model_validator(mode="after")
    def _complete(self) -> Interrupt:
        if self.kind != "timeout" and self.at_step is None:
            raise refuse(f"kind {self.kind} needs at_step", hint="add at_step: the step at whose end it happens.")
        if "signal" in self.model_fields_set and self.kind != "signal" and self.signal != "TERM":
            raise refuse(
                f"signal is for kind signal, and this is kind {self.kind}",
                hint="leave signal out, or write kind: signal.",
            )
        if self.command and self.kind != "node-failure":
            raise refuse(
                f"command is for kind node-failure, and this is kind {self.kind}",
                hint="leave command out, or write kind: node-failure.",
            )
        if self.minutes is not None and self.kind != "timeout":
            raise refuse(
                f"minutes is for kind timeout, and this is kind {self.kind}",
                hint="leave minutes out, or write kind: timeout.",
            )
        if self.moment != "end" and self.kind == "kill-during-save":
            raise refuse(
                f"kind kill-during-save has a moment of its own, and moment is {self.moment}",
                hint="leave moment out, or write kind: kill.",
            )
        if self.node is not None and self.ranks != "all":
            raise refuse("node and ranks are both given", hint="node: all ranks of one node; ranks: these. Keep one.")
        return self


class Arm(Section):
    """What one arm has beside the rest."""

    args: Args = Field(default=(), description="Appended to this arm's command.")
    env: dict[EnvName, Text] = Field(default_factory=dict, description="Environment variables of this arm alone.")


class Slurm(Section):
    """What Slurm is asked for. Not read where an experiment runs locally."""

    partition: Text | None = Field(default=None, description="sbatch --partition; null leaves it to the site.")
    account: Text | None = Field(default=None, description="sbatch --account; null leaves it to the site.")
    qos: Text | None = Field(default=None, description="sbatch --qos; null leaves it to the site.")
    time: TimeLimit = Field(default="01:00:00", description="Time limit of one arm: HH:MM:SS, D-HH:MM:SS, or minutes.")
    gpus_per_node: Gpus | None = Field(default=None, description="sbatch --gpus-per-node: a number, or type:number.")
    constraint: Text | None = Field(default=None, description="sbatch --constraint.")
    extra: dict[SbatchOption, OptionValue] = Field(
        default_factory=dict,
        description="Any further sbatch options, passed through as they are: name: value. true is a flag "
        "without a value, false and null are dropped.",
    )
    setup: Lines = Field(default=(), description="Shell lines run before the training; one that fails stops the job.")
    container: dict[OptionName, OptionValue] = Field(
        default_factory=dict,
        description="srun's container arguments, passed through as they are: image, mounts, …; python is "
        "the interpreter inside.",
    )

    @property
    def time_seconds(self) -> int:
        """The time limit in seconds."""
        return seconds_of(self.time)


class Watchdog(Section):
    """When an arm counts as stalled."""

    multiple: Positive = Field(
        default=30.0,
        description="Stalled after this many times the median duration of a step without progress …",
    )
    at_least: Positive = Field(default=120.0, description="… but never before this many seconds.")
    start: Positive = Field(default=1800.0, description="Seconds until the first step has to be done.")


class Limits(Section):
    """What is not started without being asked twice."""

    node_hours: Positive | None = Field(
        default=50.0,
        description="Above this many node-hours for the whole experiment the command wants --yes; null is no limit.",
    )


class Recipe(Section):
    """How to launch a training, which metrics it yields, how it checkpoints, where it may run."""

    name: RecipeName = Field(
        default="recipe",
        description="Used in folder names and Slurm job names: letters, digits, dots, _ and -. Without "
        "this key: the file's name.",
    )
    cluster: Cluster = Field(
        default="auto", description="auto (Slurm if its commands answer, else local), slurm, or local."
    )
    launch: Launch = Field(description="How the training is started.")
    steps: Count = Field(description="Optimizer steps of every arm; an interruption never changes it.")
    seed: Seed = Field(
        default=1234, description="Reaches the program through {seed} and DETRUN_SEED; the same in every arm."
    )
    metrics: Metrics = Field(
        default_factory=lambda: Metrics(), description="Which numbers are held against each other."
    )
    checkpoint: Checkpoint | None = Field(default=None, description="How the program saves and resumes.")
    interrupt: Annotated[tuple[Interrupt, ...], BeforeValidator(one_or_many)] = Field(
        default=(), description="How an arm is interrupted: one, or a list of them."
    )
    determinism: Determinism = Field(
        default="strict",
        description="strict (apply the deterministic settings, refuse what cannot be), observe (apply "
        "nothing, report), or none.",
    )
    pin: Pin = Field(
        default="default",
        description="default (hash seed, threads and CPU binding are the same in every arm) or none (they "
        "are left alone).",
    )
    placement: Placement = Field(
        default="pinned",
        description="pinned (two jobs, the same nodes), allocation (one job, the arms in turn), parallel "
        "(two jobs at once), "
        "or disjoint (different nodes on purpose).",
    )
    arms: dict[ArmName, Arm] = Field(
        default_factory=dict, description="What one arm has beside the rest: arms are called a, b, c, …"
    )
    slurm: Slurm = Field(default_factory=lambda: Slurm(), description="What Slurm is asked for.")
    watchdog: Watchdog = Field(default_factory=lambda: Watchdog(), description="When an arm counts as stalled.")
    limits: Limits = Field(
        default_factory=lambda: Limits(), description="What is not started without being asked twice."
    )
    archive: Text | None = Field(
        default=None,
        description="Where experiments are kept; relative to the current folder. Without this key: .detrun there.",
    )

    @property
    def total_ranks(self) -> int:
        """Ranks of one arm, over all its nodes."""
        return self.launch.nodes * self.launch.ranks_per_node
