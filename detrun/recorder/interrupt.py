"""Interrupts this process at the exact step, where the launcher asks for it. Does not import torch by itself.

The only part of the recorder that changes what the program does, and that is what it is there for: it kills the
process, sends it a signal, makes it leave, or keeps it at a boundary until the scheduler ends it. Right before it does,
it writes `interrupt/rank<r>.json`: by that file the driver knows that the attempt ended by plan.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from detrun.recorder import environment
from detrun.recorder.progress import write_atomically
from detrun.recorder.save_watch import SaveWatch

if TYPE_CHECKING:
    from detrun.recorder.session import Session

PATIENCE = 5.0
"""Seconds for which a rank that is to be killed waits for the others: one that dies first could take a peer along in
the middle of the step's last collective."""

HOLD = 600.0
"""Seconds for which a rank stays at the boundary at most, unless the launcher says otherwise."""

_HELD_FOR = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Asked:
    """DETRUN_INTERRUPT. ranks: None for all. at_microbatch: backward passes of this attempt, which then count and not
    at_step. directory: where checkpoints appear. hold: seconds."""

    kind: str
    at_step: int | None
    at_microbatch: int | None
    moment: str
    signal: str
    ranks: frozenset[int] | None
    seed: int
    directory: Path | None
    hold: float

    @staticmethod
    def read(text: str) -> Asked:
        """Raises ValueError, KeyError or TypeError for what the launcher cannot have written."""
        data = json.loads(text)
        ranks, directory = data.get("ranks", "all"), data.get("directory")
        return Asked(
            kind=str(data["kind"]),
            at_step=None if data.get("at_step") is None else int(data["at_step"]),
            at_microbatch=None if data.get("at_microbatch") is None else int(data["at_microbatch"]),
            moment=str(data.get("moment") or "end"),
            signal=str(data.get("signal") or "TERM"),
            ranks=None if ranks == "all" else frozenset(int(rank) for rank in ranks),
            seed=int(data.get("seed") or 0),
            directory=Path(directory) if directory else None,
            hold=float(data.get("hold") or HOLD),
        )


