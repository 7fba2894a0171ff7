"""Trains once: `python -m benchmarks.peer_bench.train --out FOLDER [--fault bitflip --armed] [--peer NAME] …`.

Writes FOLDER/steps.json: a row a step, as `workload.Step` names them. One thread.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from benchmarks.peer_bench.faults import FAULTS, Planted
from benchmarks.peer_bench.peers import PEERS
from benchmarks.peer_bench.workload import SIZES, build, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--fault", choices=FAULTS, default=None, help="whose kernel is replaced")
    parser.add_argument("--armed", action="store_true", help="and misbehaves")
    parser.add_argument("--peer", choices=PEERS, default="untraced")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--fp8", action="store_true")
    options = parser.parse_args()

    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    planted = Planted(options.fault, options.armed) if options.fault else None
    size = SIZES[options.size]
    fp8 = options.fp8 or bool(options.fault and FAULTS[options.fault].fp8)
    model, optimizer = build(size, options.dropout, fp8)
    peer = PEERS[options.peer](model, options.out)
    steps = train(model, optimizer, size, options.steps, peer, planted.begin_step if planted else None)
    peer.close()
    (options.out / "steps.json").write_text(json.dumps([step._asdict() for step in steps]), encoding="utf-8")


if __name__ == "__main__":
    main()
