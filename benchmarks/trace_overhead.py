"""What a trace costs: the small program of benchmarks/peer_bench untraced, under an empty dispatch mode, at each level.

    python -m benchmarks.trace_overhead [--rounds 3] [--steps 10] [--size small] [--only "level 4" ...]

Each round runs every kind once, in a process of its own on one thread. A kind's figure is the smallest of its rounds'
median step times (without the first two steps), as wall and as CPU time of the process, which a busy machine disturbs
less; beside it the ratio to the untraced program, and the bytes of trace a step. The targets: level 2 at most 1.05,
level 3 1.3, level 4 2.0; at most 60 kB a step at level 4. Of level 4 also how long it takes to compare ten steps of two
runs (at most 1 s). Other tools run beside them where they are installed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.peer_bench.peers import PEERS, missing
from benchmarks.peer_bench.running import LEVELS, size_of, traced, trained

RESULTS = Path(__file__).parent / "results"
SKIPPED = 2
"""First steps of a run that are left out: memory and caches are still growing."""

KINDS = [*PEERS, "recorder", *(f"level {level}" for level in LEVELS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--size", default="small")
    parser.add_argument("--only", nargs="*", choices=KINDS, default=None, help="beside the untraced program")
    options = parser.parse_args()
    kinds = _kinds(options.only)
    best: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        for number in range(options.rounds):
            for kind in kinds:
                figures = _run(kind, Path(name) / f"{number}-{kind.replace(' ', '-')}", options)
                known = best.setdefault(kind, figures)
                best[kind] = {key: min(known[key], value) for key, value in figures.items()}
        compared = _compare_seconds(Path(name)) if "level 4" in kinds else None
    for figures in best.values():
        figures["wall_ratio"] = round(figures["wall_ms"] / best["untraced"]["wall_ms"], 3)
        figures["cpu_ratio"] = round(figures["cpu_ms"] / best["untraced"]["cpu_ms"], 3)
    document: dict[str, Any] = {
        "benchmark": "trace_overhead", "size": options.size, "steps": options.steps, "rounds": options.rounds,
        "machine": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0], "kinds": best,
        "compare_seconds_level_4": compared,
    }  # fmt: skip
    for kind, figures in best.items():
        print(f"{kind}: " + ", ".join(f"{key} {value:,}" for key, value in figures.items()))
    print(f"comparing {options.steps} steps at level 4: {compared} s")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "trace_overhead.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _kinds(only: list[str] | None) -> list[str]:
    kinds = [kind for kind in KINDS if only is None or kind in only or kind == "untraced"]
    for kind in [kind for kind in kinds if kind in PEERS and missing(kind)]:
        print(f"{kind}: left out, since {missing(kind)} is not installed", flush=True)
        kinds.remove(kind)
    return kinds


def _run(kind: str, out: Path, options: argparse.Namespace) -> dict[str, float]:
    size = ("--size", options.size)
    if kind in PEERS:
        steps = trained(out, "--steps", str(options.steps), "--peer", kind, *size)
    else:
        level = None if kind == "recorder" else int(kind.removeprefix("level "))
        steps = traced(out, level, options.steps, *size)
    counted = steps[SKIPPED:]
    return {
        "wall_ms": round(1e3 * statistics.median(step["seconds"] for step in counted), 2),
        "cpu_ms": round(1e3 * statistics.median(step["cpu_seconds"] for step in counted), 2),
        "bytes_a_step": size_of(out / "trace") // options.steps,
    }


def _compare_seconds(folder: Path) -> float | None:
    """Seconds to hold the traces of two runs of one round against each other, best of three; nothing may differ."""
    from detrun.compare.trace_rank import compare_rank
    from detrun.records.trace_reader import open_trace

    runs = sorted(folder.glob("*-level-4"))[:2]
    taken = []
    for _ in range(3 if len(runs) == 2 else 0):
        begun = time.perf_counter()
        a, b = (open_trace(run, 0) for run in runs)
        reading = compare_rank(a, b, skip_equal=False)
        taken.append(time.perf_counter() - begun)
        if reading.leads or reading.incomplete:
            raise SystemExit(f"a clean pair differs or is incomplete: {reading.leads[:1]} {reading.incomplete[:1]}")
    return round(min(taken), 4) if taken else None


if __name__ == "__main__":
    main()
