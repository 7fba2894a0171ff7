"""How fast traces are compared, and in how much memory: generates traces of many ranks, compares them, measures.

    python -m benchmarks.trace_compare                                   # 32 ranks × 10,000 events
    python -m benchmarks.trace_compare --ranks 256 --events 100000       # the whole of it
    python -m benchmarks.trace_compare --clean                           # nothing differs: the digests of the index

Prints a JSON result and writes it below benchmarks/results, or to --out. `events_a_second_a_core`: pairs of events, of
the time that one process takes over one rank with no digest to skip by; `ratio_to_reading`: that time beside reading
both files with pyarrow alone; `clean_share`: comparing a clean pair by its digests, beside comparing all its events.
Generated files go into a temporary folder (--folder for another place) and are removed afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.ipc

from benchmarks.compare_scale import RESULTS, Peak
from detrun.compare.trace_rank import compare_rank
from detrun.experiments.compare_traces import compare_traces, keep_freed_memory
from detrun.records.layout import AttemptFolder
from detrun.records.trace_reader import open_trace
from tests.trace_factory import Arm, Value, attempt_in

LAYERS = 24


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--events", type=int, default=10_000, help="of one rank")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--processes", type=int, default=None)
    parser.add_argument("--clean", action="store_true", help="the arms do not differ")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="trace-compare-", dir=options.folder))
    try:
        result = measure(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = json.dumps(result, indent=1)
    RESULTS.mkdir(exist_ok=True)
    out = options.out or RESULTS / ("trace_compare_clean.json" if options.clean else "trace_compare.json")
    out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


def measure(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    a, b = attempt_in(folder, "a"), attempt_in(folder, "b")
    per_step = max(4, options.events // options.steps)
    generate(a, options.steps, per_step, fault=None)
    generate(b, options.steps, per_step, fault=None if options.clean else 1)
    for rank in range(1, options.ranks):
        for attempt in (a, b):
            copy_rank(attempt, rank)

    keep_freed_memory()
    one = seconds_of(lambda: whole(a, b, skip_equal=False))
    reading = seconds_of(lambda: [read_through(attempt.trace(0)) for attempt in (a, b)])
    clean_full = seconds_of(lambda: whole(a, a, skip_equal=False))
    clean = seconds_of(lambda: whole(a, a, skip_equal=True))
    peak = Peak()
    with peak:
        started = time.perf_counter()
        comparison = compare_traces(a, b, range(options.ranks), options.processes)
        seconds = time.perf_counter() - started
    events = per_step * options.steps
    return {
        "ranks": options.ranks,
        "events_a_rank": events,
        "steps": options.steps,
        "verdict": comparison.verdict,
        "lead": comparison.lead.event.op if comparison.lead else None,
        "seconds": round(seconds, 2),
        "events_a_second_a_core": round(events / one),
        "ratio_to_reading": round(one / reading, 2),
        "clean_events_a_second_a_core": round(events / clean_full),
        "clean_share": round(clean / clean_full, 4),
        "peak_bytes_all_processes": peak.bytes,
        "bytes_a_trace": a.trace(0).stat().st_size,
        "samples": 3,
        "cpus": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def whole(a: AttemptFolder, b: AttemptFolder, *, skip_equal: bool) -> None:
    with open_trace(a, 0) as left, open_trace(b, 0) as right:
        compare_rank(left, right, skip_equal=skip_equal)


def read_through(path: Path) -> int:
    with pyarrow.OSFile(str(path)) as file:
        return sum(batch.num_rows for batch in pyarrow.ipc.open_stream(file))


def seconds_of(work: Callable[[], object]) -> float:
    """CPU seconds of this process, the best of three."""
    times = []
    for _ in range(3):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return min(times)


def generate(attempt: AttemptFolder, steps: int, per_step: int, fault: int | None) -> None:
    """Rank 0's trace: layers of operations of one to three inputs, then a backward pass; each step the same shapes."""
    draw = random.Random(5)
    names = [f"aten.op{number}.default" for number in range(60)]
    arm = Arm(plant=lambda event: "!" if fault == event.step and event.seq == per_step // 3 else "")
    weights = [Value(f"weight {number}") for number in range(LAYERS)]
    for step in range(1, steps + 1):
        arm.step = step
        live = [Value(f"batch {step}")]
        for number in range(per_step):
            layer = number * LAYERS // per_step
            inputs = draw.sample(live[-12:], min(len(live), draw.randint(1, 2)))
            if number % 3 == 0:
                inputs.append(weights[layer])
            phase = "forward" if number < per_step // 2 else "backward"
            scope = f"layers.{layer}.{('attention', 'moe', 'norm')[number % 3]}"
            live += arm.op(draw.choice(names), inputs, draw.choice((1, 1, 1, 2)), scope=scope, phase=phase)
            del live[:-64]
        for layer, weight in enumerate(weights):
            arm.op(
                "aten.add_.Tensor", [weight, live[-layer]], scope=f"layers.{layer}", phase="optimizer", into=[weight]
            )
    arm.write(attempt, batch=8192)


def copy_rank(attempt: AttemptFolder, rank: int) -> None:
    """Rank 0's files under another number, which they name in few places."""
    raw = attempt.trace(0).read_bytes()
    stream = pyarrow.ipc.open_stream(raw)
    metadata = {**stream.schema.metadata, b"detrun.rank": str(rank).encode()}
    schema = stream.schema.with_metadata(metadata)
    head = schema.serialize().to_pybytes()
    old = stream.schema.serialize().to_pybytes()
    attempt.trace(rank).write_bytes(head + raw[len(old) :])
    index = attempt.trace_index(0).read_bytes()
    attempt.trace_index(rank).write_bytes(index.replace(b'"rank":0', f'"rank":{rank}'.encode(), 1))


if __name__ == "__main__":
    sys.exit(main())
