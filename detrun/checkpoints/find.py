"""Which checkpoints lie in a directory, of which step, and which of them are whole."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from detrun.checkpoints.completeness import Checked, check
from detrun.checkpoints.layouts import Layout, Told, like_its_siblings, look, pointer_of, recognise
from detrun.checkpoints.pointers import TRACKER, Pointer, read_pointer
from detrun.checkpoints.read import TORCH_SUFFIXES
from detrun.errors import UsageError
from detrun.records.files import modified

_STEP = "{step}"
_NUMBER = re.compile(r"\d+")
_UNDER_WAY = re.compile(r"^[._]|(^|[._\-+])(te?mp|partial|incomplete|saving|writing|part)([._\-+]|\d|$)", re.IGNORECASE)
_RANK = re.compile(r"(rank[_\-.=]?)(\d+)")
_FILE_SUFFIXES = (*TORCH_SUFFIXES, ".safetensors", ".bin", ".pkl")
_REPORTS = re.compile(
    r"tfevents|\.(jsonl?|txt|log|[ct]sv|ya?ml|toml|ini|md|html|xml|png|jpg|svg|pdf|py|sh|err|out)$", re.IGNORECASE
)
"""Names of files that are never a checkpoint by themselves."""


@dataclass(frozen=True)
class Found:
    """A checkpoint: a folder, or a file where the program saves each checkpoint as one.

    step: the number that its name or its layout tells, None if neither does. complete: every file it needs is there and
    whole; else `why` says what is not. format: as in `read.Checkpoint`. layout: what it is known as, "" for none.
    no_resume: why training cannot go on from it though it is whole, "" if it can.
    """

    path: Path
    step: int | None
    complete: bool
    why: str
    format: str
    layout: str = ""
    no_resume: str = ""


def find_checkpoints(directory: Path, pattern: str | None = None, ranks: int | None = None) -> list[Found]:
    """The checkpoints in a directory, oldest first: by step; those without one come first, by time of change.

    pattern: how a checkpoint's path below `directory` tells its step, such as "step-{step}" or "{step}/state.pt";
    without one, its layout tells the step, or the last number in its name is it. What has a hidden or temporary name is
    listed as incomplete. A directory that is not there has none. ranks: how many the job has, where that is known.
    Raises UsageError for a pattern without exactly one "{step}", or one that leads out of the directory.
    """
    listed = list(_by_pattern(directory, pattern) if pattern is not None else _by_number(directory))
    if not listed and pattern is None:
        listed = list(_by_number(directory, of_any_kind=True))  # a program may save in a format of its own
    looks = [_Look(each, check(each.path)) for each in listed]
    _recognise(looks, ranks)
    looks = [each for each in looks if each.told is not None or not each.candidate.unnamed]
    if pattern is None:
        for each in looks:
            if each.told is not None and each.told.step is not None:
                each.candidate = replace(each.candidate, step=each.told.step)
    looks.sort(key=lambda each: each.order)
    for each in looks:
        each.names = _file_names(each.candidate, each.seen)
        each.why = _why(each, directory, looks)
    whole = [not each.why for each in looks]
    found = []
    for index, each in enumerate(looks):
        why = each.why
        if not why:
            others = [
                (other.candidate.path.name, other.names)
                for i, other in enumerate(looks)
                if i != index and whole[i] and not (other.told and other.told.no_resume)
            ]
            # One that is meant to hold less than the others lacks nothing.
            why = "" if each.told and each.told.no_resume else _lacks(each.names, others)
        path, step, told = each.candidate.path, each.candidate.step, each.told
        name, no_resume = (told.layout.name, told.no_resume) if told is not None else ("", "")
        found.append(Found(path, step, not why, why, each.seen.format, name, "" if why else no_resume))
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
    """unnamed: its name tells no number, so it is one only if its layout is known."""

    path: Path
    step: int | None
    under_way: bool = False
    unnamed: bool = False


@dataclass
class _Look:
    """A candidate and what was seen of it."""

    candidate: _Candidate
    seen: Checked
    told: Told | None = None
    names: frozenset[str] = frozenset()
    why: str = ""

    @property
    def order(self) -> tuple[bool, int, float, str]:
        step, path = self.candidate.step, self.candidate.path
        return (step is not None, step or 0, modified(path), path.name)


def _recognise(looks: list[_Look], ranks: int | None) -> None:
    rules: list[Layout | None] = [recognise(each.candidate.path, each.seen.files) for each in looks]
    for each, shown in zip(looks, list(rules), strict=True):
        sibling = like_its_siblings(each.candidate.path, each.seen.files, rules)
        rule = sibling if sibling is not None else shown
        if rule is not None:
            each.told = look(rule, each.candidate.path, each.seen.files, ranks)


def _why(each: _Look, directory: Path, looks: Sequence[_Look]) -> str:
    """Why a checkpoint is not whole by itself, or is none that the file beside it would lead to; "" if it is."""
    if each.candidate.under_way:
        return "has the name of a save under way"
    if each.seen.why:
        return each.seen.why
    if each.told is not None and each.told.lacks:
        return each.told.lacks
    pointer, problem = read_pointer(directory, TRACKER), ""
    if each.told is not None and each.told.layout.newest:
        pointer, problem = pointer_of(each.told.layout, (directory, each.candidate.path.parent))
    if pointer is None or each.candidate.step is None:
        return problem
    last = _step_of(pointer, looks)
    if last is not None and each.candidate.step > last:
        return f"{pointer.name} says {pointer.target}: this save had not ended"
    return ""


def _step_of(pointer: Pointer, looks: Sequence[_Look]) -> int | None:
    named = [each.candidate.step for each in looks if each.candidate.path.name == Path(pointer.target).name]
    return next((step for step in named if step is not None), pointer.step)


def _by_number(directory: Path, *, of_any_kind: bool = False) -> Iterator[_Candidate]:
    for path in _children(directory):
        is_folder = path.is_dir()
        stem = path.name if is_folder else path.name.removesuffix(path.suffix)
        under_way = _UNDER_WAY.search(path.name) is not None
        numbers = _NUMBER.findall(stem)
        if path.is_symlink():
            continue
        if not numbers:
            if _may_be_one(path, is_folder) and not under_way:
                yield _Candidate(path, None, unnamed=True)
        elif _has_file(path) if is_folder else (_is_checkpoints(path, of_any_kind) or under_way):
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


def _is_checkpoints(file: Path, of_any_kind: bool) -> bool:
    if of_any_kind:
        return _REPORTS.search(file.name) is None
    return file.suffix in _FILE_SUFFIXES


def _may_be_one(path: Path, is_folder: bool) -> bool:
    """Whether something without a number in its name is worth a look: a folder with files right in it, or a file."""
    if not is_folder:
        return path.suffix in _FILE_SUFFIXES
    return any(each.is_file() for each in _children(path))


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
