"""Every error that detrun raises on purpose, with the exit code it leads to.

    DetrunError                      70   never raised itself; catches all below
    ├── UserError                     2   the caller has to change what was asked
    │   ├── RecipeError                   the recipe: unknown key, wrong type, impossible combination
    │   └── UsageError                    the command line
    │       ├── UnknownExperimentError        an id that names no experiment of this archive
    │       └── AmbiguousExperimentError      an id that names several
    ├── NotVerifiedError              3   evidence is missing or cannot be compared
    │   └── RecordError                   one file of an experiment cannot be read; says which and where in it
    ├── InfrastructureError           4   what runs the training failed, not the training's bits
    │   ├── SubmissionError               a job was not accepted
    │   ├── ClusterError                  the scheduler or a machine cannot be reached or does not answer
    │   ├── JobError                      a job crashed, stalled, was cancelled or lost
    │   └── ArchiveError                  the archive cannot be written or read
    ├── SkippedError                  5   nothing was done: locked, or already running
    └── InternalError                70   a bug of detrun

A leaf says what failed, its parent how a caller would react. An error carries `what` happened, `where`, and
a `hint` of what to do next; `render` puts them as a person reads them. Standard library only: any room may
import this module, the recorder included.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    """What a command's exit status says; the same for every command."""

    OK = 0
    DIVERGED = 1
    USER = 2
    NOT_VERIFIED = 3
    INFRASTRUCTURE = 4
    SKIPPED = 5
    BUG = 70
    INTERRUPTED = 130


_WORST_FIRST = (1, 70, 4, 3, 2, 5, 0)


def worst_of(codes: Iterable[int]) -> int:
    """The one exit code of many: a divergence before anything else, then what kept others from being seen."""
    order = {code: position for position, code in enumerate(_WORST_FIRST)}
    return min(codes, key=lambda code: order.get(code, 1), default=int(ExitCode.OK))


class DetrunError(Exception):
    """Something detrun can explain.

    what: one sentence without a final stop. where: a file with its line, an arm and rank, a host.
    hint: what to do next, a command where there is one. excerpt: lines shown between the two as they are,
    such as a recipe's line with a marker below it.
    """

    exit_code: ExitCode = ExitCode.BUG

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        hint: str | None = None,
        excerpt: Sequence[str] = (),
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint
        self.excerpt = tuple(excerpt)

    def render(self) -> str:
        """The error as a person reads it on stderr: `error: where: what`, the excerpt, `hint: ...`."""
        head = f"error: {self.where}: {self.what}" if self.where else f"error: {self.what}"
        lines = [head]
        if self.excerpt:
            lines += ["", *(f"  {line}".rstrip() for line in self.excerpt)]
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" if self.where else self.what


class UserError(DetrunError):
    """What was asked cannot be done as asked; the caller has to change it."""

    exit_code = ExitCode.USER


class RecipeError(UserError):
    """The recipe is wrong; `where` names its file and line."""


class UsageError(UserError):
    """The command line is wrong."""


class UnknownExperimentError(UsageError):
    """No experiment of this archive goes by that id."""


class AmbiguousExperimentError(UsageError):
    """Several experiments of this archive go by that id; `candidates` are their full ids."""

    def __init__(
        self,
        what: str,
        *,
        candidates: Sequence[str],
        where: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(what, where=where, hint=hint, excerpt=candidates)
        self.candidates = tuple(candidates)


class NotVerifiedError(DetrunError):
    """Evidence is missing or cannot be compared, so nothing can be said about identity."""

    exit_code = ExitCode.NOT_VERIFIED


class RecordError(NotVerifiedError):
    """A file of an experiment cannot be read; `where` names it, with its line where there is one."""


class InfrastructureError(DetrunError):
    """What carries the training failed; says nothing about its bits."""

    exit_code = ExitCode.INFRASTRUCTURE


class SubmissionError(InfrastructureError):
    """A job was not accepted."""


class ClusterError(InfrastructureError):
    """The scheduler or a machine cannot be reached, or gives no usable answer."""


class JobError(InfrastructureError):
    """A job crashed, stalled, was cancelled or lost."""


class ArchiveError(InfrastructureError):
    """The archive's folder cannot be created, written or read."""


class SkippedError(DetrunError):
    """Nothing was done because something else is doing it: locked, or already running."""

    exit_code = ExitCode.SKIPPED


class InternalError(DetrunError):
    """A bug of detrun."""

    exit_code = ExitCode.BUG
