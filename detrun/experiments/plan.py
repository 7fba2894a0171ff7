"""From a recipe to what is launched: arms, their commands and environments, the jobs that carry them."""

from __future__ import annotations

import glob
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from detrun.launch.cluster import JobRequest
from detrun.launch.command import srun_options
from detrun.launch.environment import ArmEnvironment, arm_environment
from detrun.launch.spec import CHECKPOINT, JobSpec, Segment, WatchdogLimits
from detrun.recipe import LoadedRecipe, Recipe, expand
from detrun.records.jobs import ArmPlan, Declared
from detrun.records.layout import ExperimentFolder
from detrun.records.sources import SourceSpec, sources_of
from detrun.records.sources.patterns import is_file

_FOR_THE_RECORDER = frozenset({"DETRUN_ATTEMPT_DIR", "DETRUN_STATE_EVERY", "DETRUN_STATE_AT", "DETRUN_DETERMINISM"})


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before the first job goes in."""

    arms: tuple[ArmPlan, ...]
    requests: tuple[JobRequest, ...]
    pinned: dict[str, str]
    minutes_per_arm: int


@dataclass(frozen=True)
class Site:
    """Where an experiment's arms are to run. environment: what the command itself was started with; jobs inherit it."""

    recipe: Recipe
    recipe_folder: Path
    workdir: Path
    folder: ExperimentFolder
    cluster: str
    environment: Mapping[str, str]

    @classmethod
    def of(cls, loaded: LoadedRecipe, folder: ExperimentFolder, cluster: str, environment: Mapping[str, str]) -> Site:
        return cls(loaded.recipe, loaded.recipe_dir, loaded.workdir, folder, cluster, environment)

    @property
    def local(self) -> bool:
        return self.cluster == "local"

    def values(self, arm: str, attempt: int) -> dict[str, str]:
        """The placeholders' values in one attempt of an arm."""
        recipe = self.recipe
        values = {
            "seed": str(recipe.seed),
            "steps": str(recipe.steps),
            "out": str(self.folder.work_dir(arm)),
            "arm": arm,
            "attempt": str(attempt),
            "nodes": str(recipe.launch.nodes),
            "ranks": str(recipe.total_ranks),
            "recipe_dir": str(self.recipe_folder),
        }
        if recipe.checkpoint is not None and recipe.checkpoint.save_every is not None:
            values["save_every"] = str(recipe.checkpoint.save_every)
        return values


@dataclass(frozen=True)
class Run:
    """One attempt of an arm as it is wanted.

    interrupt: how it is to be ended (see `Segment.interrupt`). continues: the arm it goes on from, if not its own.
    saves, captures: whether it saves checkpoints, and its state is recorded. sabotage: what is broken at its restore.
    trace: what its ranks are to trace, as DETRUN_TRACE has it.
    """

    arm: ArmPlan
    attempt: int = 0
    interrupt: dict[str, Any] | None = None
    continues: str | None = None
    saves: bool = True
    captures: bool = True
    sabotage: str | None = None
    trace: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class JobPlan:
    """One job: its runs, in turn. minutes: its time limit, if not that of its arms together. requeue: the scheduler may
    start it again. waits: only after the job before it, on the same nodes. any_nodes: its nodes are left to Slurm."""

    suffix: str
    runs: Sequence[Run]
    minutes: int | None = None
    requeue: bool = False
    waits: bool = False
    any_nodes: bool = False


def arm_ids(count: int) -> list[str]:
    """a, b, … z, aa, ab, …"""
    ids = []
    for number in range(count):
        text, rest = "", number
        while True:
            text = chr(ord("a") + rest % 26) + text
            rest = rest // 26 - 1
            if rest < 0:
                break
        ids.append(text)
    return ids


def pair_arms(recipe: Recipe, repeats: int) -> tuple[ArmPlan, ...]:
    """The reference and its repeats, each with what the recipe declares for it alone."""
    return tuple(
        ArmPlan(id=arm, role="repeat" if position else "reference", declared=declared_for(recipe, arm))
        for position, arm in enumerate(arm_ids(repeats + 1))
    )


def declared_for(recipe: Recipe, arm: str) -> Declared:
    """What the recipe declares for one arm alone."""
    own = recipe.arms.get(arm)
    return Declared(args=list(own.args), env=dict(own.env)) if own else Declared()


def plan_pair_jobs(site: Site, arms: Sequence[ArmPlan]) -> Plan:
    """The jobs of an experiment whose arms all run from the start to the end.

    On one machine the arms run in turn inside one job, unless the placement is `parallel`.
    """
    return plan_whole_runs(site, [Run(arm) for arm in arms])


