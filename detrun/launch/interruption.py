"""An interruption as the driver sees it: which ranks are to be hit, which were, and when the rest of the step is ended.

The recorder fires in the process, at the exact step, and leaves `interrupt/rank00000.json`; an attempt with one of
these ended by plan. A rank that is left behind waits in a collective for a peer that is gone, so the driver ends the
rest. Kinds that the scheduler makes are only held at the boundary in the process; the driver asks for them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any, Literal

from detrun.errors import RecordError
from detrun.launch.spec import HELD_KINDS, Segment
from detrun.records.files import read_object
from detrun.records.jobs import Interruption
from detrun.records.layout import AttemptFolder, rank_files

GRACE = 2.0
"""Seconds from the last rank's kill to the end of what is left of the step."""

STRAGGLERS = 8.0
"""Seconds from the first rank's kill in which the others are waited for; the recorder itself waits less."""

PATIENCE = 60.0


def ranks_of(segment: Segment) -> list[int]:
    """The ranks that this attempt's interruption hits."""
    asked = segment.interrupt or {}
    node, ranks = asked.get("node"), asked.get("ranks", "all")
    if isinstance(node, int) and asked.get("kind") != "node-failure":
        return list(range(node * segment.ranks_per_node, (node + 1) * segment.ranks_per_node))
    if ranks == "all" or asked.get("kind") in HELD_KINDS:
        return list(range(segment.ranks))
    return [ranks] if isinstance(ranks, int) else sorted(set(ranks))


def for_the_recorder(segment: Segment, at_microbatch: int | None) -> dict[str, Any] | None:
    """DETRUN_INTERRUPT, or None where the ranks have no part in it."""
    asked = segment.interrupt
    if asked is None or asked.get("at_step") is None:
        return None
    held = asked["kind"] in HELD_KINDS
    ranks = ranks_of(segment)
    return {
        "kind": "hold" if held else asked["kind"],
        "at_step": asked["at_step"],
        "at_microbatch": at_microbatch,
        "moment": asked.get("moment") or "end",
        "signal": asked.get("signal") or "TERM",
        "ranks": "all" if len(ranks) == segment.ranks else ranks,
        "seed": asked.get("seed") or 0,
        "directory": (segment.checkpoints or {}).get("directory"),
        "hold": 60 * asked["minutes"] + 600 if asked.get("minutes") else None,
    }


def fired(folder: AttemptFolder) -> list[int]:
    """The ranks that wrote down that they are interrupted."""
    return sorted(rank_files(folder.interrupt_dir, "json").ranks)


def interruption_of(folder: AttemptFolder, segment: Segment) -> Interruption | None:
    """What the ranks wrote down, as one; None where none did. Where they differ, the earliest position counts."""
    if segment.interrupt is None:
        return None
    told = []
    for rank in fired(folder):
        try:
            told.append((rank, read_object(folder.interrupt(rank))))
        except RecordError:
            continue
    if not told:
        return None
    steps = [(_count(document, "step"), _count(document, "microbatch")) for _, document in told]
    details = [document["detail"] for _, document in told if isinstance(document.get("detail"), dict)]
    # Of a save that was cut short, the rank that had written most tells how far it had got.
    detail: dict[str, Any] = max(
        details, key=lambda found: (_count(found, "bytes"), "followed" not in found), default={}
    )
    step, microbatch = min(steps)
    return Interruption(
        kind=str(segment.interrupt["kind"]),
        step=step,
        microbatch=microbatch,
        ranks=[rank for rank, _ in told],
        moment=str(told[0][1].get("moment") or "end"),
        detail=detail,
    )


def _count(document: dict[str, Any], key: str) -> int:
    value = document.get(key)
    return value if type(value) is int else 0


@dataclass
class Ending:
    """What is to be done with an attempt whose ranks are interrupted. Pure but for `look`'s listing of a folder."""

    segment: Segment
    folder: AttemptFolder
    _first: float | None = None
    _all: float | None = None
    _asked: bool = False
    expected: int = field(init=False)

    def __post_init__(self) -> None:
        self.expected = len(ranks_of(self.segment))

    @property
    def began(self) -> bool:
        """Whether a rank has been interrupted."""
        return self._first is not None

    def look(self, now: float) -> Literal["end", "ask"] | None:
        """`end`: nothing more will come of the rest of the step. `ask`: the ranks are held, the scheduler's turn."""
        if self.segment.interrupt is None:
            return None
        if self._all is None:
            ranks = len(fired(self.folder))
            if ranks and self._first is None:
                self._first = now
            if ranks >= self.expected or (self._first is not None and now - self._first >= STRAGGLERS):
                self._all = now
        if self._all is None:
            return None
        kind = self.segment.interrupt["kind"]
        if kind in HELD_KINDS:
            if self._asked:
                return None
            self._asked = True
            return "ask"
        return "end" if kind in ("kill", "kill-during-save") and now - self._all >= GRACE else None


def ask_the_scheduler(segment: Segment, job_id: str, nodes: list[str]) -> str | None:
    """Has the scheduler make the interruption for which the ranks are held; why it did not, or None."""
    asked = segment.interrupt or {}
    if asked["kind"] == "timeout":
        return None  # the limit comes by itself
    argv = ["scontrol", "requeue", job_id]
    if asked["kind"] == "node-failure":
        node = nodes[asked["node"] if isinstance(asked.get("node"), int) else -1]
        argv = [text.replace("@NODE@", node).replace("@JOB@", job_id) for text in asked["command"]]
    try:
        done = subprocess.run(
            argv,
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
            stdin=subprocess.DEVNULL,
            env={**os.environ},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{argv[0]}: {error}"
    for text in (done.stdout, done.stderr):
        if text.strip():
            print(text.strip(), file=sys.stderr)
    if done.returncode == 0:
        return None
    last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
    return f"{argv[0]} exited with code {done.returncode}{': ' + last[0] if last else ''}"
