"""`detrun localize` on a real Slurm cluster: every pass is a job, and the passes go down by themselves."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.conftest import SlurmCluster
from tests.experiments.localizing import localize, program_recipe


def test_a_fault_on_one_of_two_nodes_is_found_at_its_operation(mended_cluster: SlurmCluster, tmp_path: Path) -> None:
    path = program_recipe(
        tmp_path, 2, cluster="slurm", placement="allocation", slurm={"time": "00:05:00", "partition": "debug"}
    )
    nodes = ["--set", "launch.nodes=2", "--set", "launch.ranks_per_node=1"]
    ran = localize(path, *nodes, "--arm", "b.args=--fault nudge@step=2,rank=1")
    assert ran.code == 1, ran.explain()
    culprit = ran.verdict["culprit"]
    assert (culprit["role"], culprit["name"], culprit["scope"]) == (
        "origin",
        "hybrid.gated_norm.default",
        "blocks.2.mixer.norm",
    )
    assert (culprit["rank"], culprit["step"]) == (1, 2)
    (folder,) = (tmp_path / ".detrun").glob("*-localize-*")
    passes = sorted(path.name for path in (folder / "passes").glob("[0-9]*"))
    assert passes == ["1-pair", "2-operators", "3-bytes"]
    jobs = list(folder.glob("passes/*/jobs/*/spec.json"))
    assert len(jobs) == 3, "the arms of a pass share an allocation"
