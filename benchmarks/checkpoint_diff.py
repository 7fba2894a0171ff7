"""What `detrun checkpoint diff` costs: memory against the largest tensor, time against reading the same bytes.

    python -m benchmarks.checkpoint_diff                  # a pair of 1 GiB in each format
    python -m benchmarks.checkpoint_diff --mib 256        # smaller

Each pair is compared in a process of its own. Memory is that process's peak beyond what it had after its imports. The
files are read once before, so that both times are those of files in the page cache. Prints a JSON result and writes it
below benchmarks/results, or to --out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
MIB = 1 << 20
LARGEST = 128

COMPARE = """
import json, resource, sys, time
from pathlib import Path
import numpy
from detrun.checkpoints.diff import Comparison
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before, begin = peak(), time.perf_counter()
with Comparison(Path(sys.argv[1]), Path(sys.argv[2])) as comparison:
    found = sum(1 for _ in comparison.differences())
print(json.dumps({"seconds": time.perf_counter() - begin, "peak": peak() - before, "differences": found,
                  "nbytes": comparison.nbytes}))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024, help="size of each checkpoint")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    result: dict[str, Any] = {
        "mib": options.mib,
        "largest_tensor_mib": LARGEST,
        "rounds": options.rounds,
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }
    for form in ("torch.save", "torch.save, strided", "dcp", "safetensors"):
        folder = Path(tempfile.mkdtemp(prefix="checkpoint-diff-", dir=options.folder))
        try:
            # In a process of its own: a child would inherit the peak of a parent that held the tensors.
            code = f"from benchmarks.checkpoint_diff import make; make({form!r}, {options.mib}, {str(folder)!r})"
            subprocess.run([sys.executable, "-c", code], check=True)
            result[form] = measure(folder, options.rounds)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    text = json.dumps(result, indent=1)
    RESULTS.mkdir(exist_ok=True)
    (options.out or RESULTS / "checkpoint_diff.json").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


def make(form: str, mib: int, folder: str) -> None:
    """Two checkpoints of large and many small tensors; one element of the last large one differs."""
    import torch

    torch.manual_seed(0)
    large = max(1, mib // LARGEST - 1)
    state = {f"large.{index}": torch.randn(LARGEST // 4, MIB) for index in range(large)}
    state.update({f"small.{index}": torch.randn(256, 64) for index in range(1024)})
    if form.endswith("strided"):
        state = {name: tensor.t() for name, tensor in state.items()}
    for side in ("a", "b"):
        if side == "b":
            state[f"large.{large - 1}"][1, 1] += 1
        _save(form, state, Path(folder) / side)


def _save(form: str, state: dict[str, Any], path: Path) -> None:
    if form.startswith("torch.save"):
        import torch

        torch.save(state, path)
    elif form == "dcp":
        import torch.distributed.checkpoint as dcp

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, checkpoint_id=path, no_dist=True)
    else:
        from safetensors.torch import save_file

        save_file(state, path)


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Medians of interleaved rounds: reading both checkpoints' bytes, and comparing them."""
    a, b = folder / "a", folder / "b"
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    read(files)
    reading, runs = [], []
    for _ in range(rounds):
        reading.append(read(files))
        done = subprocess.run(
            [sys.executable, "-c", COMPARE, str(a), str(b)], check=True, capture_output=True, text=True
        )
        runs.append(json.loads(done.stdout))
    if any(run["differences"] != 1 for run in runs):
        raise SystemExit(f"one tensor differs, {runs[0]['differences']} were found")
    seconds, read_seconds = statistics.median(run["seconds"] for run in runs), statistics.median(reading)
    peak = max(run["peak"] for run in runs)
    return {
        "gib_compared": round(2 * runs[0]["nbytes"] / 2**30, 2),
        "seconds": round(seconds, 3),
        "read_seconds": round(read_seconds, 3),
        "over_reading": round(seconds / read_seconds, 2),
        "peak_mib": round(peak / MIB, 1),
        "peak_over_largest_tensor": round(peak / (LARGEST * MIB), 3),
    }


def read(files: list[Path]) -> float:
    """Seconds to read files once, through a buffer of 4 MiB."""
    buffer = memoryview(bytearray(4 * MIB))
    begin = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())
