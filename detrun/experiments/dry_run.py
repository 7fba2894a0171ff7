"""`--dry-run`: everything that a pair would submit, on a machine with or without a cluster."""

from __future__ import annotations

import os
from dataclasses import replace

from detrun.experiments.checks import PairOptions, plan_pair
from detrun.experiments.plan import describe
from detrun.launch.dryrun import render_batch_script
from detrun.launch.slurm import slurm_answers
from detrun.recipe import LoadedRecipe
from detrun.records.archive import Archive
from detrun.records.layout import ExperimentFolder


def dry_run_pair(loaded: LoadedRecipe, archive: Archive, options: PairOptions) -> str:
    """Every job's batch script (on Slurm), and every arm's command and environment."""
    wanted = loaded.recipe.cluster
    cluster = wanted if wanted != "auto" else "slurm" if slurm_answers() else "local"
    folder = ExperimentFolder(archive.root / f"{loaded.recipe.name}-pair-DRY-RUN")
    plan = plan_pair(loaded, folder, cluster, options, dict(os.environ))
    parts = []
    for request in plan.requests:
        after = f"ID_OF_{request.after.rsplit('-', 1)[-1].upper()}" if request.after else None
        script = render_batch_script(replace(request, after=after)) if cluster == "slurm" else None
        parts.append(describe(request, script))
    return "\n".join(parts)
