"""Command line of the training program: `python -m detrun.workloads.hybrid --steps 30 --seed 1 --out DIR`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from detrun.workloads.hybrid import parallel
from detrun.workloads.hybrid.fault_table import describe_faults
from detrun.workloads.hybrid.faults import FaultSet
from detrun.workloads.hybrid.settings import PRECISIONS, ModelSettings, SettingsError, TrainSettings
from detrun.workloads.hybrid.train import Trainer


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, once for all ranks."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") == "0":
            print(f"hybrid: error: {message}", file=sys.stderr)
        sys.exit(2)


class ListFaults(argparse.Action):
    """Like `--version`: answers before required options are asked for."""

    def __call__(self, *_: object, **__: object) -> NoReturn:
        print(describe_faults())
        sys.exit(0)


def build_parser() -> Parser:
    parser = Parser(prog="python -m detrun.workloads.hybrid", description=__doc__, allow_abbrev=False)
    run = parser.add_argument_group("run")
    run.add_argument("--steps", type=int, required=True, help="total number of steps, also of a resumed run")
    run.add_argument("--seed", type=int, required=True)
    run.add_argument("--out", type=Path, required=True, help="checkpoints go to OUT/checkpoints/step-<k>")
    run.add_argument("--save-every", type=int, metavar="K")
    run.add_argument("--resume", type=Path, metavar="CHECKPOINT_DIR")
    run.add_argument("--save-on-signal", action="append", metavar="NAME", help="TERM, USR1, …; repeatable")
    run.add_argument("--exit-at", type=int, metavar="STEP", help="save after this step, whatever is left, and exit")
    run.add_argument("--prefetch", type=int, metavar="BATCHES", help="read so many ahead (default: 0)")
    run.add_argument("--data", type=Path, metavar="FILE", help="any file (default: pydoc_data's topics)")
    run.add_argument("--device", choices=["auto", "cpu", "cuda"])
    run.add_argument("--threads", type=int, help="torch.set_num_threads (default: OMP_NUM_THREADS decides)")
    run.add_argument("--fault", action="append", default=[], metavar="NAME@step=7,rank=1", help="repeatable")
    run.add_argument("--list-faults", action=ListFaults, nargs=0, help="list them and exit")
    size = parser.add_argument_group("size")
    size.add_argument("--pattern", help="M: Mamba-2, *: attention, E: mixture of experts (default: MEM*ME)")
    size.add_argument("--batch-size", type=int, help="sequences a rank and step, over all micro-batches")
    for name in ("micro-batches", "sequence-length", "width", "head-size", "state-size"):
        size.add_argument(f"--{name}", type=int)
    for name in ("experts", "experts-per-token", "warmup-steps"):
        size.add_argument(f"--{name}", type=int)
    for name in ("dropout", "load-balancing-coefficient", "mtp-coefficient", "z-loss-coefficient"):
        size.add_argument(f"--{name}", type=float)
    for name in ("learning-rate", "weight-decay", "clip-norm"):
        size.add_argument(f"--{name}", type=float)
    state = parser.add_argument_group("state beside weights and moments")
    state.add_argument("--low-precision", choices=list(PRECISIONS), help="of some layers' weights (default: none)")
    state.add_argument("--ema", type=float, metavar="DECAY", help="of the weights' moving average (default: 0.99)")
    state.add_argument("--loss-scaling", action="store_true", help="dynamic, reported as loss_scale")
    state.add_argument("--expert-bias", type=float, metavar="RATE", help="balance experts by a bias (default: 0)")
    return parser


def parse_settings(options: argparse.Namespace) -> TrainSettings:
    """Options that were not given keep the defaults of `settings`, where they are explained."""
    given = {name: value for name, value in vars(options).items() if value is not None}
    model = {field.name: given[field.name] for field in fields(ModelSettings) if field.name in given}
    train = {field.name: given[field.name] for field in fields(TrainSettings) if field.name in given}
    train["save_on_signal"] = tuple(given.get("save_on_signal", ()))
    return TrainSettings(**{**train, "model": ModelSettings(**model)})


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; 0 when done, 2 when the command line is wrong."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        settings = parse_settings(options)
        faults = FaultSet.parse(options.fault)
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        ranks = parallel.join(settings.device)
        Trainer(settings, ranks, faults).run()
        # Not after an exception: peers may be waiting in a collective, and the process's end tells them.
        if dist.is_initialized():
            dist.destroy_process_group()
    except SettingsError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
