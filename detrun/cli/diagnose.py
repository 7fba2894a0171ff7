"""`detrun diagnose`: which change makes the arms of an experiment that diverged agree, and what that points to."""

from __future__ import annotations

import re
import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from detrun.cli.common import (
    ArchiveOption,
    IdArgument,
    JsonOption,
    StandaloneOption,
    archive_option,
    cluster_of,
    list_on_page,
    open_archive,
    print_verdict,
    say,
    to_find,
)
from detrun.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from detrun.experiments.diagnose import DiagnoseOptions
    from detrun.launch.cluster import Cluster
    from detrun.records.archive import Archive
    from detrun.records.layout import ExperimentFolder
    from detrun.records.verdict import Verdict


def diagnose(
    experiment: IdArgument = "@latest",
    archive: ArchiveOption = None,
    repeat: Annotated[
        int, typer.Option("--repeat", min=1, max=700, metavar="N", help="Arms held against the first, a change.")
    ] = 3,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            min=1,
            metavar="N",
            help="Steps of an arm; without it twice as many as it took to diverge, 10 at least.",
            show_default=False,
        ),
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--change",
            metavar="NAME",
            help="Try this change, whatever fits: one-thread, hash-seed, … May be given again.",
        ),
    ] = None,
    toggle: Annotated[
        list[str] | None,
        typer.Option(
            "--toggle",
            metavar="NAME=ARGS",
            help="Try further arguments in every arm, such as fusion='--no-fuse-aux-loss'. May be given again.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Submit even above limits.node_hours.")] = False,
    standalone: StandaloneOption = False,
    as_json: JsonOption = False,
) -> int:
    """Runs the arms of a pair or a localization that diverged again, each time with one thing changed for all of them:
    deterministic algorithms, one thread, a pinned hash seed, filled memory … Reports what makes them agree.

    Exit code 0: done, whatever it showed. 2: the command line is wrong, or there is nothing to diagnose. 4: a job could
    not be submitted, failed, stalled or was lost. 70: a bug of detrun. 130: interrupted, the jobs go on.
    """
    from detrun.experiments.diagnose import DiagnoseOptions
    from detrun.records.jobs import ExperimentFile

    store = open_archive(archive)
    target = store.resolve(experiment)
    cluster = cluster_of(ExperimentFile.read(target.experiment_file))
    options = DiagnoseOptions(repeat, steps, tuple(change or ()), parse_toggles(toggle or []), yes)
    return follow_diagnose(target, store, cluster, options, as_json=as_json, standalone=standalone)


def follow_diagnose(
    target: ExperimentFolder,
    store: Archive,
    cluster: Cluster,
    options: DiagnoseOptions,
    *,
    as_json: bool = False,
    standalone: bool = False,
) -> int:
    """Diagnoses, or takes up a diagnosis that was interrupted, and says the last word. The exit code."""
    from detrun.experiments.diagnose import run_diagnose

    before = {folder.id for folder in store.list()}
    try:
        folder, verdict = run_diagnose(target, store, cluster, options, ["detrun", *sys.argv[1:]], say)
    except KeyboardInterrupt:
        begun = [folder for folder in store.list() if folder.id not in before] or [target]
        say(f"Jobs go on. detrun diagnose {to_find(begun[0])} takes up here.")
        return ExitCode.INTERRUPTED
    return show_diagnosis(folder, verdict, as_json, standalone)


def show_diagnosis(folder: ExperimentFolder, verdict: Verdict, as_json: bool, standalone: bool) -> int:
    """Prints the verdict and makes its page anew. The exit code. A page that cannot be written costs no verdict."""
    from detrun.errors import ArchiveError
    from detrun.experiments.write_verdict import write_page
    from detrun.records.jobs import ExperimentFile

    experiment = ExperimentFile.read(folder.experiment_file)
    page = f"page: {folder.report_file}"
    try:
        write_page(folder, experiment, verdict, standalone=standalone)
    except ArchiveError as error:
        page = f"warning: {error}"
    print_verdict(verdict, experiment, as_json, archive_option(folder))
    list_on_page(folder)
    say(page)
    return int(verdict.exit_code)


def parse_toggles(texts: list[str]) -> dict[str, tuple[str, ...]]:
    """`NAME=ARGS` by name, the arguments split as a shell would. Raises UsageError."""
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, joint, args = text.partition("=")
        if not joint or not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,40}", name):
            raise UsageError(
                f"--toggle {text}: wants a name in lower case, an equals sign and arguments",
                hint="for example --toggle fusion='--no-fuse-aux-loss'",
            )
        if name in found:
            raise UsageError(f"--toggle {name} is given twice", hint="each wants a name of its own")
        try:
            found[name] = tuple(shlex.split(args))
        except ValueError as error:
            raise UsageError(f"--toggle {name}: its arguments cannot be split: {str(error).lower()}") from None
        if not found[name]:
            raise UsageError(f"--toggle {name} has no arguments", hint="for example --toggle fusion='--no-fusion'")
    return found