def plan_whole_runs(site: Site, runs: Sequence[Run]) -> Plan:
    """The same for runs, one an arm, of which more is wanted."""
    in_turn = site.recipe.placement == "allocation" or (site.local and site.recipe.placement != "parallel")
    groups = [JobPlan("arms", runs)] if in_turn else [JobPlan(run.arm.id, [run]) for run in runs]
    return plan_jobs(site, [run.arm for run in runs], groups)


def plan_jobs(site: Site, arms: Sequence[ArmPlan], jobs: Sequence[JobPlan], reference: str | None = None) -> Plan:
    """Jobs as they are submitted, in this order. On Slurm, `pinned` has each wait for the one before and get its nodes,
    `disjoint` has each get other ones; a job with `waits` comes after the one before in any placement.

    reference: the attempt folder of an uninterrupted arm.
    """
    recipe, slurm = site.recipe, not site.local
    pinned: dict[str, str] = {}
    minutes = max(1, -(-recipe.slurm.time_seconds // 60))
    names = [f"{site.folder.id}-{job.suffix}" for job in jobs]
    requests: list[JobRequest] = []
    for position, job in enumerate(jobs):
        segments = []
        for run in job.runs:
            segment, arm_env = segment_of(site, run)
            segments.append(segment)
            pinned.update(arm_env.pinned)
        following = jobs[position + 1] if position + 1 < len(jobs) else None
        limit = job.minutes or minutes * len(segments)
        after = slurm and position > 0 and (job.waits or recipe.placement == "pinned")
        spec = JobSpec(
            job=names[position],
            experiment=str(site.folder.path),
            cluster=site.cluster,
            placement="pinned" if following is not None and following.waits else recipe.placement,
            segments=segments,
            watchdog=WatchdogLimits(recipe.watchdog.multiple, recipe.watchdog.at_least, recipe.watchdog.start),
            minutes=limit if slurm else 0,
            follower=names[position + 1] if slurm and following is not None and _settles(recipe, following) else None,
            reference=reference,
        )
        requests.append(
            JobRequest(
                spec=spec,
                minutes=limit,
                options=_sbatch_options(recipe) if slurm else {},
                setup=recipe.slurm.setup if slurm else (),
                after=names[position - 1] if after else None,
                hold=slurm and position > 0 and recipe.placement == "disjoint" and not job.waits,
                requeue=job.requeue,
            )
        )
    if slurm and recipe.pin == "default":
        pinned["CPU binding"] = "none (srun --cpu-bind=none)"
    return Plan(tuple(arms), tuple(requests), pinned, minutes)


def _settles(recipe: Recipe, job: JobPlan) -> bool:
    """Whether a job gets its nodes from the one before it."""
    if job.any_nodes:
        return False
    return job.waits or recipe.placement in {"pinned", "disjoint"}


def state_at(recipe: Recipe) -> str | None:
    """DETRUN_STATE_AT: the steps at which the recipe saves; None for one that says nothing of saving.

    A signal and the program's own exit save where no schedule says so. The same in every experiment of a recipe, so
    that an arm of one can be held against an arm of another.
    """
    if recipe.checkpoint is None:
        return None
    every = recipe.checkpoint.save_every
    steps = set(range(every, recipe.steps + 1, every)) if every else set()
    # What the program is told of its saves may be their steps; one too many costs a capture.
    steps.update(int(word) for word in recipe.checkpoint.save_args if word.isdecimal() and len(word) < 10)
    steps.update(each.at_step for each in recipe.interrupt if each.kind in ("signal", "stop") and each.at_step)
    return ",".join(str(step) for step in sorted(steps) if 0 < step <= recipe.steps)


def detrun_bin(recipe: Recipe, cluster: str, environment: Mapping[str, str]) -> str | None:
    """The folder of detrun's own Python, to go first on PATH where the user has activated no environment.

    Whoever calls `.venv/bin/detrun` means that environment's python; whoever has one active, loads
    modules or runs in a container means theirs.
    """
    if "PATH" in recipe.launch.env or environment.get("VIRTUAL_ENV") or environment.get("CONDA_PREFIX"):
        return None
    if cluster == "slurm" and (recipe.slurm.setup or recipe.slurm.container):
        return None
    return str(Path(sys.executable).parent) if sys.prefix != sys.base_prefix else None


def segment_of(site: Site, run: Run) -> tuple[Segment, ArmEnvironment]:
    """One attempt of one arm, ready to be frozen."""
    recipe, launch, arm = site.recipe, site.recipe.launch, run.arm
    values = site.values(arm.id, run.attempt)
    command: list[str] = [*launch.command, *launch.args]
    checkpoints = None
    if recipe.checkpoint is not None:
        checkpoints = {
            "directory": expand(recipe.checkpoint.directory, values),
            "pattern": recipe.checkpoint.pattern,
        }
        if run.saves:
            command += recipe.checkpoint.save_args
        if run.attempt:
            values["checkpoint"] = CHECKPOINT
    command += arm.declared.args
    if recipe.checkpoint is not None and run.attempt:
        command += recipe.checkpoint.resume_args
    argv = [expand(text, values) for text in command]
    asked = {name: expand(text, values) for name, text in {**launch.env, **arm.declared.env}.items()}
    together = 1 if recipe.placement != "parallel" else 2
    arm_env = arm_environment(
        arm=arm.id,
        attempt=run.attempt,
        attempt_folder=str(site.folder.attempt(arm.id, run.attempt).path),
        seed=recipe.seed,
        steps=recipe.steps,
        state_every=recipe.metrics.state_every,
        determinism=recipe.determinism,
        pin=recipe.pin == "default",
        asked=asked,
        inherited=site.environment if site.local else {},
        local_threads=max(1, len(os.sched_getaffinity(0)) // (recipe.total_ranks * together)) if site.local else None,
        state_at=state_at(recipe) if run.captures else "none",
    )
    recorded = recipe.metrics.source == "recorder"
    prepend = {"PYTHONPATH": str(site.folder.recorder_dir)} if recorded else {}
    if own_bin := detrun_bin(recipe, site.cluster, site.environment):
        prepend["PATH"] = own_bin
    env = dict(arm_env.env)
    if not recorded:
        env = {name: value for name, value in env.items() if name not in _FOR_THE_RECORDER}
        # What a program prints is to be there when it ends, however that comes.
        env.setdefault("PYTHONUNBUFFERED", "1")
    if run.sabotage:
        env["DETRUN_SABOTAGE"] = json.dumps({"kind": run.sabotage})
    if run.trace is not None:
        env["DETRUN_TRACE"] = json.dumps(dict(run.trace))
    unset: list[str] = []
    if site.local:
        # submitit's local executor blanks this one; the ranks see what the user's shell would show them.
        if "CUDA_VISIBLE_DEVICES" in site.environment:
            env.setdefault("CUDA_VISIBLE_DEVICES", site.environment["CUDA_VISIBLE_DEVICES"])
        elif "CUDA_VISIBLE_DEVICES" not in env:
            unset.append("CUDA_VISIBLE_DEVICES")
    container = dict(recipe.slurm.container)
    python = container.pop("python", None)
    srun: list[str] = ["--cpu-bind=none"] if recipe.pin == "default" else []
    if container:
        srun += _container_arguments(container, site.folder)
        python = python or "python3"
    segment = Segment(
        arm=arm.id,
        attempt=run.attempt,
        argv=argv,
        env=env,
        unset=unset,
        workdir=str(site.workdir),
        launcher=launch.launcher,
        nodes=launch.nodes,
        ranks_per_node=launch.ranks_per_node,
        steps=recipe.steps,
        srun=srun,
        wrapper_python=str(python) if python else None,
        prepend=prepend,
        threads=arm_env.threads,
        interrupt=run.interrupt,
        checkpoints=checkpoints,
        continues=run.continues,
        recorder=recorded,
        sources=[spec.as_dict() for spec in written_sources(site, values)],
        metrics=[*recipe.metrics.required, *recipe.metrics.optional],
    )
    return segment, arm_env


def written_sources(site: Site, values: Mapping[str, str]) -> list[SourceSpec]:
    """What the recipe names as sources beside the recorder, with paths as one attempt of an arm has them."""
    found = []
    # What stands for a place is no pattern, whatever characters are in it.
    literal = {name: glob.escape(value) for name, value in values.items()}
    for spec in sources_of(site.recipe.metrics.model_dump(mode="json")):
        path = None if spec.path is None else expand(spec.path, literal)
        if path is not None and not Path(path).is_absolute():
            path = f"{glob.escape(str(site.workdir))}/{path}"
        found.append(replace(spec, path=path, pattern=pattern_place(site, spec.pattern)))
    return found


def pattern_place(site: Site, pattern: str | None) -> str | None:
    """A shipped pattern by its name; a file's by where the experiment keeps its copy."""
    if pattern is None or not is_file(pattern):
        return pattern
    return str(site.folder.patterns_dir / Path(pattern).name)


def _container_arguments(container: Mapping[str, object], folder: ExperimentFolder) -> list[str]:
    """srun's container arguments as the recipe has them; the experiment's folder is mounted besides."""
    whole = ("container", "no-container")
    named = {key if key.startswith(whole) else f"container-{key}": value for key, value in container.items()}
    own = f"{folder}:{folder}"
    mounts = str(named.get("container-mounts") or "")
    named["container-mounts"] = f"{mounts},{own}" if mounts else own
    return srun_options(named)


def _sbatch_options(recipe: Recipe) -> dict[str, object]:
    slurm = recipe.slurm
    options: dict[str, object] = {
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "gpus-per-node": slurm.gpus_per_node,
        "constraint": slurm.constraint,
    }
    options.update({key.replace("_", "-"): value for key, value in slurm.extra.items()})
    return options
