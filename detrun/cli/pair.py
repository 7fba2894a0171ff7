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
    progress_console,
    to_find,
)


def pair(
    recipe: Annotated[Path, typer.Argument(help="The recipe.", metavar="RECIPE")] = Path("detrun.yaml"),
    overrides: SetOption = None,
    arms: ArmOption = None,
    archive: ArchiveOption = None,
    repeat: Annotated[
        int, typer.Option("--repeat", min=1, max=700, metavar="N", help="How many arms are held against the first one.")
    ] = 1,
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
    from detrun.experiments.checks import PairOptions
    from detrun.experiments.pair import start_pair

    options = PairOptions(repeats=repeat, agreed=yes)
    if dry_run:
        from detrun.experiments.dry_run import dry_run_pair

        sys.stdout.write(dry_run_pair(loaded, store, options))
        return 0
    cluster = choose_cluster(loaded.recipe.cluster)
    from detrun.records.jobs import ExperimentFile

    console = progress_console()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    folder = start_pair(loaded, store, cluster, options, ["detrun", *sys.argv[1:]], say)
    if detach:
        sys.stdout.write(f"{folder.id}\n")
        which = to_find(folder)
        say(f"submitted; detrun attach {which} waits for the verdict, detrun status {which} looks once.")
        return 0
    return follow_to_verdict(folder, ExperimentFile.read(folder.experiment_file), cluster, as_json, standalone)
