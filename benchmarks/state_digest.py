"""Cost of a state digest against reading the same tensors once as 64-bit integers, on one thread.

    python benchmarks/state_digest.py [--json]

Prints the ratio of `digest_tensors` to `t.view(torch.int64).sum()` for many small and for few large tensors, and that
of `torch.hash_tensor` and of the device digest's plain operations, best of several interleaved rounds of one run. The
target for `digest_tensors` is 1.3 or less. Where a GPU is, the device digest there, too, beside reading.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from detrun.fingerprint.device import segment_sums
from detrun.fingerprint.host import digest_tensors

ROUNDS = 9
RESULTS = Path(__file__).parent / "results"
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
        figures[name] = _figures(tensors)
    if torch.cuda.is_available():
        lanes = [torch.randint(-(2**31), 2**31 - 1, (1 << 28,), dtype=torch.int32, device="cuda")]
        figures["one large, on a GPU (256 Mi int32)"] = _figures(lanes, on_host=False)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "state_digest.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print(json.dumps({"benchmark": "state_digest", "threads": 1, "figures": figures}))
        return
    for name, figure in figures.items():
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in figure.items()))


def _figures(tensors: list[torch.Tensor], on_host: bool = True) -> dict[str, float]:
    """Milliseconds of each way over the same tensors, and how they compare."""
    ways: dict[str, Callable[[], object]] = {
        "read": lambda: [tensor.view(torch.int64).sum() for tensor in tensors],
        "hash_tensor": lambda: [torch.hash_tensor(tensor) for tensor in tensors],
        "device_digest": lambda: segment_sums(tensors),
    }
    if on_host:
        ways["digest"] = lambda: digest_tensors(tensors)
    best = _interleaved(ways)
    size = sum(tensor.nbytes for tensor in tensors) / 2**30
    figures = {f"{name}_ms": round(seconds * 1e3, 3) for name, seconds in best.items()}
    for name in ways:
        if name != "read":
            figures[f"{name}_gib_per_s"] = round(size / best[name], 1)
            figures[f"{name}_ratio"] = round(best[name] / best["read"], 3)
    return {**figures, "rounds": ROUNDS}


def _interleaved(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Best time of each in seconds, taken in turns so that a busy machine disturbs all."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(ROUNDS):
        for name, call in ways.items():
            started = time.perf_counter()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            best[name] = min(best[name], time.perf_counter() - started)
    return best


if __name__ == "__main__":
    main()
