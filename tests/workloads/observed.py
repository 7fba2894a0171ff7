"""Runs the hybrid program and takes down, step by step, the bits of everything that a later step can depend on.

In the tests' own process (`observe`), or as a program a launcher starts once a rank:
`python observed.py TRACE_DIR <arguments of detrun.workloads.hybrid>` writes TRACE_DIR/rank<k>.jsonl.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import detrun
from detrun.workloads.hybrid import __main__ as program
from detrun.workloads.hybrid import train

Trace = dict[int, dict[str, str]]
"""step -> {what: bits or digest}."""


def digest(tensors: dict[str, torch.Tensor]) -> str:
    sums = hashlib.blake2b(digest_size=12)
    for name, tensor in sorted(parts(tensors).items()):
        sums.update(name.encode())
        sums.update(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes())
    return sums.hexdigest()


def parts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Packed tensors taken apart into values and scales."""
    flat: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        inner = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else None
        flat.update({name: tensor} if inner is None else {f"{name}.{part}": getattr(tensor, part) for part in inner})
    return flat


def snapshot(trainer: train.Trainer, metrics: dict[str, torch.Tensor], batch: torch.Tensor) -> dict[str, str]:
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    moments = {
        f"{names[parameter]}.{key}": value
        for parameter, state in trainer.optimizer.state.items()
        for key, value in state.items()
    }
    saved = trainer.model.state_dict().keys()
    buffers = dict(trainer.model.named_buffers())
    return {
        **{f"metric:{name}": value.numpy().tobytes().hex() for name, value in metrics.items()},
        "batch": digest({"tokens": batch}),
        "parameters": digest(dict(trainer.model.named_parameters())),
        "gradients": digest({n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}),
        "optimizer": digest(moments),
        "rates": repr([group["lr"] for group in trainer.optimizer.param_groups]),
        "schedule": repr(trainer.scheduler.last_epoch),
        "scaler": repr(trainer.scaler.state_dict()),
        "ema": digest(trainer.ema.weights),
        "buffers": digest({name: value for name, value in buffers.items() if name in saved}),
        "quantized": digest({name: value for name, value in buffers.items() if name not in saved}),
        **{f"rng:{name}": digest({name: value}) for name, value in detrun.rng_state().items()},
        **{f"loader:{name}": digest({name: value}) for name, value in trainer.loader.state_dict().items()},
    }


class Observer:
    """Stands in for `detrun.record` whose values it passes on."""

    def __init__(self, on_step: Callable[[int, dict[str, str]], None]) -> None:
        self.on_step = on_step
        self.trainer: train.Trainer | None = None
        self.batch = torch.empty(0)

    def __enter__(self) -> Observer:
        observer = self

        class ObservedTrainer(train.Trainer):
            def __init__(self, *args: Any) -> None:
                observer.trainer = self
                super().__init__(*args)

        class ObservedModel(train.HybridModel):
            def forward(self, tokens: torch.Tensor) -> Any:
                first = observer.trainer is not None and observer.trainer.micro_batch == 0
                observer.batch = tokens if first else torch.cat([observer.batch, tokens])
                return super().forward(tokens)

        self.saved = (program.Trainer, train.HybridModel, getattr(detrun, "record", None))
        program.Trainer = ObservedTrainer
        train.HybridModel = ObservedModel
        detrun.record = self.record
        return self

    def __exit__(self, *_: object) -> None:
        program.Trainer, train.HybridModel, record = self.saved
        if record is None:
            del detrun.record
        else:
            detrun.record = record

    def record(self, step: int, **metrics: torch.Tensor) -> None:
        assert self.trainer is not None
        self.on_step(step, snapshot(self.trainer, metrics, self.batch))


def observe(arguments: Sequence[str]) -> Trace:
    """Run the program in this process; an exception or exit of it ends the trace where it happened."""
    trace: Trace = {}
    with Observer(trace.__setitem__), suppress(SystemExit, RuntimeError):
        program.main(arguments)
    return trace


def read_trace(path: Path) -> Trace:
    return {line["step"]: line["state"] for line in map(json.loads, path.read_text().splitlines())}


def differing(a: Trace, b: Trace, step: int) -> set[str]:
    """What differs at a step that both have."""
    assert a[step].keys() == b[step].keys()
    return {name for name in a[step] if a[step][name] != b[step][name]}


def first_difference(a: Trace, b: Trace) -> int | None:
    """First step, of those both have, at which anything differs."""
    return next((step for step in sorted(a.keys() & b.keys()) if differing(a, b, step)), None)


def main() -> int:
    folder, arguments = Path(sys.argv[1]), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"rank{os.environ.get('RANK', '0')}.jsonl").open("a") as lines:

        def write(step: int, state: dict[str, str]) -> None:
            print(json.dumps({"step": step, "state": state}), file=lines, flush=True)

        with Observer(write):
            return program.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
