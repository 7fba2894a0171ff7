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
    if asked.experiment == "localize":
        from detrun.cli.localize import follow_localize
        from detrun.experiments.localize import LocalizeOptions

        cluster, options = cluster_of(asked), LocalizeOptions()
        return follow_localize(folder, open_archive(archive), cluster, options, as_json=as_json, standalone=standalone)
    if asked.experiment == "diagnose":
        from detrun.cli.diagnose import follow_diagnose
        from detrun.experiments.diagnose import DiagnoseOptions

        store, cluster = open_archive(archive), cluster_of(asked)
        return follow_diagnose(folder, store, cluster, DiagnoseOptions(), as_json=as_json, standalone=standalone)
    return follow_to_verdict(folder, asked, cluster_of(asked), as_json, standalone)
