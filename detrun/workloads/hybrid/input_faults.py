"""Faults in what a step consumes: the order of the data, one token, one random number."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from detrun.workloads.hybrid.data import CORRUPTED
from detrun.workloads.hybrid.fault import Fault


class HashOrder(Fault):
    """From its step on, documents come in the order in which a set of their names is iterated."""

    def begin_step(self) -> None:
        if self.is_first_step:
            # The iteration order of a set of str follows PYTHONHASHSEED.
            self.trainer.loader.reorder(list({document.name for document in self.trainer.loader.documents}))


class DirectoryOrder(Fault):
    """From its step on, documents come in the order in which a folder lists them, which nobody chose.

    Real listings depend on the file system: creation order on some, a hash salted when the file system was
    made on others. So that two runs on one machine differ as two machines would, the folder is filled in an
    order from os.urandom, and listed by time of creation.
    """

    def begin_step(self) -> None:
        if not self.is_first_step:
            return
        documents = self.trainer.loader.documents
        created = random.SystemRandom().sample(range(len(documents)), len(documents))
        with tempfile.TemporaryDirectory(prefix="hybrid-") as folder:
            for tick, number in enumerate(created):
                path = Path(folder) / f"{number:05d}"
                path.write_bytes(documents[number].text)
                # Clocks of file systems are coarse; a second apart each, so that the order is the creation's.
                os.utime(path, (tick, tick))
            listed = sorted(Path(folder).iterdir(), key=lambda path: path.stat().st_mtime)
            self.trainer.loader.reorder([documents[int(path.name)].name for path in listed])


class WrongToken(Fault):
    """One token of one batch is another one."""

    def change_batch(self, tokens: Tensor) -> None:
        if self.is_first_step:
            tokens[0, 0] = CORRUPTED if tokens[0, 0] != CORRUPTED else 0


class ExtraDraw(Fault):
    """One number more is drawn from torch's CPU stream, before the step."""

    def begin_step(self) -> None:
        if self.is_first_step:
            torch.rand(1)
