"""How long a comparison of many ranks takes, and how much memory: generates an experiment, judges it, measures.

    python -m benchmarks.compare_scale                                   # 2,432 ranks × 800 steps × 5 metrics, two arms
    python -m benchmarks.compare_scale --ranks 64 --steps 100 --differ   # smaller, and arm b differs from the middle on

Prints a JSON result and writes it below benchmarks/results, or to --out: seconds, peak memory of this process and its
workers, bytes read.
The generated files go into a temporary folder (--folder for another place) and are removed afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil

from detrun.experiments.judge import judge
from detrun.records.metrics_reader import tail_steps
from tests.records_factory import Made, make_experiment, metrics_bytes

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2432)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--metrics", type=int, default=5)
    parser.add_argument("--processes", type=int, default=None)
    parser.add_argument("--differ", action="store_true", help="every metric of arm b differs from the middle on")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()

    folder = Path(tempfile.mkdtemp(prefix="compare-scale-", dir=options.folder))
    try:
        result = measure(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = json.dumps(result, indent=1)
    RESULTS.mkdir(exist_ok=True)
    out = options.out or RESULTS / ("compare_scale_differ.json" if options.differ else "compare_scale.json")
    out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


def measure(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    names = [f"metric_{number}" for number in range(options.metrics)]
    made = Made(ranks=options.ranks, steps=options.steps, metrics=names, required=names, replicas=False)
    started = time.perf_counter()
    # The factory writes every file once with a single step; the metrics files are then written over, faster.
    made.recorded_steps = 1
    experiment = make_experiment(folder, made)
    made.recorded_steps = None
    for rank in range(options.ranks):
        reference = metrics_file(made, rank)
        experiment.metrics_path("a", rank).write_bytes(reference)
        if options.differ:
            half = made.steps // 2
            lines = reference.splitlines(keepends=True)
            lines[half:] = [line.replace(b'":{"bits":"0x4', b'":{"bits":"0x3') for line in lines[half:]]
            reference = b"".join(lines)
        experiment.metrics_path("b", rank).write_bytes(reference)
    generated = time.perf_counter() - started
    files = list(experiment.folder.path.rglob("metrics/*.jsonl"))
    size = sum(path.stat().st_size for path in files)
    line = len(tail_steps(files[0]).lines[0].raw)

    peak = Peak()
    started = time.perf_counter()
    with peak:
        verdict = judge(experiment.folder, processes=options.processes)
    seconds = time.perf_counter() - started
    workers = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "ranks": options.ranks,
        "steps": options.steps,
        "metrics": options.metrics,
        "differ": options.differ,
        "verdict": verdict.verdict,
        "bytes": size,
        "bytes_a_line": line,
        "generate_seconds": round(generated, 1),
        "judge_seconds": round(seconds, 2),
        "cpu_seconds_workers": round(workers.ru_utime + workers.ru_stime, 2),
        "peak_bytes_all_processes": peak.bytes,
        "peak_bytes_this_process": own.ru_maxrss * 1024,
        "cpus": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def metrics_file(made: Made, rank: int) -> bytes:
    """A rank's file with random bits and digests, in the recorder's own writing."""
    pattern = metrics_bytes(replace(made, steps=1), rank)
    document = json.loads(pattern)
    for metric in document["metrics"].values():
        metric["bits"], metric["value"] = "0x4BITS", "VALUE"
    document |= {"step": "STEP", "batch": "xxh3:DIGEST", "rng": "xxh3:DIGEST"}
    document["state"] = dict.fromkeys(document["state"], "xxh3:DIGEST")
    text = json.dumps(document, separators=(",", ":")).replace('"STEP"', "%d").replace('"VALUE"', "4.6964006")
    text = text.replace("BITS", "%07x").replace("DIGEST", "%032x") + "\n"
    count = len(document["metrics"])
    lines = []
    for step in range(1, made.steps + 1):
        bits = [random.getrandbits(28) for _ in range(count)]
        digests = [random.getrandbits(128) for _ in range(2 + len(document["state"]))]
        lines.append(text % (step, *bits, *digests))
    return "".join(lines).encode()


class Peak:
    """The largest sum of resident memory of this process and its children, looked at ten times a second."""

    def __init__(self) -> None:
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        me = psutil.Process()
        while not self._stop.wait(0.1):
            total = 0
            for process in [me, *me.children(recursive=True)]:
                try:
                    total += process.memory_info().rss
                except psutil.Error:
                    continue
            self.bytes = max(self.bytes, total)


if __name__ == "__main__":
    sys.exit(main())
