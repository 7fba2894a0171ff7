"""What is known of operations by name (operations.yaml): what they are prone to, and which may not repeat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from typing import Any

import yaml

_TORCHS_OWN = ("aten", "prims", "prim", "c10d", "_c10d_functional", "c10d_functional", "fsdp", "quantized", "inductor")


@dataclass(frozen=True)
class Nondeterministic:
    """Operations that may give another result on equal inputs unless torch's switch is on.

    devices: where. with_switch: `switches` (another algorithm is taken) or `raises`. threads, elements: on a CPU, from
    how many threads and elements on; 0 where nothing is known of that.
    """

    ops: tuple[str, ...]
    devices: tuple[str, ...]
    with_switch: str
    about: str
    threads: int = 0
    elements: int = 0


def base_name(op: str) -> str:
    """An operation's name without its overload: `aten.index_put_.default` is `aten.index_put_`."""
    parts = op.replace("::", ".").split(".")
    return ".".join(parts[:2]) if len(parts) > 2 else ".".join(parts)


def traits_of(op: str) -> frozenset[str]:
    """What an operation is prone to, by its name: `accumulates`, `reduces`, `orders` …"""
    name = base_name(op)
    return frozenset(trait for trait, patterns in _data()[0].items() if _fits(name, patterns))


def is_custom(op: str) -> bool:
    """Whether an operation is none of torch's own."""
    name = base_name(op)
    return "." in name and name.partition(".")[0] not in _TORCHS_OWN


def known_nondeterministic(op: str, device: str = "") -> Nondeterministic | None:
    """The rule that lists an operation on a device (`cpu`, `cuda`; anything else: on any), None where none does."""
    name = base_name(op)
    for rule in _data()[1]:
        if _fits(name, rule.ops) and (device not in ("cpu", "cuda") or device in rule.devices):
            return rule
    return None


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@cache
def _data() -> tuple[Mapping[str, tuple[str, ...]], tuple[Nondeterministic, ...]]:
    document: dict[str, Any] = yaml.safe_load(
        resources.files("detrun.diagnose").joinpath("operations.yaml").read_text(encoding="utf-8")
    )
    traits = {name: tuple(trait["ops"]) for name, trait in document["traits"].items()}
    rules = tuple(
        Nondeterministic(**{**rule, "ops": tuple(rule["ops"]), "devices": tuple(rule["devices"])})
        for rule in document["nondeterministic"]
    )
    return traits, rules
