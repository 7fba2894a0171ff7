"""Which checkpoints lie in a directory, of which step, and which of them are whole."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from detrun.checkpoints.completeness import Checked, check
from detrun.checkpoints.pointers import TRACKER, tracked_step
from detrun.checkpoints.read import TORCH_SUFFIXES
from detrun.errors import UsageError
from detrun.records.files import modified

_STEP = "{step}"
_NUMBER = re.compile(r"\d+")
_UNDER_WAY = re.compile(r"^[._]|(^|[._\-+])(te?mp|partial|incomplete|saving|writing|part)([._\-+]|\d|$)", re.IGNORECASE)
_RANK = re.compile(r"(rank[_\-.=]?)(\d+)")
_FILE_SUFFIXES = (*TORCH_SUFFIXES, ".safetensors", ".bin", ".pkl")


@dataclass(frozen=True)
class Found:
    """A checkpoint: a folder, or a file where the program saves each checkpoint as one.

    step: the number that its name tells, None if it tells none. complete: every file it needs is there and whole; else
    `why` says what is not. format: as in `read.Checkpoint`.
    """

    path: Path
    step: int | None
    complete: bool
    why: str
    format: str


def find_checkpoints(directory: Path, pattern: str | None = None) -> list[Found]:
    """The checkpoints in a directory, oldest first: by step; those without one come first, by time of change.

    pattern: how a checkpoint's path below `directory` tells its step, such as "step-{step}" or "{step}/state.pt";
    without one, the last number in a name is the step. What has a hidden or temporary name is listed as incomplete. A
    directory that is not there has none. Raises UsageError for a pattern without exactly one "{step}", or one that
    leads out of the directory.
    """
    candidates = list(_by_pattern(directory, pattern) if pattern is not None else _by_number(directory))
    candidates.sort(key=lambda each: (each.step is not None, each.step or 0, modified(each.path), each.path.name))
    checked = [check(each.path) for each in candidates]
    last = tracked_step(directory)
    whole = [not each.under_way and not seen.why for each, seen in zip(candidates, checked, strict=True)]
    names = [_file_names(each, seen) for each, seen in zip(candidates, checked, strict=True)]
    found = []
    for index, (each, seen) in enumerate(zip(candidates, checked, strict=True)):
        why = seen.why
        if each.under_way:
            why = "has the name of a save under way"
        elif not why and last is not None and each.step is not None and each.step > last:
            why = f"{TRACKER} says {last}: this save had not ended"
        elif not why:
            others = [(candidates[i].path.name, names[i]) for i in range(len(names)) if i != index and whole[i]]
            why = _lacks(names[index], others)
        found.append(Found(each.path, each.step, not why, why, seen.format))
    return found


def newest_complete(directory: Path, pattern: str | None = None) -> tuple[Found | None, list[Found]]:
    """The newest checkpoint that is whole, or None, and the newer ones that are not, newest first."""
    rejected: list[Found] = []
    for each in reversed(find_checkpoints(directory, pattern)):
        if each.complete:
            return each, rejected
        rejected.append(each)
    return None, rejected


@dataclass(frozen=True)
class _Candidate:
    path: Path
    step: int | None
    under_way: bool = False


def _by_number(directory: Path) -> Iterator[_Candidate]:
    for path in _children(directory):
        is_folder = path.is_dir()
        stem = path.name if is_folder else path.name.removesuffix(path.suffix)
        under_way = _UNDER_WAY.search(path.name) is not None
        numbers = _NUMBER.findall(stem)
        if not numbers or path.is_symlink():
            continue
        if _has_file(path) if is_folder else (path.suffix in _FILE_SUFFIXES or under_way):
            yield _Candidate(path, _step(numbers[-1]), under_way)


def _by_pattern(directory: Path, pattern: str) -> Iterator[_Candidate]:
    parts = PurePosixPath(pattern.replace("{{", "{").replace("}}", "}")).parts
    if sum(part.count(_STEP) for part in parts) != 1 or ".." in parts or PurePosixPath(pattern).is_absolute():
        raise UsageError(
            f"the pattern {pattern!r} does not tell where a checkpoint's step is",
            hint="for example step-{step}, a path below the directory of checkpoints",
        )
    level = next(index for index, part in enumerate(parts) if _STEP in part)
    above, below = directory.joinpath(*parts[:level]), parts[level + 1 :]
    before, _, after = parts[level].partition(_STEP)
    wanted = re.compile(re.escape(before) + r"(\d+)" + re.escape(after))
    for path in _children(above):
        found = wanted.fullmatch(path.name)
        if found is not None:
            whole = path.joinpath(*below)
            yield _Candidate(whole, _step(found[1])) if whole.exists() else _Candidate(path, _step(found[1]), True)
        elif _UNDER_WAY.search(path.name) and (numbers := _NUMBER.findall(path.name)):
            yield _Candidate(path, _step(numbers[-1]), True)


def _step(digits: str) -> int | None:
    return int(digits) if len(digits) < 19 else None


def _children(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def _has_file(folder: Path) -> bool:
    try:
        return any(path.is_file() or (path.is_dir() and _has_file(path)) for path in folder.iterdir())
    except OSError:
        return False


def _file_names(each: _Candidate, seen: Checked) -> frozenset[str]:
    """The names of its files as every checkpoint of this directory would have them: its own step is taken out."""
    step = str(each.step)
    return frozenset(
        _NUMBER.sub(lambda number: _STEP if each.step and number[0].lstrip("0") == step else number[0], str(path))
        for path in seen.files
    )


def _lacks(names: frozenset[str], others: Sequence[tuple[str, frozenset[str]]]) -> str:
    """What a checkpoint lacks that is whole in itself: files of ranks, or files that every other one has."""
    ranks: dict[str, set[int]] = {}
    for name in names:
        for place in _RANK.finditer(name):
            ranks.setdefault(f"{name[: place.start(2)]}#{name[place.end(2) :]}", set()).add(int(place[2]))
    if not others:
        for template, there in sorted(ranks.items()):
            gap = next((rank for rank in range(max(there)) if rank not in there), None)
            if gap is not None:
                return f"{template.replace('#', str(gap))} is missing"
    for other, has in others:
        # A file of a rank, and its like is here for another one.
        lost = sorted(name for name in has - names if any(_like(name, here) for here in ranks))
        if lost:
            return f"{lost[0]} is missing, which {other} has"
    if len(others) > 1:
        common = frozenset.intersection(*(has for _, has in others)) - names
        if common:
            return f"{min(common)} is missing, which every other checkpoint has"
    return ""


def _like(name: str, template: str) -> bool:
    head, _, tail = template.partition("#")
    return name.startswith(head) and name.endswith(tail) and name[len(head) : len(name) - len(tail)].isdecimal()
