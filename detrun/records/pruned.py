"""pruned.json: what `detrun prune` has removed of an experiment, written before it is removed.

An experiment that has one keeps its verdict: what is left of its records would only look like records that went
missing.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from detrun.errors import RecordError
from detrun.records.jobs import Document
from detrun.records.layout import ExperimentFolder

NAME = "pruned.json"


class Removed(BaseModel):
    """One thing that was removed: its path in the experiment, what it was, how much, and when (ISO 8601)."""

    model_config = ConfigDict(extra="allow")

    path: str
    kind: str
    bytes: int = 0
    files: int = 0
    when: str


class Pruned(Document):
    """The whole file."""

    called: ClassVar[str] = "note of what was pruned"

    removed: list[Removed] = Field(default_factory=list)


def read_pruned(folder: ExperimentFolder) -> Pruned | None:
    """What was removed of an experiment; None where nothing was. A note that cannot be read says that something was."""
    path = folder.path / NAME
    try:
        return Pruned.read(path)
    except RecordError as error:
        return None if error.what == "is missing" else Pruned()


def in_words(note: Pruned) -> str:
    """`logs and checkpoints were pruned (2026-11-30)`."""
    kinds = list(dict.fromkeys(each.kind for each in note.removed)) or ["parts of its records"]
    listed = kinds[0] if len(kinds) == 1 else f"{', '.join(kinds[:-1])} and {kinds[-1]}"
    day = f" ({note.removed[-1].when[:10]})" if note.removed else ""
    return f"{listed} were pruned{day}"
