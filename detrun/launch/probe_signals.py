"""Who gets which signal: the starred facts of Slurm's behaviour, tried on doctor's own job.

detrun's interruptions rest on them, and sites differ (cgroups, plugins, settings).
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from detrun.launch.placement import ask, run_quietly, start_now
from detrun.launch.probe_job import ProbeJob

SETTLE = 1.0
STEP_STARTS = 60.0


@dataclass(frozen=True)
class Fact:
    """Signals that the batch shell and the step's processes got after a command; None where `why` says why not.

    seconds: a duration the command is known by; extra: what else was seen. refused: Slurm would not do it.
    """

    command: str
    batch: tuple[str, ...] | None = None
    step: tuple[str, ...] | None = None
    seconds: float | None = None
    extra: str = ""
    why: str = ""
    refused: bool = False


class Trial:
    """One listening job, to which signals are sent in turn."""

    def __init__(self, job: ProbeJob) -> None:
        self.job = job
        self.place = job.folder / "signals"
        self.start = 0
        self.step = 1

    def run(self) -> list[Fact]:
        """All trials in the order in which the job survives them."""
        if not self._listening():
            why = "the step that was to listen did not start"
            return [Fact(command, why=why) for command in COMMANDS]
        facts = [
            self._send("scancel -s USR1 JOB", ["--signal=USR1", self.job.id]),
            self._send("scancel -b -s USR2 JOB", ["--batch", "--signal=USR2", self.job.id]),
            self._send("scancel -s TERM JOB.STEP", ["--signal=TERM", f"{self.job.id}.{self.step}"]),
            self._kill_step(),
        ]
        facts += self._requeue()
        facts.append(self._cancel())
        return facts

    def _listening(self) -> bool:
        nodes = max(1, self.job.probe.nodes)
        found = f"ready-{self.start}-{self.step}-*"
        return self.job.wait_until(lambda: len(list(self.place.glob(found))) >= nodes, STEP_STARTS)

    def _heard(self) -> tuple[list[str], list[list[str]]]:
        """Signals so far: of the batch process, and of each process of the step."""
        batch = _signals(self.place / f"batch-{self.start}.log")
        steps = [_signals(path) for path in sorted(self.place.glob(f"step-{self.start}-{self.step}-*.log"))]
        return batch, steps

    def _send(self, command: str, arguments: list[str]) -> Fact:
        before = self._heard()
        if not run_quietly(["scancel", *arguments]):
            return Fact(command, why="scancel refused it", refused=True)
        self._settle(before)
        return self._news(command, before)

    def _settle(self, before: tuple[list[str], list[list[str]]]) -> None:
        """Until something has been heard, and a moment more for what comes after it."""
        self.job.wait_until(lambda: self._heard() != before, 8.0, watch=False)
        time.sleep(SETTLE)

    def _news(self, command: str, before: tuple[list[str], list[list[str]]], seconds: float | None = None) -> Fact:
        batch, steps = self._heard()
        news = [now[len(then) :] for now, then in zip(steps, before[1], strict=False)]
        # Nodes are told one after the other and hear the same.
        longest = max(news, key=len, default=[])
        uneven = "" if all(set(each) == set(longest) for each in news) else "not the same on every node"
        return Fact(command, tuple(batch[len(before[0]) :]), tuple(dict.fromkeys(longest)), seconds, uneven)

    def _kill_step(self) -> Fact:
        command = "scancel -s KILL JOB.STEP"
        began = time.time()
        if not run_quietly(["scancel", "--signal=KILL", f"{self.job.id}.{self.step}"]):
            return Fact(command, why="scancel refused it", refused=True)
        step = self.step

        def over() -> list[int]:
            return [int(e["code"]) for e in self.job.events() if e["event"] == "step" and e["number"] == step]

        if not self.job.wait_until(over, 20.0):
            return Fact(command, why="the batch process did not see the step end within 20 s")
        code = over()[0]
        self.step += 1
        if not self._listening():
            return Fact(command, (), ("KILL",), extra=f"batch saw {code}, but the next step did not start")
        started = min(path.stat().st_mtime for path in self.place.glob(f"ready-{self.start}-{self.step}-*"))
        return Fact(command, (), ("KILL",), max(0.0, started - began), f"batch lives and saw {code}")

    def _requeue(self) -> list[Fact]:
        command, delay = "scontrol requeue JOB", "requeue delay"
        before, here = self._heard(), (self.start, self.step)
        if not run_quietly(["scontrol", "requeue", self.job.id]):
            why = "scontrol refused it"
            return [Fact(command, why=why, refused=True), Fact(delay, why=why, refused=True)]
        self.job.wait_until(lambda: self.job.status().state == "pending", 120.0, watch=False)
        first = self._news(command, before, self._lived(here))
        due = _start_time(self.job.id)
        waits = None if due is None else due - time.time()
        asked = time.time()
        start_now(self.job.id)
        self.start, self.step = 1, 0

        def again() -> bool:
            return any(e["event"] == "start" and e["restart"] == 1 for e in self.job.events())

        if not self.job.wait_until(again, 90.0):
            told = self.job.status()
            why = f"it did not start again within 90 s ({told.reason or told.word})"
            return [first, Fact(delay, seconds=waits, why=why)]
        return [first, Fact(delay, (), (), waits, f"StartTime=now started it after {time.time() - asked:.1f} s")]

    def _cancel(self) -> Fact:
        command = "scancel JOB"
        if not self._listening():
            return Fact(command, why="no step was there to be cancelled")
        before, here = self._heard(), (self.start, self.step)
        if not run_quietly(["scancel", self.job.id]):
            return Fact(command, why="scancel refused it", refused=True)
        self.job.wait_until(lambda: not self.job.status().alive, 180.0, watch=False)
        return self._news(command, before, self._lived(here))

    def _lived(self, here: tuple[int, int]) -> float | None:
        """Seconds from TERM to the last sign of life, by the node's own clock."""
        found = []
        for path in self.place.glob(f"step-{here[0]}-{here[1]}-*.log"):
            with suppress(OSError, ValueError, IndexError):
                lines = [line.split() for line in path.read_text(encoding="ascii", errors="replace").splitlines()]
                term = [float(time_) for time_, name in lines if name == "TERM"][-1]
                alive = self.place / path.name.replace("step-", "alive-").removesuffix(".log")
                found.append(max(0.0, float(alive.read_text(encoding="ascii")) - term))
        return max(found, default=None)


COMMANDS = (
    "scancel -s USR1 JOB",
    "scancel -b -s USR2 JOB",
    "scancel -s TERM JOB.STEP",
    "scancel -s KILL JOB.STEP",
    "scontrol requeue JOB",
    "requeue delay",
    "scancel JOB",
)


def _signals(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    return [line.split()[1] for line in text.splitlines() if len(line.split()) == 2]


def _start_time(job: str) -> float | None:
    """When Slurm will consider a pending job again, as unix time."""
    told = ask(["scontrol", "show", "job", "--oneliner", job]) or ""
    for word in told.split():
        name, _, value = word.partition("=")
        if name == "EligibleTime":
            with suppress(ValueError):
                return time.mktime(time.strptime(value, "%Y-%m-%dT%H:%M:%S"))
    return None
