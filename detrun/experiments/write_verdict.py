"""The last thing an experiment does: its page, then its verdict. Every kind of experiment ends here."""

from __future__ import annotations

from detrun.errors import DetrunError
from detrun.experiments.surroundings import stamped
from detrun.records.files import one_line
from detrun.records.jobs import ExperimentFile
from detrun.records.layout import ExperimentFolder
from detrun.records.verdict import Finding, Verdict


def write_verdict(
    place: ExperimentFolder,
    experiment: ExperimentFile,
    verdict: Verdict,
    *,
    report: bool = True,
    standalone: bool = False,
) -> Verdict:
    """Writes report.html and, last and by rename, verdict.json; returns what was written.

    A page that cannot be written is a warning in the verdict. standalone: the page carries its script. Raises
    ArchiveError where the verdict cannot be written.
    """
    verdict = stamped(place, experiment, verdict)
    if report:
        try:
            write_page(place, experiment, verdict, standalone=standalone)
        except Exception as error:  # noqa: BLE001 - a bug in drawing must not cost a verdict
            what = str(error) if isinstance(error, DetrunError) else f"the page: {type(error).__name__}: {error}"
            note = Finding(kind="report", severity="warning", where={"path": "report.html"}, what=one_line(what, 500))
            verdict = verdict.model_copy(update={"findings": [*verdict.findings, note]})
    verdict.write(place.verdict_file)
    return verdict


def write_page(
    place: ExperimentFolder, experiment: ExperimentFile, verdict: Verdict, *, standalone: bool = False
) -> None:
    """Writes report.html alone, with what the records still show. Raises ArchiveError where that fails."""
    from detrun.experiments.page import gather_series
    from detrun.report.html import write_report

    series = gather_series(place, experiment, verdict)
    write_report(place.report_file, verdict, experiment, series, standalone=standalone)
