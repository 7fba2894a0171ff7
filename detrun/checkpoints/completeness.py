"""Whether a checkpoint is whole: every file it needs is there, and none was cut short."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from detrun.checkpoints.dcp import METADATA, dcp_problems
from detrun.checkpoints.read import (
    TORCH_SUFFIXES,
    Checkpoint,
    Member,
    entries_of,
    list_files,
    open_checkpoint,
    shards_of_index,
)
from detrun.checkpoints.safetensors_file import read_header
from detrun.checkpoints.sources import Files
from detrun.errors import RecordError, UsageError
from detrun.records.files import one_line

_OF = re.compile(r"(\d+)-of-(\d+)")
_INDEX_SUFFIX = ".index.json"


@dataclass(frozen=True)
class Checked:
    """What a look at one checkpoint gave. why: what it lacks, "" if it is whole in itself. files: what it has, relative
    to it; () if it is one file."""

    format: str
    why: str
    files: tuple[PurePosixPath, ...] = ()


def check(path: Path) -> Checked:
    """Look whether a checkpoint is whole, by its format. Reads what its files say about themselves, not the tensors."""
    try:
        with open_checkpoint(path) as checkpoint:
            listed = tuple(list_files(path)) if path.is_dir() else ()
            why = next(_problems(checkpoint, listed), "")
            return Checked(checkpoint.format, one_line(why, 300), listed)
    except UsageError:
        return Checked("files", "holds no files")
    except RecordError as error:
        return Checked("files", one_line(str(error), 300))


def _problems(checkpoint: Checkpoint, listed: tuple[PurePosixPath, ...]) -> Iterator[str]:
    files = Files()
    try:
        for member in checkpoint.members:
            for problem in _member_problems(files, member):
                yield f"{member.prefix}: {problem}" if member.prefix and member.kind == "dcp" else problem
    finally:
        files.close()
    yield from _shards_of_a_set(checkpoint.path, listed)


def _member_problems(files: Files, member: Member) -> Iterator[str]:
    if member.kind == "dcp":
        yield from dcp_problems(files, member.path)
        return
    if member.kind == "shards":
        yield f"{METADATA}, which is written last, is missing"
        return
    name = member.path.name
    try:
        source = files.whole(member.path)
        if source.length == 0 and member.path.suffix in (*TORCH_SUFFIXES, ".safetensors", ".bin"):
            yield f"{name} is empty"
        elif member.kind == "safetensors":
            read_header(source)
        elif member.kind == "torch.save":
            for entry in entries_of(files, member):
                if entry.problem is not None:
                    yield f"{name}: {one_line(entry.name)} {entry.problem}"
        elif member.kind == "pickle" and member.path.suffix in TORCH_SUFFIXES:
            next(entries_of(files, member), None)
    except RecordError as error:
        yield f"{name} {error.what}"


def _shards_of_a_set(folder: Path, listed: tuple[PurePosixPath, ...]) -> Iterator[str]:
    """Shards that an index names, or whose own names tell how many there are."""
    there = set(listed)
    for path in listed:
        if path.name.endswith(_INDEX_SUFFIX):
            for name in shards_of_index(folder / path):
                if path.parent / name not in there:
                    yield f"{one_line(name)}, which {path.name} names, is missing"
        found = _OF.search(path.name)
        if found is not None:
            width, total = len(found[1]), int(found[2])
            for number in range(1, min(total, 100_000) + 1):
                name = f"{path.name[: found.start(1)]}{number:0{width}}{path.name[found.end(1) :]}"
                if path.parent / name not in there:
                    yield f"{one_line(name)} is missing"
                    break
