"""Cost of a state digest against reading the same tensors once as 64-bit integers, on one thread.

    python benchmarks/state_digest.py [--json]

Prints the ratio of `digest_tensors` to `t.view(torch.int64).sum()` for many small and for few large tensors, best of
several interleaved rounds of one run. The target is 1.3 or less.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

from detrun.fingerprint.device import multilinear
from detrun.fingerprint.host import digest_tensors

ROUNDS = 9
SETS = {
    "many small (4000 x 256 float32)": (4000, 256, torch.float32),
    "medium (400 x 64 Ki float32)": (400, 65_536, torch.float32),
    "few large (8 x 4 Mi float32)": (8, 4_194_304, torch.float32),
    "few large (8 x 8 Mi bfloat16)": (8, 8_388_608, torch.bfloat16),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of lines")
    as_json = parser.parse_args().json
    torch.set_num_threads(1)
    figures = {}
    for name, (count, size, dtype) in SETS.items():
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(size, generator=generator).to(dtype) for _ in range(count)]
        read, digest = _interleaved(
            lambda tensors=tensors: [tensor.view(torch.int64).sum() for tensor in tensors],
            lambda tensors=tensors: digest_tensors(tensors),
        )
        figures[name] = {
            "read_ms": round(read * 1e3, 3),
            "digest_ms": round(digest * 1e3, 3),
            "gib_per_s": round(sum(t.nbytes for t in tensors) / digest / 2**30, 1),
            "ratio": round(digest / read, 3),
            "rounds": ROUNDS,
        }
    lanes = torch.randint(-(2**31), 2**31 - 1, (1 << 23,), dtype=torch.int32)
    (seconds, _) = _interleaved(lambda: multilinear(lanes), lambda: None)
    figures["device digest on the host"] = {"gib_per_s": round(lanes.nbytes / seconds / 2**30, 2), "rounds": ROUNDS}
    if as_json:
        print(json.dumps({"benchmark": "state_digest", "threads": 1, "figures": figures}))
        return
    for name, figure in figures.items():
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in figure.items()))


def _interleaved(first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float]:
    """Best time of each, taken in turns so that a busy machine disturbs both."""
    best = [float("inf"), float("inf")]
    for _ in range(ROUNDS):
        for index, call in enumerate((first, second)):
            started = time.perf_counter()
            call()
            best[index] = min(best[index], time.perf_counter() - started)
    return best[0], best[1]


if __name__ == "__main__":
    main()
