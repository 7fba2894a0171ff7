"""`detrun resume-check`: does a run that was really interrupted go on exactly as if it had not been?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from detrun.errors import UsageError

if TYPE_CHECKING:
    from detrun.experiments.resume import ResumeOptions
    from detrun.recipe import LoadedRecipe
    from detrun.records.archive import Archive

DEFAULT_RECIPE = Path("detrun.yaml")


def resume_check(
    recipe: Annotated[
        Path | None,
        typer.Argument(
            help="The recipe. Without it: detrun.yaml here, else the newest pair's.",
            metavar="RECIPE",
            show_default=False,
        ),
    ] = None,
    overrides: SetOption = None,
    arms: ArmOption = None,
    archive: ArchiveOption = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Run the reference anew, even where a clean pair's arm could be used.")
    ] = False,
    observer: Annotated[
        bool, typer.Option("--observer", help="Add an arm that never saves: does saving itself change the run?")
    ] = False,
    self_test: Annotated[
        bool,
        typer.Option("--self-test", help="Add arms with one thing broken on purpose: would this check see it?"),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print every batch script and environment; submit nothing.")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Submit, print the experiment's id, and return.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Submit even above limits.node_hours.")] = False,
    standalone: StandaloneOption = False,
    as_json: JsonOption = False,
) -> int:
    """Interrupts a run for real, resumes it, and holds state and metrics against a run that was not interrupted.

    Exit code 0: identical. 1: diverged, with the piece of state that was not restored. 2: the recipe or the command
    line is wrong. 3: not verified. 4: a job could not be submitted, failed, stalled or was lost. 70: a bug of detrun.
    130: interrupted, the jobs go on.
    """
    from detrun.experiments.resume import ResumeOptions
    from detrun.recipe import load_recipe

    loaded = load_recipe(recipe or _default_recipe(archive), overrides or (), arms or ())
    store = open_archive(archive, loaded.archive)
    options = ResumeOptions(observer=observer, self_test=self_test, fresh=fresh, agreed=yes)
    if dry_run:
        from detrun.experiments.dry_run import dry_run_resume

        sys.stdout.write(dry_run_resume(loaded, store, options))
        return 0
    return run_resume_check(loaded, store, options, detach=detach, as_json=as_json, standalone=standalone)


def run_resume_check(
    loaded: LoadedRecipe,
    store: Archive,
    options: ResumeOptions,
    *,
    detach: bool = False,
    as_json: bool = False,
    standalone: bool = False,
) -> int:
    """Starts a resume check and, unless detached, waits for its verdict. The exit code."""
    from detrun.experiments.resume import start_resume
    from detrun.records.jobs import ExperimentFile

    cluster = choose_cluster(loaded.recipe.cluster)
    folder = start_resume(loaded, store, cluster, options, ["detrun", *sys.argv[1:]], say)
    if detach:
        say_submitted(folder)
        return 0
    return follow_to_verdict(folder, ExperimentFile.read(folder.experiment_file), cluster, as_json, standalone)


def _default_recipe(archive: Path | None) -> Path:
    """detrun.yaml in the current folder, else the recipe of the newest pair."""
    from detrun.errors import RecordError
    from detrun.records.jobs import ExperimentFile

    if DEFAULT_RECIPE.is_file():
        return DEFAULT_RECIPE
    for folder in reversed(open_archive(archive).list()):
        try:
            experiment = ExperimentFile.read(folder.experiment_file)
        except RecordError:
            continue
        if experiment.experiment == "pair" and experiment.recipe_path and Path(experiment.recipe_path).is_file():
            return Path(experiment.recipe_path)
    raise UsageError(
        "no recipe was given, there is no detrun.yaml here, and no pair was run yet",
        hint="detrun resume-check RECIPE; detrun init writes a commented recipe",
    )
