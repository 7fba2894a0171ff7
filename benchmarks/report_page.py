"""How large a report is, and how long it takes to be made and opened: generates an experiment, judges it, measures.

    python -m benchmarks.report_page                            # 64 ranks × 2,000 steps × 5 metrics; arm b differs
    python -m benchmarks.report_page --ranks 2432 --steps 800   # of a huge one some ranks are read

Prints a JSON result and writes it below benchmarks/results, or to --out: bytes of the page (plotly's script is not in
it), seconds that reading the records and writing the page took, and seconds until headless Chromium had drawn it, from
a cold start of the page (median of five; without Chromium and Playwright left out).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.compare_scale import RESULTS, Peak, metrics_file
from detrun.experiments.judge import judge
from detrun.experiments.page import gather_series
from detrun.report.html import write_report
from tests.records_factory import Made, MadeExperiment, make_experiment


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--metrics", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="report-page-", dir=options.folder))
    try:
        result = measure(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = json.dumps(result, indent=1)
    RESULTS.mkdir(exist_ok=True)
    out = options.out or RESULTS / "report_page.json"
    out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


def generate(folder: Path, ranks: int, steps: int, metrics: int) -> MadeExperiment:
    """A pair in which every third rank of arm b differs: its gradients from a third on, its metrics from half on."""
    names = ["loss", "grad_norm", *(f"metric_{number}" for number in range(max(0, metrics - 2)))][:metrics]
    made = Made(ranks=ranks, steps=steps, metrics=names, required=names, replicas=False, recorded_steps=1)
    experiment = make_experiment(folder, made)
    made.recorded_steps = None
    random.seed(6)
    for rank in range(ranks):
        reference = metrics_file(made, rank)
        experiment.metrics_path("a", rank).write_bytes(reference)
        if rank % 3 == 1:
            lines = reference.splitlines(keepends=True)
            third, half = made.steps // 3, made.steps // 2
            lines[third:] = [_other_digest(line) for line in lines[third:]]
            lines[half:] = [line.replace(b'":{"bits":"0x4', b'":{"bits":"0x3') for line in lines[half:]]
            reference = b"".join(lines)
        experiment.metrics_path("b", rank).write_bytes(reference)
    return experiment


def _other_digest(line: bytes) -> bytes:
    head, joint, tail = line.partition(b'"gradients":"xxh3:')
    return head + joint + (b"0" if tail[:1] != b"0" else b"1") + tail[1:]


def measure(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    experiment = generate(folder, options.ranks, options.steps, options.metrics)
    verdict = judge(experiment.folder, report=False)
    with Peak() as peak:
        started = time.perf_counter()
        series = gather_series(experiment.folder, experiment.file, verdict)
        read = time.perf_counter() - started
        started = time.perf_counter()
        write_report(experiment.folder.report_file, verdict, experiment.file, series)
        written = time.perf_counter() - started
    opened = opening_seconds(experiment.folder.report_file)
    return {
        "ranks": options.ranks,
        "ranks_drawn": len(series.ranks) if series else 0,
        "steps": options.steps,
        "metrics": options.metrics,
        "page_bytes": experiment.folder.report_file.stat().st_size,
        "read_seconds": round(read, 2),
        "write_seconds": round(written, 2),
        "peak_bytes_all_processes": peak.bytes,
        "open_seconds": [round(each, 2) for each in opened],
        "open_seconds_median": round(statistics.median(opened), 2) if opened else None,
        "n": len(opened),
        "cpus": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def opening_seconds(page: Path) -> list[float]:
    """From asking for the page to its last chart, each time in a browser of its own."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        return []
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return []
    found = []
    with sync_playwright() as playwright:
        for _ in range(5):
            chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
            tab = chromium.new_page(viewport={"width": 1280, "height": 900})
            started = time.perf_counter()
            tab.goto(page.as_uri())
            tab.wait_for_function("document.documentElement.dataset.drawn")
            found.append(time.perf_counter() - started)
            chromium.close()
    return found


if __name__ == "__main__":
    sys.exit(main())
