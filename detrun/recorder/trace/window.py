"""What the launcher asks of the tracer: how deep, which steps, ranks and scopes, how many bytes. Standard library
only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

VARIABLE = "DETRUN_TRACE"

DEFAULT_BUDGET = 1 << 30


@dataclass(frozen=True)
class KeepSettings:
    """Events whose tensors are to be kept: keys as in `EventKey`, and the most bytes."""

    events: tuple[tuple[int, int, str, str, str, int], ...] = ()
    bytes: int = 256 << 20


@dataclass(frozen=True)
class TraceSettings:
    """The window of a trace.

    level: 2 collectives, recomputation and optimizer; 3 also modules; 4 operators instead of modules. steps: first and
    last. ranks, scopes: None for all; a scope is a pattern of `fnmatch`. byte_budget: most bytes of this rank's files.
    against: folder of an attempt of the other arm whose trace is compared with while this one is taken. kernels: also
    the kernels of the kept events.
    """

    level: int
    first: int
    last: int
    ranks: frozenset[int] | None = None
    scopes: tuple[str, ...] | None = None
    byte_budget: int = DEFAULT_BUDGET
    call_sites: bool = False
    rows: bool = False
    keep: KeepSettings | None = None
    against: str | None = None
    kernels: bool = False

    @staticmethod
    def from_environment(env: Mapping[str, str]) -> TraceSettings | None:
        """None where no trace is asked for. Raises ValueError for a text that is not what the launcher writes."""
        text = env.get(VARIABLE)
        if not text:
            return None
        given = json.loads(text)
        if not isinstance(given, dict):
            raise ValueError(f"{VARIABLE} is not a JSON object: {text[:200]}")
        try:
            return _settings(given)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{VARIABLE} cannot be understood ({error}): {text[:200]}") from error

    def wants_rank(self, rank: int) -> bool:
        return self.ranks is None or rank in self.ranks

    def wants_step(self, step: int) -> bool:
        return self.first <= step <= self.last

    def wants_scope(self, scope: str) -> bool:
        return self.scopes is None or any(fnmatchcase(scope, pattern) for pattern in self.scopes)


def _settings(given: dict[str, Any]) -> TraceSettings:
    level = int(given["level"])
    if level not in (2, 3, 4):
        raise ValueError(f"level {level} is none of 2, 3 and 4")
    first, last = (int(step) for step in given["steps"])
    if first > last:
        raise ValueError(f"the window ends at step {last}, before it begins at {first}")
    ranks, scopes, keep = given.get("ranks"), given.get("scopes"), given.get("keep")
    return TraceSettings(
        level=level,
        first=first,
        last=last,
        ranks=None if ranks is None else frozenset(int(rank) for rank in ranks),
        scopes=None if scopes is None else tuple(str(scope) for scope in scopes),
        byte_budget=int(given.get("byte_budget") or DEFAULT_BUDGET),
        call_sites=bool(given.get("call_sites")),
        rows=bool(given.get("rows")),
        keep=None if keep is None else _keep(keep),
        against=given.get("against") or None,
        kernels=bool(given.get("kernels")),
    )


def _keep(given: dict[str, Any]) -> KeepSettings:
    events = tuple(
        (int(step), int(microbatch), str(phase), str(scope), str(op), int(occurrence))
        for step, microbatch, phase, scope, op, occurrence in given.get("events") or ()
    )
    return KeepSettings(events, int(given.get("bytes") or 256 << 20))
