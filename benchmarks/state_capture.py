"""Cost of capturing the state at a boundary against reading the same tensors once as 64-bit integers.

    python -m benchmarks.state_capture [--size GIB] [--threads N] [--rounds N] [--json]

SIZE (default 1) GiB of float32 parameters with Adam's two moments, three times SIZE in all, in tensors of 16 MiB. A
capture is what the recorder does at a save: rows of all components with their digests, written as a file; no bytes are
kept. It alternates with `t.view(torch.int64).sum()` over the same tensors in the same process; the best of each counts.
The target is 1.5 or less.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from detrun.recorder.observer import Observer
from detrun.recorder.session import Session
from detrun.recorder.settings import Settings
from detrun.records.layout import AttemptFolder
from detrun.records.state_reader import boundaries, read_state

ROWS, COLUMNS = 2048, 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=float, default=1.0, metavar="GIB", help="GiB of parameters (default 1)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a line")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    count = max(1, round(args.size * 2**30 / (ROWS * COLUMNS * 4)))
    net, optimizer = trained(count)
    tensors = [*net.parameters(), *(t for state in optimizer.state.values() for t in state.values() if t.numel() > 1)]
    with tempfile.TemporaryDirectory() as folder:
        session = Session(Settings(attempt_dir=folder, state_bytes=0))
        observer = Observer(session)
        observer.constructed(optimizer)
        observer.add_root(net)
        session.write_environment({}, [])  # claims the files of this rank

        def capture() -> None:
            session.closed += 1  # a position is captured once
            observer.capture.save_begins(sys._getframe())

        capture()  # imports what is needed
        read, captured = interleaved(lambda: [t.view(torch.int64).sum() for t in tensors], capture, args.rounds)
        attempt = AttemptFolder(Path(folder), "a", 0)
        rows = read_state(attempt, boundaries(attempt)[-1].name, 0).rows
        session.off = True
    size = sum(t.nbytes for t in tensors)
    assert sum(row.nbytes for row in rows if row.component in ("parameters", "optimizer")) >= size
    figures = {
        "gib": round(size / 2**30, 3),
        "rows": len(rows),
        "read_ms": round(read * 1e3, 1),
        "capture_ms": round(captured * 1e3, 1),
        "ratio": round(captured / read, 3),
        "rounds": args.rounds,
    }
    if args.json:
        print(json.dumps({"benchmark": "state_capture", "threads": args.threads, "figures": figures}))
    else:
        print(f"{args.threads} threads: " + ", ".join(f"{key} {value}" for key, value in figures.items()))


def trained(count: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A module of `count` square matrices and its Adam with both moments, neither of them zero."""
    net = nn.ParameterList(nn.Parameter(torch.empty(ROWS, COLUMNS)) for _ in range(count))
    optimizer = torch.optim.Adam(net.parameters())
    generator = torch.Generator().manual_seed(0)
    for parameter in net:
        with torch.no_grad():
            parameter.normal_(generator=generator)
        moments = {key: torch.randn(ROWS, COLUMNS, generator=generator) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    return net, optimizer


def interleaved(first: Callable[[], object], second: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Best wall time of each, taken in turns so that a busy machine disturbs both."""
    best = [float("inf"), float("inf")]
    for _ in range(rounds):
        for index, call in enumerate((first, second)):
            started = time.perf_counter()
            call()
            best[index] = min(best[index], time.perf_counter() - started)
    return best[0], best[1]


if __name__ == "__main__":
    main()
