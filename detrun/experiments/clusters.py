"""The cluster in force: the one a recipe is to run on, and the one an experiment was started on."""

from __future__ import annotations

from detrun.errors import ClusterError, RecipeError
from detrun.launch.cluster import Cluster
from detrun.launch.local import LocalCluster
from detrun.launch.slurm import SlurmCluster, slurm_answers, slurm_installed
from detrun.records.jobs import ExperimentFile


def choose_cluster(wanted: str) -> Cluster:
    """`auto` is Slurm where its commands answer, else this machine. Raises ClusterError and RecipeError."""
    if wanted == "local":
        return LocalCluster()
    if slurm_answers():
        return SlurmCluster()
    if wanted == "slurm" and slurm_installed():
        raise ClusterError("Slurm's controller does not answer", hint="scontrol ping; then give the command again")
    if wanted == "slurm":
        raise RecipeError(
            "cluster: slurm, but Slurm's commands are not here",
            hint="run detrun on a login node, or cluster: local",
        )
    return LocalCluster()


def cluster_of(experiment: ExperimentFile) -> Cluster:
    """The cluster an experiment was started on."""
    return SlurmCluster() if experiment.cluster == "slurm" else LocalCluster()
