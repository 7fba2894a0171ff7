"""What several commands take on the command line to bound a trace: steps, ranks, bytes."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from detrun.errors import UsageError

MAX_RANKS = 1_000_000
_STEPS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_BYTES = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,6})?)\s*([A-Za-z]*)")
_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
MAX_BYTES = 1 << 60

StepsOption = Annotated[
    str | None,
    typer.Option("--steps", help="Steps to trace: 7 or 7-9.", metavar="A-B", show_default=False),
]
RanksOption = Annotated[
    str | None,
    typer.Option("--ranks", help="Ranks to trace: 0 or 0,2-3; without it every rank.", metavar="R", show_default=False),
]
ScopesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--scope",
        help="Modules to trace, such as layers.1 or layers.1.*; without it all. May be given again.",
        metavar="PATTERN",
    ),
]
BytesOption = Annotated[
    str,
    typer.Option("--bytes", help="What the trace files of one arm may take, such as 512MiB.", metavar="SIZE"),
]


def parse_steps(text: str | None) -> tuple[int, int] | None:
    """`7` or `7-9` as first and last step, counted from 1; UsageError for anything else."""
    if text is None:
        return None
    match = _STEPS.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--steps {text[:60]!r} is no step and no range of steps", hint="--steps 7, or --steps 7-9")
    first = int(match[1])
    last = int(match[2]) if match[2] else first
    if first < 1:
        raise UsageError(f"--steps {text}: steps are counted from 1", hint=f"--steps 1-{max(1, last)}")
    if last < first:
        raise UsageError(f"--steps {text} ends before it begins", hint=f"--steps {last}-{first}")
    return (first, last)


def parse_ranks(text: str | None) -> tuple[int, ...] | None:
    """`0,2-3` as (0, 2, 3), sorted and each once; UsageError for anything else."""
    if text is None:
        return None
    found: set[int] = set()
    for part in text.split(","):
        match = _STEPS.fullmatch(part.strip())
        if match is None:
            raise UsageError(
                f"--ranks {text[:60]!r} is no list of ranks", hint="--ranks 0, --ranks 0,2 or --ranks 0,2-3"
            )
        low = int(match[1])
        high = int(match[2]) if match[2] else low
        if high < low:
            raise UsageError(f"--ranks {text[:60]}: {part.strip()} ends before it begins", hint=f"{high}-{low}")
        if high >= MAX_RANKS:
            raise UsageError(f"--ranks {text[:60]}: there is no rank {high:,}")
        found.update(range(low, high + 1))
    return tuple(sorted(found))


def parse_bytes(text: str, option: str = "--bytes") -> int:
    """`512MiB`, `1.5GB`, `4096` as bytes; UsageError for anything else. kB is 1,000 bytes, KiB 1,024."""
    match = _BYTES.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise UsageError(
            f"{option} {text[:60]!r} is no size", hint=f"{option} 512MiB, {option} 1GB or {option} 1048576"
        )
    number = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if not 1 <= number <= MAX_BYTES:
        raise UsageError(f"{option} {text[:60]} is not between 1 byte and {MAX_BYTES >> 50} PiB")
    return number
