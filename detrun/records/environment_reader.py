"""Reads what each rank saw of its surroundings, and what the recorder cost it.

environment/rank00000.json is written once, at the first step, recorder/rank00000.json now and then and at
exit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from detrun.errors import RecordError
from detrun.records.files import check_version, one_line, read_object

SCHEMA_VERSION = 1


@dataclass(slots=True)
class RankEnvironment:
    """One rank's environment file. `document` is the whole of it, the rest what is asked for by name."""

    document: dict[str, Any]
    rank: int
    world_size: int
    host: str | None
    initial: dict[str, str] = field(default_factory=dict)
    """Digests of the state before the first step: `parameters`, `rng.numpy`, `rng.cuda:0` …"""
    replicas: tuple[int, ...] | None = None
    coordinates: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class RecorderCost:
    """CPU seconds spent in the recorder, by part, of those of the whole process; with its own warnings."""

    steps: int
    cpu_seconds: dict[str, float]
    process_cpu_seconds: float
    warnings: list[str]
    adapters: list[AdapterFound] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class AdapterFound:
    """A framework's adapter that was at work. lacks: what it relies on and did not find."""

    name: str
    version: str | None
    tried: tuple[str, ...]
    lacks: tuple[str, ...]


def read_environment(path: Path, rank: int) -> RankEnvironment:
    """A rank's environment; RecordError where missing, unreadable, of another schema or another rank."""
    document = read_object(path)
    check_version(document, SCHEMA_VERSION, str(path))
    if document.get("rank") != rank:
        raise RecordError(f"speaks of rank {one_line(str(document.get('rank')), 20)}", where=str(path))
    world_size = document.get("world_size")
    if type(world_size) is not int:
        raise RecordError("has no world_size", where=str(path))
    host = document.get("host")
    replicas = document.get("replicas")
    if replicas is not None:
        whole = isinstance(replicas, list) and all(type(item) is int for item in replicas)
        if not whole:
            raise RecordError("has replicas that are no list of ranks", where=str(path))
        replicas = tuple(sorted(set(replicas)))
    coordinates = document.get("coordinates")
    return RankEnvironment(
        document,
        rank,
        world_size,
        host if isinstance(host, str) else None,
        _initial(document.get("initial"), path),
        replicas,
        coordinates if isinstance(coordinates, dict) else {},
    )


def read_recorder_cost(path: Path) -> RecorderCost:
    """A rank's recorder/rank.json; RecordError where it is missing or unreadable."""
    document = read_object(path)
    check_version(document, SCHEMA_VERSION, str(path))
    spent = document.get("cpu_seconds")
    steps = document.get("steps")
    warnings = document.get("warnings")
    return RecorderCost(
        steps if type(steps) is int else 0,
        {key: _seconds(value) for key, value in spent.items()} if isinstance(spent, dict) else {},
        _seconds(document.get("process_cpu_seconds")),
        [one_line(str(text), 300) for text in warnings[:50]] if isinstance(warnings, list) else [],
        _adapters(document.get("adapters")),
    )


def _adapters(found: Any) -> list[AdapterFound]:
    entries = [entry for entry in found[:50] if isinstance(entry, dict)] if isinstance(found, list) else []
    return [
        AdapterFound(
            one_line(str(entry.get("name")), 60),
            None if entry.get("version") is None else one_line(str(entry["version"]), 60),
            _texts(entry.get("tried")),
            _texts(entry.get("lacks")),
        )
        for entry in entries
    ]


def _texts(found: Any) -> tuple[str, ...]:
    return tuple(one_line(str(text), 300) for text in found[:50]) if isinstance(found, list) else ()


def _initial(initial: Any, path: Path) -> dict[str, str]:
    if initial is None:
        return {}
    if not isinstance(initial, dict):
        raise RecordError("has an initial state that is no object", where=str(path))
    found: dict[str, str] = {}
    for name, value in initial.items():
        if isinstance(value, str):
            found[name] = value
        elif isinstance(value, dict):
            found.update((f"{name}.{key}", item) for key, item in value.items() if isinstance(item, str))
    return found


def _seconds(value: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return 0.0