class Interruption:
    """Waits for its moment and interrupts, once.

    The methods are told what happens, in the program's own order, and must be called outside `Session.run`: they raise
    SystemExit, and whatever a signal handler of the program raises, into the program. They raise nothing else.
    """

    def __init__(self, session: Session, asked: Asked) -> None:
        self.session = session
        self.asked = asked
        self.fired = False
        self._due = False
        self._position = (0, 0)  # steps done, micro-batches done of the next one
        self._total = 0
        self._leaves = False
        self._watching_epochs = False
        self._saves: SaveWatch | None = None
        if asked.kind == "stop":
            atexit.register(self.process_ends)

    @staticmethod
    def from_environment(env: Mapping[str, str], session: Session) -> Interruption | None:
        """None where this attempt is not to be interrupted."""
        text = env.get("DETRUN_INTERRUPT")
        if not text:
            return None
        try:
            return Interruption(session, Asked.read(text))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            session.warn(f"DETRUN_INTERRUPT cannot be read: {error}")
            return None

    # What the program does

    def step_closed(self, step: int) -> None:
        """Step `step` is complete: the optimizer has stepped, nothing of it is saved yet."""
        self._position = (step, 0)
        asked = self.asked
        if asked.kind == "kill-during-save" and self._saves is None and self._is_asked():
            self._saves = self._new_watch()
        if self.fired or not self._reached():
            return
        self._due = True
        if asked.moment == "epoch":
            self._watch_epochs()
        if asked.kind == "kill-during-save":
            self._watch_saves()
        elif asked.moment == "end":
            if asked.kind == "stop":
                self._leaves = True
            else:
                self._fire()

    def forward_begins(self, step: int, microbatch: int) -> None:
        """A micro-batch begins at the position (step, microbatch): all of what came before is done and saved."""
        self._position = (step, microbatch)
        if self._saves is not None:
            self._saves.idle()
        if self.fired:
            return
        late = self._due and (self.asked.moment == "after-save" or self._leaves)
        # Counted in micro-batches, the moment is the end of one: nothing else told of it.
        counted = self.asked.at_microbatch is not None and self.asked.moment == "end" and self._reached()
        if (late and microbatch == 0) or (counted and self.asked.kind != "kill-during-save"):
            self._fire()

    def backward_ends(self, total_microbatches: int) -> None:
        """An outermost backward pass ended, the `total_microbatches`th of this process."""
        self._total = total_microbatches
        step, microbatch = self._position
        self._position = (step, microbatch + 1)
        if self.fired:
            return
        if self.asked.moment == "accumulation" and (self._due or self._counted()):
            self._fire()
        elif self.asked.kind == "kill-during-save" and self._counted():
            self._watch_saves()

    def save_begins(self, path: str | None) -> None:
        """An outermost save begins."""
        if self._saves is not None:
            self._saves.begins(path)
        if self.fired or self.asked.kind == "kill-during-save" or not (self._due or self._counted()):
            return
        counted = self.asked.at_microbatch is not None and self.asked.moment == "end"
        if self.asked.moment == "before-save" or (counted and self.asked.kind != "stop"):
            self._fire()

    def save_ends(self, path: str | None) -> None:
        """The save that began last ended."""
        if self._saves is not None:
            self._saves.ends(path)

    def epoch_ends(self) -> None:
        """A data loader's iterator is exhausted."""
        if not self.fired and self._due:
            self._fire()

    def process_ends(self) -> None:
        """The process ends by itself. A program with a stop of its own, gone at the step asked for, was stopped."""
        if self.fired or not self._due or hasattr(sys, "last_value") or not self._is_asked():
            return
        self.fired = True
        self._write_down({"left_by_itself": True})

    # When

    def _counted(self) -> bool:
        return self.asked.at_microbatch is not None and self._total >= self.asked.at_microbatch

    def _reached(self) -> bool:
        if self.asked.at_microbatch is not None:
            return self._counted()
        return self.asked.at_step is not None and self._position[0] >= self.asked.at_step

    def _is_asked(self) -> bool:
        """Whether this process is a rank, and one that is to be interrupted."""
        if not self.session.is_rank():
            return False
        return self.asked.ranks is None or environment.current_rank() in self.asked.ranks

    def _watch_epochs(self) -> None:
        if self._watching_epochs:
            return
        self._watching_epochs = True
        from torch.utils.data import dataloader

        iterators: Any = dataloader._BaseDataLoaderIter
        original = iterators.__next__

        def following(iterator: Any) -> Any:
            try:
                return original(iterator)
            except StopIteration:
                self.epoch_ends()
                raise

        iterators.__next__ = following

    def _watch_saves(self) -> None:
        """From now on a save may be hit."""
        if self._saves is None and self._is_asked():
            self._saves = self._new_watch()
        if self._saves is not None:
            self._saves.arm()

    def _new_watch(self) -> SaveWatch:
        ranks = self._peers()
        return SaveWatch(
            directory=self.asked.directory,
            interrupted=self.session.attempt / "interrupt",
            seed=self.asked.seed,
            leads=environment.current_rank() == min(ranks),
            kill=self._kill_in_save,
            warn=self.session.warn,
        )

    def _peers(self) -> list[int]:
        """The ranks that are to be interrupted together."""
        return sorted(self.asked.ranks) if self.asked.ranks is not None else list(range(environment.world_size()))

    # How

    def _fire(self) -> None:
        if not self._is_asked():
            self.fired = True
            return
        self.fired = True
        kind = self.asked.kind
        if kind == "signal":
            self._write_down({"signal": f"SIG{self.asked.signal}"})
            os.kill(os.getpid(), getattr(signal, f"SIG{self.asked.signal}"))
        elif kind == "stop":
            self._write_down(None)
            raise SystemExit(0)
        elif kind == "hold":
            self._write_down({"held_seconds_at_most": self.asked.hold})
            self._hold()
        else:
            self._write_down(None)
            self._wait_for_peers()
            os.kill(os.getpid(), signal.SIGKILL)

    def _kill_in_save(self, detail: dict[str, Any]) -> None:
        """Called by the watching thread while the save is held up by nobody."""
        self.fired = True
        self._write_down(detail)
        os.kill(os.getpid(), signal.SIGKILL)

    def _write_down(self, detail: dict[str, Any] | None) -> None:
        """All records, then why they end here."""
        self.session.finish()
        step, microbatch = self._position
        document = {
            "schema_version": 1,
            "kind": self.asked.kind,
            "moment": self.asked.moment,
            "step": step,
            "microbatch": microbatch,
            "time": time.time(),
            "detail": detail,
        }
        try:
            write_atomically(
                self.session.attempt / "interrupt" / f"rank{environment.current_rank():05d}.json", document
            )
        except OSError as error:
            self.session.warn(f"the interruption cannot be written down: {error}")

    def _wait_for_peers(self) -> None:
        folder = self.session.attempt / "interrupt"
        missing = [folder / f"rank{rank:05d}.json" for rank in self._peers()]
        deadline = time.monotonic() + PATIENCE
        while missing and time.monotonic() < deadline:
            missing = [path for path in missing if not path.exists()]
            time.sleep(0.01)

    def _hold(self) -> None:
        """Stays here until a signal arrives, which the program's own handler then gets, or until the end."""
        arrived: list[int] = []
        previous: dict[int, Any] = {}

        def pass_on(number: int, frame: FrameType | None) -> None:
            arrived.append(number)
            theirs = previous[number]
            if callable(theirs):
                theirs(number, frame)
            elif theirs == signal.SIG_DFL:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)

        if threading.current_thread() is threading.main_thread():
            for number in _HELD_FOR:
                theirs = signal.getsignal(number)
                if theirs not in (None, signal.SIG_IGN):  # None: not Python's, and could not be put back
                    previous[number] = theirs
                    signal.signal(number, pass_on)
        deadline = time.monotonic() + self.asked.hold
        try:
            while not arrived and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            for taken, theirs in previous.items():
                with suppress(ValueError, OSError):
                    if signal.getsignal(taken) is pass_on:
                        signal.signal(taken, theirs)
