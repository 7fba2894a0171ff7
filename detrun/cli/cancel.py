"""`detrun cancel`: ends an experiment's jobs."""

from __future__ import annotations

from rich.console import Console

from detrun.cli.common import ArchiveOption, IdArgument, cluster_of, open_archive


def cancel(experiment: IdArgument, archive: ArchiveOption = None) -> int:
    """Ends the jobs of an experiment. What was recorded stays."""
    from detrun.experiments.follow import FINAL, Follower, read_jobs
    from detrun.records.jobs import ExperimentFile

    folder = open_archive(archive).resolve(experiment)
    cluster = cluster_of(ExperimentFile.read(folder.experiment_file))
    live = {}
    for place in (folder, *folder.passes().values()):
        follower = Follower(cluster, place)
        follower.poll_once()
        going = {view.job for view in follower.views() if view.state not in FINAL}
        live.update({job.id: job for _, job in read_jobs(place) if job is not None and job.id in going})
    console = Console()
    if not live:
        console.print(f"{folder.id}: every arm has ended already", markup=False, highlight=False)
        return 0
    cluster.cancel(list(live.values()))
    console.print(f"{folder.id}: cancelled {', '.join(f'job {id}' for id in live)}", markup=False, highlight=False)
    return 0
