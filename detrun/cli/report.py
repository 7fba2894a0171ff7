"""`detrun report`: renders a verdict again, from the archive alone."""

from __future__ import annotations

from detrun.cli.common import (
    ArchiveOption,
    IdArgument,
    JsonOption,
    StandaloneOption,
    conclude,
    open_archive,
    progress_console,
)


def report(
    experiment: IdArgument = "@latest",
    archive: ArchiveOption = None,
    standalone: StandaloneOption = False,
    as_json: JsonOption = False,
) -> int:
    """Judges an experiment's records again and writes its report. The exit code is the verdict's."""
    from detrun.records.jobs import ExperimentFile

    folder = open_archive(archive).resolve(experiment)
    code = conclude(folder, ExperimentFile.read(folder.experiment_file), as_json, standalone)
    progress_console().print(f"page: {folder.report_file}", markup=False, highlight=False, soft_wrap=True)
    return code
