"""nights/<night>/night.json: what a night of `detrun nightly` has to do, has done, and what came of it.

It is written by rename at every change, so that a night that was stopped anywhere is taken up from it. The verdicts
stay where they are, in their experiments.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from detrun.errors import RecordError, UsageError
from detrun.records.archive import Archive
from detrun.records.files import read_moment
from detrun.records.jobs import Document

LABEL = "night"
"""The label that the experiments of a night carry."""

Kind = Literal["pair", "resume-check", "against", "localize"]
CHECKS: tuple[Kind, ...] = ("pair", "resume-check", "against")
"""What answers a question of its own; a localization only says more about the answer."""

State = Literal["waiting", "running", "done", "error", "left-out"]
OPEN: frozenset[State] = frozenset({"waiting", "running"})

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")


class Item(BaseModel):
    """One question of a night. recipe: its name; path: its file, absolute. of: the experiment that is localized, or
    held against the baseline. what: the answer in one line, or what went wrong, or why it was left out. baseline:
    against what an `against` is held. node_hours: what its arms took."""

    model_config = ConfigDict(extra="allow", validate_assignment=True)

    recipe: str
    path: str
    kind: Kind
    state: State = "waiting"
    experiment: str | None = None
    verdict: str | None = None
    exit_code: int | None = None
    step: int | None = None
    culprit: str | None = None
    what: str | None = None
    of: str | None = None
    baseline: str | None = None
    seconds: float | None = None
    node_hours: float | None = None

    @property
    def answer(self) -> tuple[str | None, int | None]:
        """What has to be the same for a night to hold no news."""
        return self.verdict, self.exit_code


class Night(Document):
    """night.json. created, finished: ISO times, UTC. wanted: the recipes' files that calls for this night named, and
    what was asked of each. told: those whose state was settled with whom it concerns, so that nobody is told twice."""

    called: ClassVar[str] = "night.json"

    night: str
    created: str
    finished: str | None = None
    wanted: dict[str, list[Kind]] = Field(default_factory=dict)
    told: list[str] = Field(default_factory=list)
    items: list[Item] = Field(default_factory=list)

    def of(self, paths: Sequence[str]) -> list[Item]:
        """The items of these recipes, in the recipes' order."""
        return [item for path in paths for item in self.items if item.path == path]

    def item(self, path: str, kind: Kind) -> Item | None:
        return next((item for item in self.items if (item.path, item.kind) == (path, kind)), None)

    def is_done(self, path: str, kinds: Sequence[Kind]) -> bool:
        """Whether all that is asked of a recipe was asked in this night and has been answered, or cannot be."""
        asked = self.wanted.get(path)
        return asked is not None and set(kinds) <= set(asked) and not any(i.state in OPEN for i in self.of([path]))

    @property
    def age(self) -> timedelta:
        """Since it was begun."""
        created = read_moment(self.created)
        return timedelta.max if created is None else datetime.now(timezone.utc) - created


def now() -> str:
    """This moment, as the files have it."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def nights_dir(archive: Archive) -> Path:
    return archive.root / "nights"


def night_dir(archive: Archive, night: str) -> Path:
    return nights_dir(archive) / check_name(night)


def night_file(archive: Archive, night: str) -> Path:
    return night_dir(archive, night) / "night.json"


def junit_file(archive: Archive, night: str) -> Path:
    return night_dir(archive, night) / "junit.xml"


def check_name(night: str) -> str:
    """The name, if it can be one; else UsageError."""
    if not _NAME.fullmatch(night) or night in ("lock", "lock.breaking"):
        raise UsageError(
            f"{night[:100]!r} cannot be a night's name", hint="letters, digits and . _ + -, such as a date"
        )
    return night


def read_night(archive: Archive, night: str) -> Night | None:
    """The night of that name; None where there is none. RecordError where it cannot be read."""
    path = night_file(archive, night)
    return Night.read(path) if os.path.lexists(path) else None


def read_nights(archive: Archive) -> list[Night]:
    """All nights that can be read, the oldest first."""
    found = []
    try:
        names = sorted(os.listdir(nights_dir(archive)))  # noqa: PTH208
    except OSError:
        return []
    for name in names:
        if not _NAME.fullmatch(name) or not (path := nights_dir(archive) / name / "night.json").is_file():
            continue
        try:
            night = Night.read(path)
        except RecordError:
            continue  # what is torn says nothing; the verdicts are where they were
        if night.night == name:
            found.append(night)
    return sorted(found, key=lambda night: (night.created, night.night))
