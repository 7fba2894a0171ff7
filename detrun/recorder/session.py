"""The recorder of this process: its settings, its files, its open step. Does not import torch.

Files are opened at the first step, so that a launcher, a data loader's worker or any other child process that
inherits the environment never writes. Nothing in here may break the program: whatever goes wrong is kept as a warning,
and the records that are missing then forbid the verdict "identical".
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import detrun
from detrun.recorder import environment
from detrun.recorder.draft import Digest, Draft
from detrun.recorder.named import Named
from detrun.recorder.pending import Outbox, Waiting
from detrun.recorder.progress import Cost, Progress, write_atomically
from detrun.recorder.rng import RngStreams
from detrun.recorder.settings import Interruption, Sabotage, Settings
from detrun.recorder.steps import Numbering
from detrun.records.metrics_writer import MetricsWriter, RankTaken, encode

if TYPE_CHECKING:
    from torch import nn

_COST_EVERY = 100


class Session:
    """Owns the records of this process.

    `held` is a step that may be complete but may also get another optimizer's call; `draft` is what has happened since.
    `tail` is what may belong to it or to the next step.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.attempt = Path(settings.attempt_dir)
        self.numbering = Numbering(settings.attempt, settings.steps_done)
        self.closed = self.numbering.first() - 1
        self.draft = Draft(first_microbatch=settings.microbatches_done)
        self.backwards = 0
        self.interruption: Interruption | None = None
        self.sabotage: Sabotage | None = None
        self.told = self.closed
        """The last step that the planned interruption was told of."""
        self.before_drain: Callable[[], None] | None = None
        self.before_end: list[Callable[[], None]] = []
        self.muffle: threading.local | None = None
        """Where a tracer is told that the recorder itself works on this thread: `muted` counts how deep."""
        self._when_claimed: list[Callable[[], None]] = []
        self.held: Draft | None = None
        self.tail: Draft | None = None
        self.has_optimizers = False
        self.off = False
        self.cost = Cost()
        self.streams = RngStreams()
        self.coordinates: dict[str, int] = {}
        """Where this rank stands among the others; known once the environment is written."""
        self.told_coordinates: dict[str, int] = {}
        self.told_replicas: list[int] | None = None
        self.told_by_adapter: set[str] = set()
        """Metrics that an adapter gives in every step."""
        self.paced = False
        """Whether an adapter tells where a step ends, and `in_step` whether one is under way."""
        self.in_step = False
        self.named = Named(self)
        self.initial_rng: dict[str, str] | None = None
        self._argv = list(getattr(sys, "argv", []))  # before the program adds to it
        self.lock = threading.RLock()
        self._child_of_recorded = False
        self._forked_without_group = False
        self._forked_to_train = False
        self._steps_written = 0
        self._writer: MetricsWriter | None = None
        self._progress: Progress | None = None
        self._rank = 0
        self._nested = 0.0
        self._outbox = Outbox(self._write)
        self._environment_written = False
        atexit.register(self.finish)
        os.register_at_fork(after_in_child=self._forked)

    # What the hooks call

    def run(self, event: Callable[..., None], *args: object) -> None:
        """Call a part of the recorder from inside the program: nothing it raises gets out, and its time is counted."""
        if self.off:
            return
        started = time.thread_time()
        outer, self._nested = self._nested, 0.0
        muffle = self.muffle
        if muffle is not None:
            muffle.muted = getattr(muffle, "muted", 0) + 1
        try:
            event(*args)
        except Exception as error:  # noqa: BLE001 - the program's run is worth more than its record
            self.warn(f"{event.__name__}: {type(error).__name__}: {error}")
        finally:
            if muffle is not None:
                muffle.muted -= 1
            spent = time.thread_time() - started
            self.cost.cpu_seconds["metrics"] += spent - self._nested
            self._nested = outer + spent  # one event may be told inside another, and counts once

    def interrupt(self, event: str, *args: object) -> None:
        """Tell the planned interruption, if there is one, what just happened. Called by the hooks outside of `run`: it
        may end the process here."""
        if self.interruption is not None and not self.off:
            getattr(self.interruption, event)(*args)

    def interrupt_closed(self) -> None:
        """The same for steps that have closed since it was last told."""
        if self.told < self.closed:
            self.told = self.closed
            self.interrupt("step_closed", self.closed)

    def charge(self, purpose: str, started: float) -> None:
        """Count thread time since `started` for `purpose` instead of for the metrics."""
        spent = time.thread_time() - started
        self.cost.cpu_seconds[purpose] += spent
        self._nested += spent

    def warn(self, text: str) -> None:
        self.cost.warn(text)

    def is_rank(self) -> bool:
        """Whether this process writes the records of a rank, and is no helper of one."""
        return self._open()

    def record(self, step: int, metrics: dict[str, object]) -> None:
        """`detrun.record`."""
        self.run(self.named.record, step, metrics)

    def tell(self, name: str, value: object, source: str) -> None:
        """An adapter's word on a metric of the step that is going on or has just ended."""
        self.run(self.named.tell, name, value, source)

    def next_step(self) -> int:
        """The number of the step that `draft` gathers."""
        return self.closed + (1 if self.held is None or self.paced else 2)

    def position(self) -> tuple[int, int]:
        """(steps that are complete, micro-batches done of the next one). A step that is held counts as complete."""
        return self.next_step() - 1, self.draft.microbatches_done()

    def state_due(self, step: int) -> bool:
        every = self.settings.state_every
        return every > 0 and step % every == 0

    def show(self, phase: str) -> None:
        """Tell where the program is, once this process is known to train. A comfort: it must not cost evidence."""
        try:
            if self._progress is None:
                if not self._may_record():
                    return
                self._progress = Progress(self.attempt, environment.current_rank())
            self._progress.show(self.closed if phase in ("start", "between") else self.next_step(), phase)
        except OSError as error:
            self.warn(f"progress cannot be shown: {error}")

    def show_start(self) -> None:
        """An optimizer was constructed: training is about to start, if it is known already which rank this is."""
        if self._progress is None and (environment.has_process_group() or "RANK" in os.environ):
            self.show("start")

    def close_held(self) -> None:
        """The held step is complete: give it its number and write it when its values are there."""
        held, self.held = self.held, None
        if held is None:
            return
        self.in_step = False
        self.closed += 1
        step = self.closed
        if not self._open():
            return
        with_state = self.state_due(step)
        waits_for = held.waits_for()
        self._outbox.put(step, waits_for, lambda: encode(held.line(step, with_state=with_state)))
        self._steps_written += 1
        if self._steps_written == 1 or self._steps_written % _COST_EVERY == 0:
            started = time.thread_time()
            self.write_cost()
            self.charge("other", started)

    def rank(self) -> int:
        """The global rank."""
        return self._rank if self._writer is not None else environment.current_rank()

    def when_claimed(self, action: Callable[[], None]) -> None:
        """Write something of this rank as soon as this process is known to be the one that trains as it, if it ever
        is. What `action` raises is kept as a warning."""

        def guarded() -> None:
            try:
                action()
            except Exception as error:  # noqa: BLE001 - the program's run is worth more than its record
                self.warn(f"not written: {type(error).__name__}: {error}")

        if self._writer is None:
            self._when_claimed.append(guarded)
        elif not self.off:
            guarded()

    def put(self, step: int, waits_for: Sequence[Waiting], encode: Callable[[], bytes]) -> None:
        """A line behind those that are on their way."""
        self._outbox.put(max(step, self.closed), waits_for, encode)

    def write_later(self, waits_for: Sequence[Waiting], write: Callable[[], None]) -> None:
        """Call `write` once all it waits for is there, in the order of the lines."""

        def encode() -> bytes:
            self.when_claimed(write)
            return b""

        self.when_claimed(lambda: self._outbox.put(self.closed, waits_for, encode))

    def join_tail(self) -> None:
        """The tail belongs to the held step."""
        if self.held is not None and self.tail is not None:
            self.held.absorb(self.tail)
        self.tail = None

    def drain(self) -> None:
        """Write all that is known, waiting for devices if need be: the process is about to end or to be killed."""
        with self.lock:
            if not self.off:
                self._finish_boundaries()
                self.join_tail()
                self.close_held()
                if self._when_claimed and self.draft.backwards:
                    self._open()
                if self.draft.named and self._open():
                    named, self.draft.named = self.draft.named, []
                    self.named.put(self.next_step(), named)
                self._outbox.drain()

    def leave(self) -> None:
        """The process ends by `os._exit`, perhaps because it hangs: write what is there, wait for nothing."""
        if self.off or self._writer is None or not self.lock.acquire(timeout=0.2):
            return
        try:
            self._finish_boundaries()
            self.join_tail()
            self.close_held()
            self._outbox.flush(0)
        except Exception as error:  # noqa: BLE001 - the program is leaving
            self.warn(f"leave: {type(error).__name__}: {error}")
        finally:
            self.lock.release()

    def _finish_boundaries(self) -> None:
        if self.before_drain is not None:
            self.run(self.before_drain)

    def finish(self) -> None:
        """At the end of the process; more than one call does no harm."""
        if self.off or self._writer is None:
            return
        try:
            self.drain()
            for end in self.before_end:
                self.run(end)
            if self._progress is not None:
                self._progress.show(self.closed, "end")
            self.write_cost()
        except Exception as error:  # noqa: BLE001 - the interpreter is shutting down; what is written is written
            self.warn(f"finish: {type(error).__name__}: {error}")

    def write_environment(self, initial: Mapping[str, Digest], roots: list[nn.Module]) -> None:
        """`environment/rank<r>.json`, once, as of before the first step changes anything; written when the digests of
        the initial state are there."""
        if self._environment_written or not self._open():
            return
        self._environment_written = True
        started = time.thread_time()
        copies = self.told_replicas or environment.replicas(roots)
        document = environment.describe_process(self._rank)
        document["python"]["argv"] = self._argv
        if self.streams.torch_is_unseeded():
            document["seeds"]["torch_initial_seed"] = None
        rng = self.initial_rng or self.streams.digests()
        own = {"dp": copies.index(self._rank)} if copies and self._rank in copies else {}
        self.coordinates = {**own, **self.told_coordinates}
        document["coordinates"] = self.coordinates
        document["replicas"] = copies
        document["recorder"] = environment.recorder_settings(
            {"state_every": self.settings.state_every, "determinism": self.settings.determinism}, detrun.__version__
        )

        def write() -> bytes:
            texts = {name: digest.text() for name, digest in initial.items()}
            document["initial"] = {**texts, "rng": rng}
            write_atomically(self.attempt / "environment" / f"rank{self._rank:05d}.json", document)
            return b""

        self._outbox.put(self.closed, list(initial.values()), write)
        self.charge("other", started)

    # Files

    def _open(self) -> bool:
        """Open the metrics file if this process may write; False if it is to stay out."""
        if self._writer is not None:
            return not self.off
        if self.off or not self._may_record():
            return False
        self._rank = environment.current_rank()
        try:
            self._writer = MetricsWriter(self.attempt, self._rank)
        except RankTaken:
            self.off = True
            return False
        except OSError as error:
            self._stop_writing(error)
            return False
        if "multiprocessing" in sys.modules:
            _finish_with_child(self.finish)
        actions, self._when_claimed = self._when_claimed, []
        for action in actions:
            action()
        return True

    def _may_record(self) -> bool:
        if self._child_of_recorded:
            return False
        if self._forked_without_group and not environment.has_process_group() and not self._forked_trainer():
            return False  # a forked helper; a forked rank makes itself a process group
        data = sys.modules.get("torch.utils.data")
        return data is None or data.get_worker_info() is None

    def _forked_trainer(self) -> bool:
        """Is this process, forked by a program that has no optimizer, one that multiprocessing was asked for by itself
        (`Process(target=train)`), and no worker of a pool? If the parent trains as well, it finds its rank taken."""
        module = sys.modules.get("multiprocessing.process")
        parent = module.parent_process() if module is not None else None
        if not self._forked_to_train or module is None or parent is None or parent.pid != os.getppid():
            return False
        return not module.current_process().daemon

    def _write(self, line: bytes) -> None:
        if self._writer is None or self.off or not line:
            return
        try:
            self._writer.write(line)
        except OSError as error:
            self._stop_writing(error)

    def _stop_writing(self, error: OSError) -> None:
        self.off = True
        self.warn(f"records end here: {error}")
        print(
            f"detrun: cannot write the records of this rank to {self.attempt} ({error}); the training goes on, and "
            "will count as not verified",
            file=sys.stderr,
        )

    def write_cost(self) -> None:
        """What recording cost so far, and what adapters did not find. Raises OSError."""
        self.cost.write(self.attempt, self._rank, self._steps_written)

    def _forked(self) -> None:
        self.lock = threading.RLock()  # a thread that held it exists in the parent alone
        self.streams.forked()
        self._when_claimed.clear()
        if self._writer is not None or self._child_of_recorded:
            self._child_of_recorded = True
            self.off = True
        elif not environment.has_process_group():
            self._forked_without_group = True
            self._forked_to_train = not self.has_optimizers
        else:
            self.off = True  # a helper of a rank that has not stepped yet
        self._progress = None


def _finish_with_child(finish: Callable[[], None]) -> None:
    # A child of multiprocessing leaves by os._exit and runs its own finalizers only.
    from multiprocessing import parent_process
    from multiprocessing.util import Finalize

    if parent_process() is not None:
        Finalize(None, finish, exitpriority=-100)
