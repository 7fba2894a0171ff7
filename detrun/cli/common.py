"""What several commands share: options, the archive in force, the cluster in force, the last word."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from detrun.errors import ExitCode

if TYPE_CHECKING:
    from detrun.launch.cluster import Cluster
    from detrun.records.archive import Archive
    from detrun.records.jobs import ArmPlan, ExperimentFile
    from detrun.records.layout import ExperimentFolder
    from detrun.records.verdict import Verdict
    from detrun.report.live import ArmView

ArchiveOption = Annotated[
    Path | None,
    typer.Option("--archive", help="Where experiments are kept.", metavar="DIR", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="The verdict as one JSON document on stdout.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Override a key of the recipe: key.path=value. May be given again.", metavar="KEY=VALUE"
    ),
]
ArmOption = Annotated[
    list[str] | None,
    typer.Option(
        "--arm",
        help="Something one arm has beside the rest: b.env.KEY=VALUE or b.args='…'. May be given again.",
        metavar="ARM",
    ),
]
StandaloneOption = Annotated[bool, typer.Option("--standalone", help="Make a report.html that can be copied alone.")]
IdArgument = Annotated[
    str,
    typer.Argument(
        help="An experiment's id, its beginning or last part, or @latest.", metavar="ID", show_default=False
    ),
]


def progress_console() -> Console:
    """Progress and logs go to stderr, so that stdout holds the result alone."""
    return Console(stderr=True)


def say(text: str) -> None:
    """A line of progress, whole and as it is."""
    progress_console().print(text, markup=False, highlight=False, soft_wrap=True)


def say_submitted(folder: ExperimentFolder) -> None:
    """The last word of a command that does not wait: the experiment's id on stdout, and how to go on."""
    sys.stdout.write(f"{folder.id}\n")
    which = to_find(folder)
    say(f"submitted; detrun attach {which} waits for the verdict, detrun status {which} looks once.")


def open_archive(option: Path | None, of_recipe: Path | None = None) -> Archive:
    """The archive in force: the option, else DETRUN_ARCHIVE, else the recipe's, else `.detrun` here."""
    from detrun.cli.errors import use_crash_folder
    from detrun.records.archive import Archive

    archive = Archive.find(option, of_recipe)
    use_crash_folder(archive.root)
    return archive


def choose_cluster(wanted: str) -> Cluster:
    """`auto` is Slurm where its commands answer, else this machine."""
    from detrun.experiments.clusters import choose_cluster

    return choose_cluster(wanted)


def cluster_of(experiment: ExperimentFile) -> Cluster:
    """The cluster an experiment was started on."""
    from detrun.experiments.clusters import cluster_of

    return cluster_of(experiment)


def follow_to_verdict(
    folder: ExperimentFolder,
    experiment: ExperimentFile,
    cluster: Cluster,
    as_json: bool,
    standalone: bool = False,
    more_follows: bool = False,
) -> int:
    """Waits for the arms with a live display, judges, and says the last word. The exit code.

    more_follows: an `identical` is not the last word, so that it is no document of its own.
    """
    from detrun.experiments.compare_live import LiveComparison
    from detrun.experiments.follow import Follower, Pace
    from detrun.report.live import LiveDisplay

    console = progress_console()
    slurm = experiment.cluster == "slurm"
    follower = Follower(cluster, folder, Pace.of(experiment.cluster))
    live = LiveComparison(folder, [arm.id for arm in experiment.arms], experiment.ranks)
    where = "Slurm" if slurm else "local"
    how = experiment.placement if slurm or experiment.placement == "parallel" else "arms in turn"
    title = f"{folder.id}   {where}, {experiment.ranks} rank{'s' if experiment.ranks > 1 else ''}, {how}"
    display = LiveDisplay(console, title, experiment.steps, slurm, arm_names(experiment))

    def look(arms: Sequence[ArmView]) -> None:
        live.look(ended=all(arm.ended for arm in arms))
        if live.first_difference is not None:
            display.note = f"comparing as steps arrive: step {live.first_difference} differs"
        elif live.agreed:
            display.note = f"comparing as steps arrive: identical up to step {live.agreed}"
        display.show(arms)

    try:
        with display:
            follower.follow(look)
    except KeyboardInterrupt:
        which = to_find(folder)
        console.print(
            f"Jobs go on. detrun attach {which} takes up here; detrun cancel {which} stops them.",
            markup=False,
            highlight=False,
        )
        return ExitCode.INTERRUPTED
    return conclude(folder, experiment, as_json, standalone, more_follows=more_follows)


def conclude(
    folder: ExperimentFolder,
    experiment: ExperimentFile,
    as_json: bool,
    standalone: bool,
    write: bool = True,
    more_follows: bool = False,
) -> int:
    """Judges the records of an experiment, writes verdict and report (with `write`), and prints the verdict.

    A verdict that cannot be written is printed all the same, before the ArchiveError.
    """
    from detrun.errors import ArchiveError
    from detrun.experiments.judge import judge

    unwritten = None
    try:
        verdict = judge(folder, write=write, standalone=standalone)
    except ArchiveError as error:
        unwritten = error
        verdict = judge(folder, write=False)
    if not (as_json and more_follows and verdict.verdict == "identical"):
        print_verdict(verdict, experiment, as_json, archive_option(folder))
    if unwritten:
        raise unwritten
    for note in verdict.of_kind("pruned"):
        say(note.what)
    if write:
        list_on_page(folder)
        say(f"page: {folder.report_file}")
    return int(verdict.exit_code)


def list_on_page(folder: ExperimentFolder) -> None:
    """Brings the archive's index.html up to date, to which an experiment's page leads."""
    from detrun.records.archive import Archive
    from detrun.report.index_page import update_index_page

    update_index_page(Archive(folder.path.parent))


def arm_names(experiment: ExperimentFile) -> dict[str, str]:
    """What the arms of an experiment are there for, where that is not plain."""
    if experiment.experiment != "resume-check":
        return {}
    return {arm.id: _purpose(arm) for arm in experiment.arms}


def _purpose(arm: ArmPlan) -> str:
    if arm.role == "reference":
        return "uninterrupted"
    if arm.purpose == "observer":
        return "never saves"
    kind, joint, what = (arm.purpose or "").partition("self-test:")
    return f"broken: {what}" if joint else kind or arm.role


def to_find(folder: ExperimentFolder) -> str:
    """What a later command has to be given to find an experiment from here: its short id, the archive if need be."""
    return " ".join(part for part in (folder.id.rsplit("-", 1)[-1], archive_option(folder)) if part)


def archive_option(folder: ExperimentFolder) -> str:
    """`--archive DIR` where that is needed to find an experiment from here, else nothing."""
    from detrun.records.archive import Archive

    root = folder.path.parent
    return "" if Archive.find().root.resolve() == root.resolve() else f"--archive {shlex.quote(str(root))}"


def read_verdict(folder: ExperimentFolder) -> Verdict | None:
    """An experiment's verdict, or None while it has none that can be read."""
    from detrun.errors import RecordError
    from detrun.records.verdict import Verdict

    try:
        return Verdict.read(folder.verdict_file)
    except RecordError:
        return None


def print_verdict(verdict: Verdict, experiment: ExperimentFile, as_json: bool, options: str) -> None:
    """The verdict on stdout: one JSON document, or the screen that answers the question in its first line."""
    if as_json:
        sys.stdout.write(verdict.to_json())
        return
    from detrun.report.terminal import render

    render(verdict, experiment, Console(), options=options)
