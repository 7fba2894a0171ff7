"""Layouts of checkpoints that are known by their files: `layouts.yaml` says how, nothing here names one of them.

A layout says when a checkpoint of its kind is whole, which step it is of, and whether training can go on from it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from detrun.checkpoints.dcp import METADATA, read_metadata
from detrun.checkpoints.entry import Entry
from detrun.checkpoints.json_file import json_problem
from detrun.checkpoints.pointers import Pointer, read_pointer
from detrun.checkpoints.read import open_checkpoint
from detrun.checkpoints.safetensors_file import read_header
from detrun.checkpoints.sources import Files
from detrun.errors import RecordError, UsageError

RULES = Path(__file__).with_name("layouts.yaml")

Names = tuple[str, ...]
"""Alternatives: any one of them will do."""


@dataclass(frozen=True)
class Counted:
    """Files of which there is one for each number below a value that another file holds.

    files: with "{n}". of: the file that tells. by: the entry with their number. when, value: only if this entry has
    this value.
    """

    files: str
    of: Names
    by: str
    when: str
    value: str


@dataclass(frozen=True)
class Alike:
    """Random streams that ranks have alike by design: those that differ in one coordinate alone.

    entry: their names. along: the place of that coordinate in the rank that such a name tells.
    """

    entry: re.Pattern[str]
    along: int


@dataclass(frozen=True)
class Layout:
    """One rule of `layouts.yaml`, whose head says what each part means."""

    name: str
    path: re.Pattern[str]
    file: bool = False
    any: Names = ()
    none: Names = ()
    only: Names = ()
    keys: Names = ()
    siblings: bool = False
    unfinished: Names = ()
    whole: tuple[Names, ...] = ()
    ranks: str | None = None
    counted: Counted | None = None
    step_file: Names = ()
    step_entry: Names = ()
    step_when_unnamed: bool = False
    newest: Names = ()
    newest_required: bool = False
    resume_files: tuple[Names, ...] = ()
    resume_keys: Names = ()
    resume_lacks: str = ""
    alike: tuple[Alike, ...] = ()


@dataclass(frozen=True)
class Told:
    """What a layout says of one checkpoint. step: None if it tells none. lacks: what a whole one would have, "" if it
    has it all. no_resume: why training cannot go on from it though it is whole, "" if it can."""

    layout: Layout
    step: int | None = None
    lacks: str = ""
    no_resume: str = ""


@functools.cache
def layouts() -> tuple[Layout, ...]:
    """The rules, in their order."""
    return tuple(_rule(each) for each in yaml.safe_load(RULES.read_text(encoding="utf-8")))


def alike_by_design(name: str) -> tuple[Alike, ...]:
    """The random streams that ranks may share in checkpoints of the layout of this name."""
    return next((rule.alike for rule in layouts() if rule.name == name), ())


def recognise(path: Path, listed: Sequence[PurePosixPath]) -> Layout | None:
    """The layout of a checkpoint. listed: its files, relative to it; () for a file."""
    return next((rule for rule in layouts() if _fits(rule, path, listed)), None)


def like_its_siblings(path: Path, listed: Sequence[PurePosixPath], others: Iterable[Layout | None]) -> Layout | None:
    """The layout of a checkpoint that does not show it itself, by those of the others in its directory."""
    for rule in layouts():
        if rule.siblings and rule in others and rule.path.fullmatch(path.name) and path.is_dir() != rule.file:
            return rule if not rule.any or any(_has(listed, rule.any)) else None
    return None


def look(rule: Layout, path: Path, listed: Sequence[PurePosixPath], ranks: int | None = None) -> Told:
    """What the layout of a checkpoint says of it. ranks: how many the job has, None where that is not known."""
    lacks = next(_lacks(rule, path, listed, ranks), "")
    return Told(rule, _step(rule, path, listed), lacks, "" if lacks else _no_resume(rule, path, listed))


def pointer_of(rule: Layout, directories: Sequence[Path]) -> tuple[Pointer | None, str]:
    """The file beside the checkpoints that names the one saved last, and why there is none although the layout has one.
    Both are empty where the layout needs none."""
    for directory in directories:
        for name in rule.newest:
            pointer = read_pointer(directory, name)
            if pointer is None and (directory / name).is_file():
                pointer = _stored_number(directory, name)
            if pointer is not None:
                return pointer, ""
            if (directory / name).exists():
                return None, f"{name}, which names the one saved last, is empty or damaged"
    if rule.newest and rule.newest_required:
        return None, f"{rule.newest[0]}, which is written when a save has ended, is not there"
    return None, ""


# Recognising


def _fits(rule: Layout, path: Path, listed: Sequence[PurePosixPath]) -> bool:
    if rule.path.fullmatch(path.name) is None or path.is_dir() == rule.file:
        return False
    if rule.any and not any(_has(listed, rule.any)):
        return False
    if any(_has(listed, rule.none)):
        return False
    if rule.only and not all(any(_matches(each, pattern) for pattern in rule.only) for each in listed):
        return False
    return _holds(path, rule.keys)


def _holds(path: Path, keys: Names) -> bool:
    """Whether a checkpoint has an entry of each of these names."""
    if not keys or keys == (".*",):
        return True
    wanted = {key: re.compile(key) for key in keys}
    try:
        for name in _names(path):
            wanted = {key: pattern for key, pattern in wanted.items() if pattern.fullmatch(name) is None}
            if not wanted:
                return True
    except (RecordError, UsageError):
        return False
    return False


def _names(path: Path) -> Iterator[str]:
    """The names of what a checkpoint holds, by what it says of itself: nothing of its content is read."""
    if path.is_dir() and (path / METADATA).is_file():
        files = Files()
        try:
            yield from read_metadata(files, path).entries
        finally:
            files.close()
    elif path.is_file() and path.suffix == ".safetensors":
        files = Files()
        try:
            yield from read_header(files.whole(path))[0]
        finally:
            files.close()
    elif path.is_file():
        with open_checkpoint(path) as checkpoint:
            yield from (entry.name for entry in checkpoint.entries())


# Whole, and fit to go on from


def _lacks(rule: Layout, path: Path, listed: Sequence[PurePosixPath], ranks: int | None) -> Iterator[str]:
    for mark in _has(listed, rule.unfinished):
        yield f"{mark} says that its save did not end"
    for names in rule.whole:
        found = list(_has(listed, names))
        if not found:
            yield f"{names[0]} is missing"
        elif len(names) == 1 and names[0].endswith(".json"):
            problem = _json_problem(path / found[0])
            if problem:
                yield f"{found[0]} {problem}"
    if rule.ranks is not None and ranks is not None and ranks > 1:
        for rank in range(ranks):
            name = rule.ranks.replace("{rank}", str(rank))
            # One that saves nothing that goes by ranks has none of them.
            if any(_has(listed, (rule.ranks.replace("{rank}", "*"),))) and not any(_has(listed, (name,))):
                yield f"{name} is missing, and the job has {ranks} ranks"
    if rule.counted is not None:
        yield from _uncounted(rule.counted, path, listed)


def _uncounted(rule: Counted, path: Path, listed: Sequence[PurePosixPath]) -> Iterator[str]:
    source = next(_has(listed, rule.of), None)
    values = _values(path / source, (rule.by, rule.when)) if source is not None else {}
    if values.get(rule.when) != rule.value or not (values.get(rule.by) or "").isdecimal():
        return
    for number in range(min(int(values[rule.by]), 1_000_000)):
        name = rule.files.replace("{n}", str(number))
        if not any(_has(listed, (name,))):
            yield f"{name} is missing: {source} tells {values[rule.by]} of them"
            return


def _no_resume(rule: Layout, path: Path, listed: Sequence[PurePosixPath]) -> str:
    if any(not any(_has(listed, names)) for names in rule.resume_files) or not _holds(path, rule.resume_keys):
        return rule.resume_lacks
    return ""


def _json_problem(path: Path) -> str:
    files = Files()
    try:
        return json_problem(files.whole(path))
    except RecordError as error:
        return error.what
    finally:
        files.close()


# Steps


def _step(rule: Layout, path: Path, listed: Sequence[PurePosixPath]) -> int | None:
    found = rule.path.fullmatch(path.name)
    named = found["step"] if found is not None and "step" in rule.path.groupindex else None
    if rule.step_entry and not (rule.step_when_unnamed and re.search(r"\d", path.name)):
        source = next(_has(listed, rule.step_file), None) if rule.step_file else None
        if source is not None or not rule.step_file:
            values = _values(path / source if source is not None else path, rule.step_entry)
            told = next((values[name] for name in rule.step_entry if (values.get(name) or "").isdecimal()), None)
            named = told if told is not None else named
    return int(named) if named is not None and len(named) < 19 else None


def _values(path: Path, names: Sequence[str]) -> dict[str, str]:
    """Plain values and whole numbers of a file by name, those that are there; the last one read ends the reading."""
    found: dict[str, str] = {}
    try:
        with open_checkpoint(path) as checkpoint:
            for entry in checkpoint.entries(prefixes=False):
                if entry.name in names:
                    found[entry.name] = _text(entry)
                    if len(found) == len(names):
                        break
    except (RecordError, UsageError):
        pass
    return found


def _text(entry: Entry) -> str:
    if entry.value is not None:
        return entry.value
    if entry.data is not None and "int" in entry.dtype and 0 < entry.nbytes <= 8:
        return str(int.from_bytes(entry.read(), "little", signed=not entry.dtype.startswith("u")))
    return ""


def _stored_number(directory: Path, name: str) -> Pointer | None:
    """A pointer that is a saved dictionary, whose `step` tells."""
    told = _values(directory / name, ("step",)).get("step", "")
    return Pointer(name, told, int(told)) if told.isdecimal() and len(told) < 19 else None


# Patterns


def _has(listed: Sequence[PurePosixPath], names: Names) -> Iterator[PurePosixPath]:
    """The files that one of these patterns names, those of the first pattern first."""
    return (each for pattern in names for each in listed if _matches(each, pattern))


def _matches(path: PurePosixPath, pattern: str) -> bool:
    return _regex(pattern).fullmatch(str(path)) is not None


@functools.lru_cache(maxsize=1024)
def _regex(pattern: str) -> re.Pattern[str]:
    parts = {"**": ".*", "*": "[^/]*"}
    return re.compile("".join(parts.get(piece) or re.escape(piece) for piece in re.split(r"(\*\*|\*)", pattern)))


def _rule(data: dict[str, Any]) -> Layout:
    """A rule as it is written. Raises TypeError, KeyError or re.error for one that is none."""
    step, newest, resume = (data.pop(key, {}) for key in ("step", "newest", "resume"))
    counted = data.pop("counted", None)
    rule = Layout(
        name=data.pop("name"),
        path=re.compile(data.pop("path")),
        file=data.pop("file", False),
        siblings=data.pop("siblings", False),
        whole=tuple(map(_either, data.pop("whole", ()))),
        ranks=data.pop("ranks", None),
        counted=_counted(counted) if counted else None,
        step_file=_either(step.get("file", "")),
        step_entry=_either(step.get("entry", "")),
        step_when_unnamed=step.get("when_unnamed", False),
        newest=tuple(newest.get("files", ())),
        newest_required=newest.get("required", False),
        resume_files=tuple(map(_either, resume.get("files", ()))),
        resume_keys=tuple(resume.get("keys", ())),
        resume_lacks=resume.get("lacks", ""),
        alike=tuple(Alike(re.compile(each["entry"]), each["along"]) for each in data.pop("alike", ())),
        **{key: tuple(data.pop(key, ())) for key in ("any", "none", "only", "keys", "unfinished")},
    )
    if data:
        raise TypeError(f"{rule.name}: {', '.join(data)} means nothing in a layout")
    return rule


def _counted(data: dict[str, Any]) -> Counted:
    return Counted(data["files"], _either(data["of"]), data["by"], data["when"], str(data["is"]))


def _either(text: str) -> Names:
    return tuple(part for part in (piece.strip() for piece in text.split(" | ")) if part)
