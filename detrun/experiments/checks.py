"""What an experiment asks for and whether it can be had: said before anything is written or submitted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from detrun.determinism.canonical import check_environment
from detrun.errors import UsageError
from detrun.experiments.plan import Plan, Site, detrun_bin, pair_arms, plan_pair_jobs
from detrun.experiments.source_checks import check_patterns
from detrun.launch.preflight import check_command, check_node_hours, check_space, folder_size, trainer_path
from detrun.launch.slurm import describe_partition
from detrun.recipe import LoadedRecipe, check_launchable
from detrun.records.archive import Archive
from detrun.records.jobs import MAX_RANKS
from detrun.records.layout import ExperimentFolder


@dataclass(frozen=True)
class PairOptions:
    """repeats: how many arms are held against the reference. agreed: --yes was given. labels: what the experiment
    belongs to, such as a night."""

    repeats: int = 1
    agreed: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)


def plan_pair(
    loaded: LoadedRecipe, folder: ExperimentFolder, cluster: str, options: PairOptions, environment: Mapping[str, str]
) -> Plan:
    """The jobs of a pair. Raises RecipeError for what this cluster or this experiment cannot do."""
    recipe = loaded.recipe
    check_launchable(loaded)
    arms = pair_arms(recipe, options.repeats)
    strangers = sorted(set(recipe.arms) - {arm.id for arm in arms})
    if strangers:
        raise loaded.error(
            f"arms.{strangers[0]}",
            f"arms.{strangers[0]}: this experiment has the arms {', '.join(arm.id for arm in arms)}",
            f"--repeat {len(arms)} has one more",
        )
    check_shape(loaded, cluster)
    return plan_pair_jobs(Site.of(loaded, folder, cluster, environment), arms)


def check_shape(loaded: LoadedRecipe, cluster: str) -> None:
    """What holds for any experiment on this cluster. Raises RecipeError."""
    recipe = loaded.recipe
    check_patterns(loaded)
    if recipe.total_ranks > MAX_RANKS:
        what = f"launch: {recipe.total_ranks:,} ranks, at most {MAX_RANKS:,} are recorded"
        raise loaded.error("launch.ranks_per_node", what, "nodes × ranks_per_node is the number of ranks")
    if cluster == "local":
        if recipe.launch.nodes > 1:
            raise loaded.error("launch.nodes", "launch.nodes: one machine is one node", "nodes: 1, or cluster: slurm")
        if recipe.launch.launcher == "srun":
            what = "launch.launcher: srun needs Slurm"
            raise loaded.error("launch.launcher", what, "launcher: torchrun starts the ranks on one machine")
        if recipe.placement == "disjoint":
            what = "placement: disjoint needs Slurm"
            raise loaded.error("placement", what, "one machine runs the arms in turn, or with placement: parallel")


def check_before_launch(
    loaded: LoadedRecipe,
    archive: Archive,
    cluster: str,
    plan: Plan,
    agreed: bool,
    environment: Mapping[str, str],
    times: int = 1,
) -> str | None:
    """The program is there, its variables allow determinism, and space, node-hours and time limit suffice.

    plan: as it would be in any folder. agreed: --yes was given. times: how often its arms are run. Returns what it may
    cost at most, in node-hours, where that is worth a word. Raises RecipeError, UsageError (node-hours without --yes),
    ArchiveError or ClusterError.
    """
    recipe = loaded.recipe
    brought_along = cluster == "slurm" and bool(recipe.slurm.setup or recipe.slurm.container)
    for request in plan.requests:
        for segment in request.spec.segments:
            known = segment.env if cluster == "slurm" else {**environment, **segment.env}
            if not brought_along:
                path = trainer_path({**environment, **segment.env}, detrun_bin(recipe, cluster, environment))
                check_command(segment.argv, Path(segment.workdir), path)
            if recipe.determinism == "strict" and (refused := check_environment(known)):
                raise loaded.error("determinism", f"determinism: strict: {refused[0]}", None)
    if cluster == "slurm" and (odd := sorted({"%", "\\"} & set(str(archive.root)))):
        raise UsageError(
            f"sbatch would read the {odd[0]} in the archive's path as a pattern: {archive.root}",
            hint="--archive DIR (or DETRUN_ARCHIVE) names another folder",
        )
    check_space(archive.root, _size_of_last(archive, recipe.name))
    if cluster != "slurm":
        return None
    attempts = times * sum(len(request.spec.segments) for request in plan.requests)
    what = "arms" if attempts == times * len(plan.arms) else "attempts"
    cost = check_node_hours(attempts, recipe.launch.nodes, plan.minutes_per_arm, recipe.limits.node_hours, agreed, what)
    _check_partition(loaded, plan)
    return cost


def _check_partition(loaded: LoadedRecipe, plan: Plan) -> None:
    """A job that its partition can never start would wait for ever."""
    recipe = loaded.recipe
    partition = describe_partition(recipe.slurm.partition)
    longest = max(request.minutes for request in plan.requests)
    if partition.minutes is not None and longest > partition.minutes:
        together = recipe.placement == "allocation"
        raise loaded.error(
            "slurm.time",
            f"slurm.time: the job needs {longest} minutes{' (all arms in one allocation)' if together else ''}, "
            f"the partition allows {partition.minutes:g}",
            "a shorter slurm.time or another partition"
            + (", or placement: pinned, which has a job an arm" if together else ""),
        )
    apart_from = sum(request.hold for request in plan.requests) + 1
    wanted = recipe.launch.nodes * apart_from
    if partition.nodes is not None and wanted > partition.nodes:
        apart = f" for {apart_from} arms on different nodes" if apart_from > 1 else ""
        raise loaded.error(
            "launch.nodes",
            f"launch.nodes: {wanted} nodes are needed{apart}, the partition has {partition.nodes}",
            "fewer nodes, or another slurm.partition",
        )


def _size_of_last(archive: Archive, name: str) -> int | None:
    """What the arms of the newest experiment of this recipe wrote, in bytes."""
    for folder in reversed(archive.list()):
        if folder.id.startswith(f"{name}-"):
            return folder_size(folder.path / "arms")
    return None
