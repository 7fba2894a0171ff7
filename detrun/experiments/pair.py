"""`detrun pair`: is the same training, run again from the same seeds, the same to the last bit?"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from detrun.experiments.checks import PairOptions, check_before_launch, plan_pair
from detrun.experiments.start import Question, start
from detrun.launch.cluster import Cluster
from detrun.recipe import LoadedRecipe
from detrun.records.archive import Archive
from detrun.records.layout import ExperimentFolder


def start_pair(
    loaded: LoadedRecipe,
    archive: Archive,
    cluster: Cluster,
    options: PairOptions,
    command_line: Sequence[str],
    say: Callable[[str], None],
) -> ExperimentFolder:
    """Submits the arms and returns their experiment's folder. say: told what it may cost, before anything goes in.

    Where anything fails on the way, nothing half-made is left behind.
    """
    environment = dict(os.environ)
    planned = plan_pair(loaded, ExperimentFolder(archive.root / "planned"), cluster.name, options, environment)
    cost = check_before_launch(loaded, archive, cluster.name, planned, options.agreed, environment)
    if cost:
        say(cost)
    return start(
        loaded,
        archive,
        cluster,
        Question("pair", labels=options.labels),
        lambda folder: plan_pair(loaded, folder, cluster.name, options, environment),
        command_line,
    )
