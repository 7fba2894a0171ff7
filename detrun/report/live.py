"""What is shown while the arms run: one live block on a terminal, a plain line a change of state elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from detrun.records.files import printable

LONGEST_STATE = 45
"""Columns kept for how an arm stands: `attempt 1  from step 100  12 s  0.77 s a step`."""


@dataclass(frozen=True)
class ArmView:
    """How an arm stands. steps: the last step that every rank has recorded. word, reason, start: the scheduler's.

    state: a job.json state once the arm has begun, else `pending`, `waiting` or `unknown`. started, ended: ISO times.
    attempt: which start of the arm this is; resumed: the step that it went on from.
    """

    arm: str
    state: str
    steps: int
    job: str | None = None
    word: str = ""
    reason: str = ""
    start: str = ""
    started: str | None = None
    ended: str | None = None
    nodes: tuple[str, ...] = ()
    attempt: int = 0
    resumed: int | None = None


class LiveDisplay:
    """Shows arms as they go. Everything goes to the console it is given, which writes to stderr.

    names: by arm, what it is there for.
    """

    def __init__(
        self, console: Console, title: str, steps: int, slurm: bool, names: Mapping[str, str] | None = None
    ) -> None:
        self.console = console
        self.title = title
        self.steps = steps
        self.slurm = slurm
        self.names = names or {}
        self.note = ""
        self._said: dict[str, str] = {}
        self._first: dict[str, tuple[float, int]] = {}
        self._live: Live | None = None

    def __enter__(self) -> LiveDisplay:
        if self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=8, transient=False)
            self._live.__enter__()
        else:
            self._plain(self.title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)

    def show(self, arms: Sequence[ArmView]) -> None:
        """Takes the arms as they stand now."""
        if self._live is not None:
            self._live.update(self._block(arms))
            return
        for arm in arms:
            # Without a terminal only a change of state is worth a line, not every step.
            words = f"{self._name(arm)}  {self._state(arm)}"
            if self._said.get(arm.arm) != words:
                self._said[arm.arm] = words
                done = f" at step {min(arm.steps, self.steps)}/{self.steps}" if arm.ended else ""
                self._plain(f"{words}{done}")

    def _plain(self, text: str) -> None:
        self.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def _block(self, arms: Sequence[ArmView]) -> Group:
        table = Table.grid(padding=(0, 1))
        name = max((len(self._name(arm)) for arm in arms), default=1)
        counts = 2 * len(str(self.steps)) + 1
        table.add_column(no_wrap=True)
        table.add_column(width=max(6, min(30, self.console.width - name - counts - LONGEST_STATE - 5)))
        table.add_column(justify="right")
        table.add_column(overflow="fold")
        for arm in arms:
            table.add_row(
                f"  {self._name(arm)}",
                ProgressBar(total=self.steps, completed=min(arm.steps, self.steps), width=None),
                f"{min(arm.steps, self.steps)}/{self.steps}",
                Text(printable(f"{self._state(arm, short=True)}{self._pace(arm)}")),
            )
        return Group(Text(printable(self.title), overflow="fold"), table, Text(self.note))

    def _name(self, arm: ArmView) -> str:
        """With what the arm is there for, where that is not plain."""
        return f"{arm.arm} {self.names[arm.arm]}" if arm.arm in self.names else arm.arm

    def _state(self, arm: ArmView, short: bool = False) -> str:
        words = [f"attempt {arm.attempt}"] if arm.attempt else []
        words += [f"job {arm.job}"] if self.slurm and arm.job else []
        if arm.ended or not arm.started:
            # An arm that has not begun in a job that runs already waits for the one before it.
            state = arm.state if arm.ended or arm.state == "waiting" else arm.word or arm.state
            words.append(f"{state} ({arm.reason})" if arm.reason else state)
            if not arm.ended and arm.start and arm.word == "PENDING":
                words[-1] += f", starts about {arm.start}"
        else:
            words.append("running" if arm.resumed is None else f"{'' if short else 'resumed '}from step {arm.resumed}")
        if arm.nodes and self.slurm:
            words.append(",".join(arm.nodes[:4]) + (" …" if len(arm.nodes) > 4 else ""))
        return "  ".join(words)

    def _pace(self, arm: ArmView) -> str:
        if not arm.started:
            return ""
        text = f"  {_seconds(arm.started, arm.ended):.0f} s"
        if arm.steps and not arm.ended:
            # From the first step on: what came before was imports and set-up.
            now = time.monotonic()
            since, first = self._first.setdefault(arm.arm, (now, arm.steps))
            if arm.steps > first:
                text += f"  {(now - since) / (arm.steps - first):.2f} s a step"
        return text


def _seconds(started: str, ended: str | None) -> float:
    try:
        begin = datetime.fromisoformat(started)
        end = datetime.fromisoformat(ended) if ended else datetime.fromtimestamp(time.time(), timezone.utc)
        return max(0.0, (end - begin).total_seconds())
    except (ValueError, TypeError):  # no time, or one without its zone
        return 0.0
