"""`detrun trace`: runs a recipe's arms with the tracer on, and records; nothing is held against anything."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from detrun.experiments.checks import check_before_launch, check_shape
from detrun.experiments.plan import Plan, Site, pair_arms
from detrun.experiments.start import Question, start
from detrun.experiments.trace_plan import BYTE_BUDGET, Request, Window, plan_traced
from detrun.launch.cluster import Cluster
from detrun.recipe import LoadedRecipe, check_launchable, check_recorded
from detrun.records.archive import Archive
from detrun.records.layout import ExperimentFolder


@dataclass(frozen=True)
class TraceOptions:
    """steps: the window; default: the first step. byte_budget: for all ranks of an arm. arms: how many are run."""

    level: int = 4
    steps: tuple[int, int] = (1, 1)
    ranks: tuple[int, ...] | None = None
    scopes: tuple[str, ...] | None = None
    byte_budget: int = BYTE_BUDGET
    call_sites: bool = False
    arms: int = 1
    agreed: bool = False


def plan_trace(
    loaded: LoadedRecipe, folder: ExperimentFolder, cluster: str, options: TraceOptions, environment: Mapping[str, str]
) -> Plan:
    """The jobs of arms that trace. Raises RecipeError for a window beyond the recipe's steps or ranks."""
    recipe = loaded.recipe
    check_launchable(loaded)
    check_recorded(loaded, "trace")
    check_shape(loaded, cluster)
    first, last = options.steps
    if last > recipe.steps:
        raise loaded.error("steps", f"steps {first} to {last} are asked for, the recipe takes {recipe.steps}", None)
    if options.ranks and max(options.ranks) >= recipe.total_ranks:
        what = f"there is no rank {max(options.ranks)} (ranks are 0 to {recipe.total_ranks - 1})"
        raise loaded.error("launch.ranks_per_node", what, None)
    window = Window(options.steps, options.ranks, options.scopes)
    budget = max(1, options.byte_budget // len(window.ranks_of(recipe.total_ranks)))
    request = Request(window, options.level, budget, options.call_sites)
    arms = pair_arms(recipe, options.arms - 1)
    site = Site.of(loaded, folder, cluster, environment)
    return plan_traced(site, arms, {arm.id: request for arm in arms}, last)


def start_trace(
    loaded: LoadedRecipe,
    archive: Archive,
    cluster: Cluster,
    options: TraceOptions,
    command_line: Sequence[str],
    say: Callable[[str], None],
) -> ExperimentFolder:
    """Submits the arms and returns their experiment's folder."""
    environment = dict(os.environ)
    planned = plan_trace(loaded, ExperimentFolder(archive.root / "planned"), cluster.name, options, environment)
    cost = check_before_launch(loaded, archive, cluster.name, planned, options.agreed, environment)
    if cost:
        say(cost)
    return start(
        loaded,
        archive,
        cluster,
        Question("trace", steps=options.steps[1]),
        lambda folder: plan_trace(loaded, folder, cluster.name, options, environment),
        command_line,
    )
