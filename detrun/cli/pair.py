"""`detrun pair`: the same training twice, held against itself bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from detrun.cli.common import (
    ArchiveOption,
    ArmOption,
    JsonOption,
    SetOption,
    StandaloneOption,
    choose_cluster,
    follow_to_verdict,
    open_archive,
    say,
    say_submitted,
)


def pair(
    recipe: Annotated[Path, typer.Argument(help="The recipe.", metavar="RECIPE")] = Path("detrun.yaml"),
    overrides: SetOption = None,
    arms: ArmOption = None,
    archive: ArchiveOption = None,
    repeat: Annotated[
        int, typer.Option("--repeat", min=1, max=700, metavar="N", help="How many arms are held against the first one.")
    ] = 1,
    resume: Annotated[
        bool, typer.Option("--resume", help="If the two are identical, go on with detrun resume-check.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print every batch script and environment; submit nothing.")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Submit, print the experiment's id, and return.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Submit even above limits.node_hours.")] = False,
    standalone: StandaloneOption = False,
    as_json: JsonOption = False,
) -> int:
    """Launches the same training twice from identical seeds and reports the first step at which the two differ.

    Exit code 0: identical. 1: diverged. 2: the recipe or the command line is wrong. 3: not verified. 4: a job could
    not be submitted, failed, stalled or was lost. 70: a bug of detrun. 130: interrupted, the jobs go on.
    """
    from detrun.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or (), arms or ())
    store = open_archive(archive, loaded.archive)
    from detrun.cli.resume_check import run_resume_check
    from detrun.errors import UsageError
    from detrun.experiments.checks import PairOptions
    from detrun.experiments.pair import start_pair
    from detrun.experiments.resume import ResumeOptions, check_resumable

    options = PairOptions(repeats=repeat, agreed=yes)
    if resume:
        if detach or dry_run:
            raise UsageError("--resume waits for the pair's verdict", hint="leave out --detach and --dry-run")
        check_resumable(loaded)
    if dry_run:
        from detrun.experiments.dry_run import dry_run_pair

        sys.stdout.write(dry_run_pair(loaded, store, options))
        return 0
    cluster = choose_cluster(loaded.recipe.cluster)
    from detrun.records.jobs import ExperimentFile

    folder = start_pair(loaded, store, cluster, options, ["detrun", *sys.argv[1:]], say)
    if detach:
        say_submitted(folder)
        return 0
    experiment = ExperimentFile.read(folder.experiment_file)
    code = follow_to_verdict(folder, experiment, cluster, as_json, standalone, more_follows=resume)
    if not resume:
        return code
    if code != 0:
        say("resuming was not checked: it can only be where the pair is identical.")
        return code
    return run_resume_check(loaded, store, ResumeOptions(agreed=yes), as_json=as_json, standalone=standalone)
