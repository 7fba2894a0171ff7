"""What is shown while the arms run: one live block on a terminal, a plain line a change of state elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timezone
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text


class ShownJob(Protocol):
    """The scheduler's id of a job."""

    @property
    def id(self) -> str: ...


class ShownStatus(Protocol):
    """How the scheduler says a job stands."""

    @property
    def word(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def start(self) -> str: ...


class ShownArm(Protocol):
    """What the display needs to know of an arm."""

    @property
    def arm(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def steps(self) -> int: ...
    @property
    def job(self) -> ShownJob | None: ...
    @property
    def status(self) -> ShownStatus: ...
    @property
    def started(self) -> str | None: ...
    @property
    def ended(self) -> str | None: ...
    @property
    def reason(self) -> str | None: ...
    @property
    def nodes(self) -> list[str]: ...


class LiveDisplay:
    """Shows arms as they go. Everything goes to the console it is given, which writes to stderr."""

    def __init__(self, console: Console, title: str, steps: int, slurm: bool) -> None:
        self.console = console
        self.title = title
        self.steps = steps
        self.slurm = slurm
        self.note = ""
        self._said: dict[str, str] = {}
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

    def show(self, arms: Sequence[ShownArm]) -> None:
        """Takes the arms as they stand now."""
        if self._live is not None:
            self._live.update(self._block(arms))
            return
        for arm in arms:
            # Without a terminal only a change of state is worth a line, not every step.
            words = f"{arm.arm}  {self._state(arm)}"
            if self._said.get(arm.arm) != words:
                self._said[arm.arm] = words
                done = f" at step {arm.steps}/{self.steps}" if arm.ended else ""
                self._plain(f"{words}{done}")

    def _plain(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _block(self, arms: Sequence[ShownArm]) -> Group:
        table = Table.grid(padding=(0, 1))
        table.add_column()
        table.add_column(width=max(10, min(30, self.console.width - 50)))
        table.add_column(justify="right")
        table.add_column(overflow="fold")
        for arm in arms:
            table.add_row(
                f"  {arm.arm}",
                ProgressBar(total=self.steps, completed=min(arm.steps, self.steps), width=None),
                f"{arm.steps}/{self.steps}",
                Text(f"{self._state(arm)}{self._pace(arm)}"),
            )
        return Group(Text(self.title, overflow="fold"), table, Text(self.note))

    def _state(self, arm: ShownArm) -> str:
        words = [f"job {arm.job.id}"] if self.slurm and arm.job else []
        if arm.ended or not arm.started:
            state = arm.state if arm.ended else arm.status.word or ("waiting" if arm.state != "running" else arm.state)
            reason = arm.reason if arm.ended else arm.status.reason
            words.append(f"{state} ({reason})" if reason else state)
            if not arm.ended and arm.status.start and arm.status.word == "PENDING":
                words[-1] += f", starts about {arm.status.start}"
        else:
            words.append("running")
        if arm.nodes and self.slurm:
            words.append(",".join(arm.nodes[:4]) + (" …" if len(arm.nodes) > 4 else ""))
        return "  ".join(words)

    def _pace(self, arm: ShownArm) -> str:
        if not arm.started:
            return ""
        seconds = _seconds(arm.started, arm.ended)
        pace = f"   {seconds / arm.steps:.2f} s a step" if arm.steps and not arm.ended else ""
        return f"   {seconds:.0f} s{pace}"


def _seconds(started: str, ended: str | None) -> float:
    try:
        begin = datetime.fromisoformat(started)
        end = datetime.fromisoformat(ended) if ended else datetime.fromtimestamp(time.time(), timezone.utc)
    except ValueError:
        return 0.0
    return max(0.0, (end - begin).total_seconds())
