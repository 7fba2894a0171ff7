"""The argument lists a job is made of: torchrun's, srun's. Pure functions, no shell strings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from detrun.launch.spec import Segment

RANK_SCRIPT = """\
#!/bin/sh
# Started once a rank by the launcher: gives the rank a log of its own, then becomes the program.
exec "$@" >>"$(printf '%s/rank%05d.log' "$DETRUN_LOG_DIR" "${RANK:-0}")" 2>&1
"""


def interpreter_of(argv: Sequence[str]) -> str | None:
    """The Python of the recipe's command, where it begins with one: torchrun is then run by the same."""
    return argv[0] if Path(argv[0]).name.startswith("python") else None


def torchrun_argv(segment: Segment, rank_script: str, node: int, address: str, port: int) -> list[str]:
    """torchrun for one node of a segment.

    On one node the rendezvous picks its own free port (no race); on several every agent is told the
    first node's name and a port found free there. No restarts: a restarted rank would be another run.
    """
    python = interpreter_of(segment.argv)
    start = [python, "-m", "torch.distributed.run"] if python else ["torchrun"]
    rendezvous = (
        ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=localhost"]
        if segment.nodes == 1
        else [f"--node-rank={node}", f"--master-addr={address}", f"--master-port={port}"]
    )
    return [
        *start,
        f"--nnodes={segment.nodes}",
        f"--nproc-per-node={segment.ranks_per_node}",
        *rendezvous,
        "--max-restarts=0",
        "--no-python",
        rank_script,
        *segment.argv,
    ]


def srun_argv(segment: Segment, wrapper: Sequence[str], cpus_per_task: str | None = None) -> list[str]:
    """The step that runs one attempt. One dead task ends the step; stragglers get a minute.

    cpus_per_task: a step does not inherit it, and without it a site with CPU binding gives each task one.
    """
    per_node = segment.ranks_per_node if segment.launcher == "srun" else 1
    cpus = [f"--cpus-per-task={cpus_per_task}"] if cpus_per_task else []
    return [
        "srun",
        f"--nodes={segment.nodes}",
        f"--ntasks={segment.tasks}",
        f"--ntasks-per-node={per_node}",
        "--kill-on-bad-exit=1",
        "--wait=60",
        "--export=ALL",
        *cpus,
        *segment.srun,
        *wrapper,
    ]


def srun_options(options: dict[str, object]) -> list[str]:
    """A mapping of raw srun options as arguments: True is a bare flag; None and False are dropped."""
    arguments = []
    for key, value in options.items():
        if value is None or value is False:
            continue
        flag = "--" + key.replace("_", "-")
        arguments.append(flag if value is True else f"{flag}={value}")
    return arguments
