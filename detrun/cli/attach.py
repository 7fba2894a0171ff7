"""`detrun attach`: takes up an experiment where an earlier command left it."""

from __future__ import annotations

from detrun.cli.common import (
    ArchiveOption,
    IdArgument,
    JsonOption,
    StandaloneOption,
    cluster_of,
    follow_to_verdict,
    open_archive,
)


def attach(
    experiment: IdArgument = "@latest",
    archive: ArchiveOption = None,
    standalone: StandaloneOption = False,
    as_json: JsonOption = False,
) -> int:
    """Waits for an experiment's arms and gives its verdict, as the command that started it would have."""
    from detrun.records.jobs import ExperimentFile

    folder = open_archive(archive).resolve(experiment)
    asked = ExperimentFile.read(folder.experiment_file)
    return follow_to_verdict(folder, asked, cluster_of(asked), as_json, standalone)
