"""Faults of a process, not of its numbers: it stalls, dies, crashes, leaves early or is slow."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time

from detrun.workloads.hybrid.fault import Fault


class Stall(Fault):
    def begin_step(self) -> None:
        while self.is_first_step:
            time.sleep(3600)


class Die(Fault):
    def begin_step(self) -> None:
        if self.is_first_step:
            os.kill(os.getpid(), signal.SIGKILL)


class Crash(Fault):
    def begin_step(self) -> None:
        if self.is_first_step:
            raise RuntimeError(f"planted crash in step {self.first_step}")


class EarlyExit(Fault):
    def end_step(self) -> None:
        if self.is_first_step:
            sys.exit(0)


class DieAtExit(Fault):
    def at_exit(self) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would only fill the disk
        os.abort()


class Slow(Fault):
    def begin_step(self) -> None:
        if self.has_begun:
            time.sleep(float(self.options["seconds"]))
