"""How long a person waits: for `detrun --help`, and from the last arm's end to the verdict.

The first is held against the start of a bare Python in the same run, since machines differ.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

from tests.running import DETRUN, detrun, write_recipe

RESULTS = Path(__file__).parent / "results"


def seconds(argv: list[str], runs: int = 7) -> float:
    """Median wall time of a command."""
    taken = []
    for _ in range(runs):
        begin = time.perf_counter()
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def verdict_delay(cluster: str) -> float:
    """Seconds from the end of the last arm, as its driver wrote it down, to the command's own end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = write_recipe(folder, cluster=cluster, placement="allocation")
        ran = detrun("pair", str(path), "--json", cwd=folder)
        end = time.time()
        if ran.code != 0:
            raise SystemExit(f"the pair was not identical: {ran.explain()}")
        job = next((folder / ".detrun").glob("plain-pair-*")) / "arms" / "b" / "attempt-0" / "job.json"
        return end - datetime.fromisoformat(json.loads(job.read_text())["ended"]).timestamp()


def main() -> None:
    python = seconds([sys.executable, "-c", "pass"])
    help_text = seconds([*DETRUN, "--help"])
    result = {"python_start_s": python, "help_s": help_text, "help_over_python": help_text / python}
    result["verdict_after_last_arm_local_s"] = verdict_delay("local")
    if "SLURM_CONF" in os.environ:
        result["verdict_after_last_arm_slurm_s"] = verdict_delay("slurm")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "latency.json").write_text(json.dumps(result, indent=1) + "\n")
    print("  ".join(f"{name} {value:.3f}" for name, value in result.items()))


if __name__ == "__main__":
    main()
