"""`detrun report`: renders a verdict again, from the archive alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from detrun.cli.common import (
    ArchiveOption,
    IdArgument,
    JsonOption,
    StandaloneOption,
    cluster_of,
    conclude,
    open_archive,
    say,
    to_find,
)

if TYPE_CHECKING:
    from detrun.records.jobs import ExperimentFile
    from detrun.records.layout import ExperimentFolder


OpenOption = Annotated[bool, typer.Option("--open", help="Open the page in a browser.")]


def report(
    experiment: IdArgument = "@latest",
    archive: ArchiveOption = None,
    standalone: StandaloneOption = False,
    as_json: JsonOption = False,
    opened: OpenOption = False,
) -> int:
    """Judges an experiment's records again and writes its report. The exit code is the verdict's."""
    folder = open_archive(archive).resolve(experiment)
    code = _written(folder, standalone, as_json)
    if opened:
        _open(folder)
    return code


def _written(folder: ExperimentFolder, standalone: bool, as_json: bool) -> int:
    from detrun.cli.localize import conclude_localize
    from detrun.records.jobs import ExperimentFile
    from detrun.report.localize_words import LOCALIZE

    asked = ExperimentFile.read(folder.experiment_file)
    if asked.experiment == LOCALIZE:
        return conclude_localize(folder, as_json, standalone)
    if asked.experiment == "diagnose":
        from detrun.cli.diagnose import show_diagnosis
        from detrun.errors import NotVerifiedError
        from detrun.experiments.diagnose_verdict import conclude as conclude_diagnosis

        if not folder.verdict_file.exists():
            what = f"{folder.id} has no verdict yet"
            raise NotVerifiedError(what, hint=f"detrun diagnose {to_find(folder)} takes it up")
        return show_diagnosis(folder, conclude_diagnosis(folder), as_json, standalone)
    going = _is_going(folder, asked)
    code = conclude(folder, asked, as_json, standalone, write=not going)
    if going:
        say(f"it still runs, so nothing was written; detrun attach {to_find(folder)} waits for the verdict")
    return code


def _open(folder: ExperimentFolder) -> None:
    """Opens the page; where no browser is to be had, says where it lies."""
    from detrun.report.browser import open_page

    if not folder.report_file.is_file():
        say(f"there is no page yet: {folder.report_file}")
    elif not open_page(folder.report_file):
        say(f"no browser could be opened here; the page is a file that any browser shows: {folder.report_file}")


def _is_going(folder: ExperimentFolder, asked: ExperimentFile) -> bool:
    """Whether an arm is on its way: a verdict.json says that all have ended, so there must be none yet."""
    from detrun.errors import RecordError
    from detrun.experiments.follow import FINAL, Follower

    if folder.verdict_file.exists():
        return False
    try:
        follower = Follower(cluster_of(asked), folder)
    except RecordError:
        return False
    if all(view.state in FINAL for view in follower.views()):
        return False  # no need to ask the scheduler
    follower.poll_once()
    return any(job.status.state in {"pending", "running", "completing"} for job in follower.jobs)
