"""The last word of a command that traces: its verdict on the screen, its page, its exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from detrun.cli.common import archive_option, print_verdict, say

if TYPE_CHECKING:
    from detrun.records.layout import ExperimentFolder
    from detrun.records.verdict import Verdict


def conclude_traced(folder: ExperimentFolder, verdict: Verdict, as_json: bool, standalone: bool) -> int:
    """Writes the page, prints the verdict and returns the exit code. A page that cannot be written costs no verdict."""
    from detrun.errors import ArchiveError
    from detrun.records.jobs import ExperimentFile
    from detrun.report.html import write_report

    experiment = ExperimentFile.read(folder.experiment_file)
    page = f"page: {folder.report_file}"
    try:
        write_report(folder.report_file, verdict, experiment, standalone=standalone)
    except ArchiveError as error:
        page = f"warning: {error}"
    print_verdict(verdict, experiment, as_json, archive_option(folder))
    say(page)
    return int(verdict.exit_code)
