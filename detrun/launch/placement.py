"""Where the second job runs, settled once the first one has its nodes.

Both jobs are submitted together, so that both age in the queue and nothing has to stay alive in between:
`pinned` makes the second depend on the first's end (`afterany`; `afterok` would pend for ever behind a
failure) and names its nodes from inside the first job; `disjoint` holds it, excludes the first job's
nodes, and then releases it.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from detrun.launch.spec import JobSpec
from detrun.launch.submitted import read_submitted

WAIT_FOR_SUBMISSION = 20.0
PATIENCE = 20.0


def settle_follower(spec: JobSpec, nodes: Sequence[str]) -> bool:
    """Gives the following job its nodes; True once the scheduler has taken it."""
    if spec.follower is None:
        return True
    deadline = time.monotonic() + WAIT_FOR_SUBMISSION
    folder = Path(spec.experiment) / "jobs" / spec.follower
    while (job := read_submitted(folder)) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return place(job.id, spec.placement, nodes)


def place(job_id: str, placement: str, nodes: Sequence[str]) -> bool:
    """`pinned`: the same nodes; `disjoint`: none of them, and the hold is lifted."""
    names = ",".join(nodes)
    if placement == "pinned" and names:
        return _scontrol("update", f"JobId={job_id}", f"ReqNodeList={names}")
    if placement == "disjoint":
        placed = not names or _scontrol("update", f"JobId={job_id}", f"ExcNodeList={names}")
        return placed and _scontrol("release", job_id)
    return True


def _scontrol(*arguments: str) -> bool:
    # Over in a moment, and a busy controller may refuse once: the follower of the experiment tries again.
    for _ in range(3):
        if run_quietly(["scontrol", *arguments]):
            return True
        time.sleep(1)
    return False


def start_now(job_id: str) -> None:
    """A requeued job waits about two minutes before Slurm considers it again; a courtesy, and nothing depends on it."""
    run_quietly(["scontrol", "update", f"JobId={job_id}", "StartTime=now"])


def ask(argv: Sequence[str]) -> str | None:
    """What a Slurm command printed; None if it did not answer."""
    try:
        done = subprocess.run(argv, check=False, capture_output=True, text=True, errors="replace", timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def run_quietly(argv: Sequence[str]) -> bool:
    """Whether a Slurm command did what it was told; one that is missing or does not answer did not."""
    try:
        done = subprocess.run(argv, check=False, capture_output=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
