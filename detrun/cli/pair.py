"""`detrun pair`: the same training twice, held against itself bit for bit."""

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
    archive_option,
    choose_cluster,
    follow_to_verdict,
    list_on_page,
    open_archive,
    print_verdict,
    say,
    say_submitted,
)

if TYPE_CHECKING:
    from detrun.records.archive import Archive
    from detrun.records.layout import ExperimentFolder


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
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="last-good|ID",
            help="If the two are identical, hold them against an earlier pair: has anything changed?",
            show_default=False,
        ),
    ] = None,
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
    from detrun.experiments.against import check_baseline
    from detrun.experiments.checks import PairOptions
    from detrun.experiments.pair import start_pair
    from detrun.experiments.resume import ResumeOptions, check_resumable

    options = PairOptions(repeats=repeat, agreed=yes)
    if resume:
        if detach or dry_run:
            raise UsageError("--resume waits for the pair's verdict", hint="leave out --detach and --dry-run")
        check_resumable(loaded)
    if against is not None:
        if detach or dry_run or resume:
            hint = "leave out --detach, --dry-run and --resume; detrun nightly does it all"
            raise UsageError("--against waits for the pair's verdict", hint=hint)
        check_baseline(store, against)
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
    more = resume or against is not None
    code = follow_to_verdict(folder, experiment, cluster, as_json, standalone, more_follows=more)
    if against is not None:
        if code == 0:
            return _hold_against(store, folder, against, as_json, standalone)
        say("it was not held against an earlier pair: it can only be where it is identical itself.")
    if not resume:
        return code
    if code != 0:
        say("resuming was not checked: it can only be where the pair is identical.")
        return code
    return run_resume_check(loaded, store, ResumeOptions(agreed=yes), as_json=as_json, standalone=standalone)


def _hold_against(store: Archive, folder: ExperimentFolder, baseline: str, as_json: bool, standalone: bool) -> int:
    """Prints what came of holding a pair against an earlier one. The exit code."""
    from detrun.experiments.against import hold_against
    from detrun.records.jobs import ExperimentFile
    from detrun.records.layout import ExperimentFolder

    verdict = hold_against(store, folder, baseline, standalone=standalone)
    place = ExperimentFolder(store.root / verdict.id)
    print_verdict(verdict, ExperimentFile.read(place.experiment_file), as_json, archive_option(place))
    list_on_page(place)
    say(f"page: {place.report_file}")
    return int(verdict.exit_code)
