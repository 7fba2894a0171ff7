"""What the index says of one experiment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from detrun.records.verdict import Word

State = Literal["finished", "unfinished", "unreadable"]
STATES = ("finished", "unfinished", "unreadable")


@dataclass(frozen=True, slots=True)
class Entry:
    """One experiment in short.

    id: its folder's name. verdict: None where there is none yet (`state` unfinished) or it cannot be read (unreadable,
    and `what` says why). night: its label, else the UTC date. step, boundary: of the first divergence. culprit: kind
    and name. what: the first reason or finding, in one line. environment: what arm a ran on, as the verdict has it.
    pairs: how many pairs of arms were held against each other, and how many of them diverged. baseline, candidate: the
    experiments whose arms an experiment of kind `against` holds against each other.
    """

    id: str
    experiment: str
    recipe: str
    verdict: Word | None
    exit_code: int | None
    created: datetime
    night: str
    step: int | None = None
    culprit: dict[str, str | None] | None = None
    what: str = ""
    environment: dict[str, Any] | None = None
    state: State = "finished"
    pairs: tuple[int, int] | None = None
    baseline: str | None = None
    candidate: str | None = None
    boundary: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
