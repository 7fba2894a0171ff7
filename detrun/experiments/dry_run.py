"""`--dry-run`: everything that an experiment would submit, on a machine with or without a cluster."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace

from detrun.experiments.checks import PairOptions, plan_pair
from detrun.experiments.plan import Plan
from detrun.experiments.resume import ResumeOptions, plan_resume
from detrun.launch.cluster import JobRequest
from detrun.launch.command import srun_argv, torchrun_argv
from detrun.launch.dryrun import render_batch_script
from detrun.launch.slurm import slurm_answers
from detrun.launch.spec import CHECKPOINT
from detrun.recipe import LoadedRecipe
from detrun.records.archive import Archive
from detrun.records.layout import ExperimentFolder


def dry_run_pair(loaded: LoadedRecipe, archive: Archive, options: PairOptions) -> str:
    """Every job's batch script (on Slurm), and every arm's command and environment."""
    return _dry_run(
        loaded, archive, "pair", lambda folder, cluster: plan_pair(loaded, folder, cluster, options, dict(os.environ))
    )


def dry_run_resume(loaded: LoadedRecipe, archive: Archive, options: ResumeOptions) -> str:
    """The same for a resume check, with every attempt and how it is interrupted; an earlier pair's arm is not used."""
    return _dry_run(
        loaded,
        archive,
        "resume-check",
        lambda folder, cluster: plan_resume(loaded, folder, cluster, options, dict(os.environ)),
    )


def _dry_run(
    loaded: LoadedRecipe, archive: Archive, kind: str, plan_in: Callable[[ExperimentFolder, str], Plan]
) -> str:
    wanted = loaded.recipe.cluster
    cluster = wanted if wanted != "auto" else "slurm" if slurm_answers() else "local"
    folder = ExperimentFolder(archive.root / f"{loaded.recipe.name}-{kind}-DRY-RUN")
    parts = []
    for request in plan_in(folder, cluster).requests:
        after = f"ID_OF_{request.after.rsplit('-', 1)[-1].upper()}" if request.after else None
        script = render_batch_script(replace(request, after=after)) if cluster == "slurm" else None
        parts.append(_described(request, script))
    return "\n".join(parts)


def _described(request: JobRequest, script: str | None) -> str:
    """What is shown of one job: its script, and each arm's command and environment."""
    lines = [f"### job {request.spec.job}"]
    if script is not None:
        lines += [script.rstrip(), ""]
    for segment in request.spec.segments:
        ranks = "1 rank" if segment.ranks == 1 else f"{segment.ranks} ranks"
        lines.append(f"# arm {segment.arm}, attempt {segment.attempt}: {ranks}, in {segment.workdir}")
        if segment.attempt:
            which = (
                f"the one that arm {segment.continues} resumes from" if segment.continues else "the newest complete one"
            )
            lines.append(f"#   {CHECKPOINT}: {which}, found right before it starts")
        if segment.interrupt:
            how = {key: value for key, value in segment.interrupt.items() if value is not None and key != "seed"}
            told = (f"{key}: {shlex.join(value) if key == 'command' else value}" for key, value in how.items())
            lines.append(f"#   interrupted: {', '.join(told)}")
        lines.append(f"#   {shlex.join(segment.argv)}")
        if segment.launcher == "torchrun":
            rank_script = f"{request.spec.experiment}/jobs/rank.sh"
            started = torchrun_argv(segment, rank_script, 0, "FIRST_NODE", 0)[: -len(segment.argv)]
            lines.append(f"#   started by: {shlex.join(started)}")
        if request.spec.cluster == "slurm":
            wrapper = [segment.wrapper_python or sys.executable, f"{request.spec.experiment}/jobs/wrapper.py"]
            lines.append(f"#   as the step: {shlex.join(srun_argv(segment, wrapper))}")
        for name in sorted(segment.env):
            lines.append(f"#   {name}={shlex.quote(segment.env[name])}")
        for name, value in sorted(segment.prepend.items()):
            lines.append(f"#   {name}={value}:${name}")
        if segment.threads:
            lines.append("#   OMP_NUM_THREADS=<cores of the node / ranks on it>")
        for name in segment.unset:
            lines.append(f"#   unset: {name}")
        lines.append("")
    return "\n".join(lines)
