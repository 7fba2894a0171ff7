"""From a recipe to what is launched: arms, their commands and environments, the jobs that carry them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from detrun.launch.cluster import JobRequest
from detrun.launch.command import srun_options
from detrun.launch.environment import ArmEnvironment, arm_environment
from detrun.launch.spec import JobSpec, Segment, WatchdogLimits
from detrun.recipe import Recipe, expand
from detrun.records.jobs import ArmPlan, Declared
from detrun.records.layout import ExperimentFolder


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before the first job goes in."""

    arms: tuple[ArmPlan, ...]
    requests: tuple[JobRequest, ...]
    pinned: dict[str, str]
    minutes_per_arm: int


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
    plans = []
    for position, arm in enumerate(arm_ids(repeats + 1)):
        own = recipe.arms.get(arm)
        declared = Declared(args=list(own.args), env=dict(own.env)) if own else Declared()
        plans.append(ArmPlan(id=arm, role="repeat" if position else "reference", declared=declared))
    return tuple(plans)


def plan_arms(
    recipe: Recipe,
    recipe_folder: Path,
    workdir: Path,
    folder: ExperimentFolder,
    arms: Sequence[ArmPlan],
    cluster: str,
    environment: Mapping[str, str],
) -> Plan:
    """The jobs of an experiment whose arms all run from the start to the end.

    environment: what the command itself was started with; jobs inherit it. On one machine the arms run
    in turn inside one job, unless the placement is `parallel`.
    """
    in_turn = recipe.placement == "allocation" or (cluster == "local" and recipe.placement != "parallel")
    segments, pinned = [], {}
    for arm in arms:
        segment, arm_env = _segment(recipe, recipe_folder, workdir, folder, arm, cluster, environment)
        segments.append(segment)
        pinned.update(arm_env.pinned)
    if cluster == "slurm" and recipe.pin == "default":
        pinned["CPU binding"] = "none (srun --cpu-bind=none)"
    minutes = max(1, -(-recipe.slurm.time_seconds // 60))
    groups = [segments] if in_turn else [[segment] for segment in segments]
    names = [f"{folder.id}-{'arms' if in_turn else group[0].arm}" for group in groups]
    requests = []
    for position, group in enumerate(groups):
        chained = cluster == "slurm" and recipe.placement in {"pinned", "disjoint"} and not in_turn
        spec = JobSpec(
            job=names[position],
            experiment=str(folder.path),
            cluster=cluster,
            placement=recipe.placement,
            segments=group,
            watchdog=WatchdogLimits(recipe.watchdog.multiple, recipe.watchdog.at_least, recipe.watchdog.start),
            minutes=minutes * len(group) if cluster == "slurm" else 0,
            follower=names[position + 1] if chained and position + 1 < len(groups) else None,
        )
        requests.append(
            JobRequest(
                spec=spec,
                minutes=minutes * len(group),
                options=_sbatch_options(recipe) if cluster == "slurm" else {},
                setup=recipe.slurm.setup if cluster == "slurm" else (),
                after=names[position - 1] if chained and position and recipe.placement == "pinned" else None,
                hold=bool(chained and position and recipe.placement == "disjoint"),
            )
        )
    return Plan(tuple(arms), tuple(requests), pinned, minutes)


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


def _segment(
    recipe: Recipe,
    recipe_folder: Path,
    workdir: Path,
    folder: ExperimentFolder,
    arm: ArmPlan,
    cluster: str,
    environment: Mapping[str, str],
) -> tuple[Segment, ArmEnvironment]:
    launch = recipe.launch
    values = {
        "seed": str(recipe.seed),
        "steps": str(recipe.steps),
        "out": str(folder.work_dir(arm.id)),
        "arm": arm.id,
        "attempt": "0",
        "nodes": str(launch.nodes),
        "ranks": str(recipe.total_ranks),
        "recipe_dir": str(recipe_folder),
    }
    saves: Sequence[str] = ()
    if recipe.checkpoint is not None and recipe.checkpoint.save_every is not None:
        values["save_every"] = str(recipe.checkpoint.save_every)
        saves = recipe.checkpoint.save_args
    argv = [expand(text, values) for text in (*launch.command, *launch.args, *saves, *arm.declared.args)]
    asked = {name: expand(text, values) for name, text in {**launch.env, **arm.declared.env}.items()}
    local = cluster == "local"
    together = 1 if recipe.placement != "parallel" else 2
    arm_env = arm_environment(
        arm=arm.id,
        attempt=0,
        attempt_folder=str(folder.attempt(arm.id, 0).path),
        seed=recipe.seed,
        steps=recipe.steps,
        state_every=recipe.metrics.state_every,
        determinism=recipe.determinism,
        pin=recipe.pin == "default",
        asked=asked,
        inherited=environment if local else {},
        local_threads=max(1, len(os.sched_getaffinity(0)) // (recipe.total_ranks * together)) if local else None,
    )
    prepend = {"PYTHONPATH": str(folder.recorder_dir)}
    if own_bin := detrun_bin(recipe, cluster, environment):
        prepend["PATH"] = own_bin
    env = dict(arm_env.env)
    unset: list[str] = []
    if local:
        # submitit's local executor blanks this one; the ranks see what the user's shell would show them.
        if "CUDA_VISIBLE_DEVICES" in environment:
            env.setdefault("CUDA_VISIBLE_DEVICES", environment["CUDA_VISIBLE_DEVICES"])
        elif "CUDA_VISIBLE_DEVICES" not in env:
            unset.append("CUDA_VISIBLE_DEVICES")
    container = dict(recipe.slurm.container)
    python = container.pop("python", None)
    srun: list[str] = ["--cpu-bind=none"] if recipe.pin == "default" else []
    if container:
        srun += _container_arguments(container, folder)
        python = python or "python3"
    segment = Segment(
        arm=arm.id,
        attempt=0,
        argv=argv,
        env=env,
        unset=unset,
        workdir=str(workdir),
        launcher=launch.launcher,
        nodes=launch.nodes,
        ranks_per_node=launch.ranks_per_node,
        steps=recipe.steps,
        srun=srun,
        wrapper_python=str(python) if python else None,
        prepend=prepend,
        threads=arm_env.threads,
    )
    return segment, arm_env


def _container_arguments(container: Mapping[str, object], folder: ExperimentFolder) -> list[str]:
    """srun's container arguments as the recipe has them; the experiment's folder is mounted besides."""
    named = {key if key.startswith("container") else f"container-{key}": value for key, value in container.items()}
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
