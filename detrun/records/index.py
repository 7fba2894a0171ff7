"""What every experiment of an archive came to, from its verdict.json alone, as fast as a morning's look needs it.

verdict.json is the truth. Beside the folders lies a cache of what was read of each, which nobody needs: it may be
removed, torn or written by two commands at once, and it is rebuilt from the verdicts. An entry of it holds for one
state of one file (its time and size), and never for a file that was written so shortly before the cache that a later
writing could carry the same time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from detrun.errors import ArchiveError, RecordError
from detrun.records.archive import Archive
from detrun.records.files import check_version, one_line, parse_object, read_moment, read_plain
from detrun.records.index_cache import IndexCache, Source
from detrun.records.index_entry import Entry, State
from detrun.records.jobs import SCHEMA_VERSION
from detrun.records.layout import MARKER, ExperimentFolder
from detrun.records.verdict import Word

__all__ = ["Entry", "read_index"]

KINDS = ("pair", "resume-check", "localize", "diagnose", "trace", "against", "tax", "replay", "ab", "sweep")
"""Those whose name may stand in an id; the longest that fits is meant."""

MAX_WHAT = 300

_ID = re.compile(r"(?P<stem>.+)-(?P<time>[0-9]{8}T[0-9]{6})-[0-9a-f]{4}")
_NAME = re.compile(r"[A-Za-z0-9._+-]+")


def read_index(archive: Archive) -> list[Entry]:
    """What every experiment of an archive came to, oldest first; none where the archive does not exist.

    Raises ArchiveError where its folder cannot be read. An archive that cannot be written is read all the same.
    """
    kept = IndexCache.read(archive.root)
    found: list[tuple[str, int, str, Entry]] = []
    for name in _names(archive):
        known = kept.rows.get(name)
        source = _state_of(archive.root, name)
        if known is not None and known.source == source and source is not None and kept.holds(source):
            found.append((*known.age, name, known.entry))
            continue
        age = _age(archive.root, name)
        if age is None:
            continue
        entry = _read(archive.root, name, age)
        kept.put(name, None if entry.state == "unreadable" else source, age, entry)
        found.append((*age, name, entry))
    kept.write(archive.root, {name for *_, name, _ in found})
    found.sort(key=lambda each: each[:3])
    return [entry for *_, entry in found]


def _names(archive: Archive) -> list[str]:
    try:
        with os.scandir(archive.root) as entries:
            return [each.name for each in entries if _NAME.fullmatch(each.name) and each.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ArchiveError(f"cannot be read: {error.strerror}", where=str(archive.root)) from None


def _state_of(root: Path, name: str) -> Source | None:
    for file in ("verdict.json", "experiment.json"):
        try:
            found = os.lstat(f"{root}/{name}/{file}")
        except OSError:
            continue
        return file, found.st_mtime_ns, found.st_size
    return None


def _age(root: Path, name: str) -> tuple[str, int] | None:
    """What experiments sort by before their name, as in `Archive.list`; None for a folder that is none."""
    try:
        marked = os.lstat(f"{root}/{name}/{MARKER}").st_mtime_ns
    except OSError:
        return None
    match = _ID.fullmatch(name)
    return (match["time"] if match else "", marked)


class _Lenient(BaseModel):
    model_config = ConfigDict(extra="ignore")


class _First(_Lenient):
    step: int
    boundary: str = "end"


class _Culprit(_Lenient):
    kind: str | None = None
    name: str | None = None


class _Finding(_Lenient):
    severity: str
    what: str


class _Figure(_Lenient):
    value: float


class _Short(_Lenient):
    """As much of a verdict as an entry needs."""

    schema_version: int
    experiment: str
    recipe: str
    verdict: Word
    exit_code: int
    first_divergence: _First | None = None
    culprit: _Culprit | None = None
    findings: list[_Finding] = Field(default_factory=list)
    not_verified: list[str] = Field(default_factory=list)
    figures: dict[str, _Figure] = Field(default_factory=dict)
    created: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    environment: dict[str, Any] | None = None
    reference: Any = None
    candidate: Any = None


def _read(root: Path, name: str, age: tuple[str, int]) -> Entry:
    folder = ExperimentFolder(root / name)
    try:
        short = _parsed(folder.verdict_file)
    except RecordError as error:
        if error.what == "is missing":
            return _without_verdict(folder, age, "unfinished", "no verdict yet")
        return _without_verdict(folder, age, "unreadable", one_line(f"verdict.json {error.what}", MAX_WHAT))
    created = read_moment(short.created) or _moment_of(age)
    culprit = short.culprit
    pairs, diverged = short.figures.get("pairs"), short.figures.get("pairs_diverged")
    return Entry(
        id=name,
        experiment=one_line(short.experiment, 60),
        recipe=one_line(short.recipe, 200),
        verdict=short.verdict,
        exit_code=short.exit_code,
        created=created,
        night=_night(short.labels, created),
        step=short.first_divergence.step if short.first_divergence else None,
        culprit={"kind": culprit.kind, "name": culprit.name} if culprit else None,
        what=_what(short),
        environment=short.environment,
        pairs=(_count(pairs), _count(diverged)) if pairs and diverged else None,
        baseline=_named(short.reference),
        candidate=_named(short.candidate),
        boundary=short.first_divergence.boundary if short.first_divergence else None,
        labels=short.labels,
    )


def _parsed(path: Path) -> _Short:
    raw = read_plain(path)
    try:
        short = _Short.model_validate_json(raw)
    except ValidationError:
        # The slow way tells what is wrong, and reads what only the standard library does.
        document = parse_object(raw, str(path))
        check_version(document, SCHEMA_VERSION, str(path))
        try:
            short = _Short.model_validate(document)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            key = ".".join(str(part) for part in first["loc"])
            what = f"is not a valid verdict: {one_line(key)}: {one_line(first['msg'])}"
            raise RecordError(what, where=str(path)) from None
    check_version({"schema_version": short.schema_version}, SCHEMA_VERSION, str(path))
    return short


def _without_verdict(folder: ExperimentFolder, age: tuple[str, int], state: State, what: str) -> Entry:
    """An entry from experiment.json, or from the id where that cannot be read either."""
    kind, recipe = _told_by(folder.id)
    created, labels = _moment_of(age), {}
    try:
        document = parse_object(read_plain(folder.experiment_file), str(folder.experiment_file))
        kind = one_line(str(document.get("experiment") or kind), 60)
        asked = document.get("recipe")
        if isinstance(asked, dict) and isinstance(asked.get("name"), str) and asked["name"]:
            recipe = one_line(asked["name"], 200)
        created = read_moment(document.get("created")) or created
        if isinstance(document.get("labels"), dict):
            labels = {str(key): str(value) for key, value in document["labels"].items()}
    except RecordError:
        pass
    night = _night(labels, created)
    return Entry(folder.id, kind, recipe, None, None, created, night, what=what, state=state, labels=labels)


def _told_by(id: str) -> tuple[str, str]:
    """Kind and recipe, as far as the id tells them."""
    match = _ID.fullmatch(id)
    if match is None:
        return "unknown", id
    for kind in sorted(KINDS, key=len, reverse=True):
        if match["stem"].endswith(f"-{kind}"):
            return kind, match["stem"].removesuffix(f"-{kind}")
    recipe, _, kind = match["stem"].rpartition("-")
    return kind, recipe or match["stem"]


def _what(short: _Short) -> str:
    """The headline: why nothing is known, or the weightiest finding, which stands first."""
    if short.verdict == "not-verified" and short.not_verified:
        return one_line(short.not_verified[0], MAX_WHAT)
    if short.verdict == "identical":
        return ""
    return next((one_line(each.what, MAX_WHAT) for each in short.findings if each.severity == "divergence"), "")


def _named(arm: Any) -> str | None:
    """The experiment that an arm of it belongs to."""
    name = arm.get("experiment") if isinstance(arm, dict) else None
    return one_line(name, 200) if isinstance(name, str) else None


def _count(figure: _Figure) -> int:
    return int(figure.value) if 0 <= figure.value < 1e9 else 0


def _night(labels: Mapping[str, str], created: datetime) -> str:
    return one_line(labels.get("night") or f"{created:%Y-%m-%d}", 80)


def _moment_of(age: tuple[str, int]) -> datetime:
    try:
        return datetime.strptime(age[0], "%Y%m%dT%H%M%S").replace(tzinfo=timezone.utc)
    except ValueError:
        return datetime.fromtimestamp(age[1] / 1e9, timezone.utc)
