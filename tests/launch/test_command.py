import dataclasses

from detrun.launch.command import interpreter_of, srun_argv, srun_options, torchrun_argv
from detrun.launch.spec import Segment

ONE_NODE = Segment("a", 0, ["python", "train.py"], {}, [], "/w", "torchrun", 1, 2, 30)
TWO_NODES = dataclasses.replace(ONE_NODE, nodes=2, ranks_per_node=4)


def test_torchrun_on_one_node_picks_its_own_port_and_never_restarts() -> None:
    argv = torchrun_argv(ONE_NODE, "/e/rank.sh", 0, "node1", 1234)
    assert argv[:3] == ["python", "-m", "torch.distributed.run"]
    assert "--rdzv-endpoint=localhost:0" in argv
    assert "--max-restarts=0" in argv
    assert argv[-4:] == ["--no-python", "/e/rank.sh", "python", "train.py"]


def test_torchrun_on_several_nodes_is_told_where_the_first_one_is() -> None:
    argv = torchrun_argv(TWO_NODES, "/e/rank.sh", 1, "node1", 1234)
    assert {"--nnodes=2", "--nproc-per-node=4", "--node-rank=1", "--master-addr=node1", "--master-port=1234"} <= set(
        argv
    )


def test_torchrun_is_run_by_the_python_of_the_command() -> None:
    assert interpreter_of(["/opt/conda/bin/python3.11", "t.py"]) == "/opt/conda/bin/python3.11"
    assert interpreter_of(["./train.sh"]) is None
    assert torchrun_argv(dataclasses.replace(ONE_NODE, argv=["./train.sh"]), "r", 0, "n", 1)[0] == "torchrun"


def test_a_step_has_a_task_a_node_unless_slurm_starts_the_ranks() -> None:
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1"} <= set(srun_argv(TWO_NODES, ["w"], "8"))
    ranks = srun_argv(dataclasses.replace(TWO_NODES, launcher="srun"), ["w"])
    assert {"--ntasks=8", "--ntasks-per-node=4", "--kill-on-bad-exit=1"} <= set(ranks)


def test_container_arguments_pass_through() -> None:
    options = {"container-image": "nvcr.io#nvidia/pytorch", "no-container-mount-home": True, "x": None, "y": False}
    assert srun_options(options) == ["--container-image=nvcr.io#nvidia/pytorch", "--no-container-mount-home"]
