"""Opens a checkpoint, whatever its format, as one run of entries."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType

from detrun.checkpoints.dcp import METADATA, SHARD_SUFFIX, dcp_entries
from detrun.checkpoints.entry import Bytes, Entry
from detrun.checkpoints.json_file import is_state, json_entries
from detrun.checkpoints.safetensors_file import looks_like_safetensors, safetensors_entries
from detrun.checkpoints.sources import Files, read
from detrun.checkpoints.torch_file import (
    PICKLE_MAGIC,
    ZIP_MAGIC,
    archive_entries,
    is_other_archive,
    pickle_entries,
    zip_entries,
)
from detrun.errors import RecordError, UsageError

ITERATION = re.compile(r"iter_\d{7}")
"""Folder names of the layout whose tracker file is `latest_checkpointed_iteration.txt`."""
TORCH_SUFFIXES = (".pt", ".pth", ".ckpt", ".distcp")
_INDEX_SUFFIX = ".index.json"
_MOST_FILES = 200_000
_MOST_DEPTH = 8


@dataclass(frozen=True)
class Member:
    """A part of a checkpoint that is read by itself: a file, or a folder of shards.

    kind: "torch.save", "pickle", "safetensors", "dcp", "json", "archive" (a zip of another kind), "file" (its bytes
    alone) or "shards" (of a save that did not end). prefix: what its entries' names begin with.
    """

    path: Path
    kind: str
    prefix: str


class Checkpoint:
    """An open checkpoint: `with open_checkpoint(path) as checkpoint: …`.

    format: "torch.save", "archive", "pickle", "dcp", "safetensors", "iterations" (dcp beside a tracker file), "mixed"
    of these, or "files" where nothing in it is known.
    """

    def __init__(self, path: Path, format: str, members: list[Member]) -> None:
        self.path = path
        self.format = format
        self.members = members
        self._files = Files()
        self._unlisted: list[str] = []

    def entries(self, prefixes: bool = True) -> Iterator[Entry]:
        """What it holds, in the order of its files. A part that cannot be read is an entry with a `problem`.

        prefixes: False leaves the files' names out of the entries' names.
        """
        for member in self.members:
            prefix = member.prefix if prefixes else ""
            try:
                for entry in entries_of(self._files, member):
                    yield entry.below(prefix)
            except RecordError as error:
                self._unlisted.append(prefix)
                yield Entry(prefix or member.path.name, problem=str(error))

    def may_hold(self, name: str) -> bool:
        """Whether an entry that `entries()` did not give may be in a part that could not be read to its end."""
        return any(not prefix or name == prefix or name.startswith(f"{prefix}.") for prefix in self._unlisted)

    def close(self) -> None:
        self._files.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_checkpoint(path: Path) -> Checkpoint:
    """Look at a checkpoint, a file or a folder; its content is read when it is asked for. Raises UsageError where there
    is none, and RecordError for a folder that is too large to be one."""
    if path.is_dir():
        members = _folder_members(path)
        if not members:
            raise UsageError(f"{path} holds no files", hint="name a checkpoint's folder or file")
        return Checkpoint(path, _format(path, members), members)
    if not path.exists():
        raise UsageError(f"{path} is not there", hint="name a checkpoint's folder or file")
    files = Files()
    try:
        member = Member(path, kind_of(files, path), "")
    finally:
        files.close()
    return Checkpoint(path, _format(path, [member]), [member])


def entries_of(files: Files, member: Member) -> Iterator[Entry]:
    """The entries of one part, without its prefix. Raises RecordError."""
    if member.kind == "dcp":
        yield from dcp_entries(files, member.path)
        return
    if member.kind == "shards":
        raise RecordError(f"holds shards and no {METADATA}, which is written last", where=str(member.path))
    source = files.whole(member.path)
    if member.kind == "torch.save":
        yield from zip_entries(source)
    elif member.kind == "archive":
        yield from archive_entries(source)
    elif member.kind == "pickle":
        yield from pickle_entries(source)
    elif member.kind == "safetensors":
        yield from safetensors_entries(source)
    elif member.kind == "json":
        yield from json_entries(source)
    else:
        yield Entry("", "bytes", (source.length,), data=Bytes(source))


def kind_of(files: Files, path: Path) -> str:
    """What a file is, by its first bytes; where these say nothing, by its name. Raises RecordError.

    A document of JSON that has the size of a state is "json".
    """
    source = files.whole(path)
    head = read(source, 0, min(16, source.length))
    if head.startswith(ZIP_MAGIC):
        other = path.suffix not in TORCH_SUFFIXES and is_other_archive(source)
        return "archive" if other else "torch.save"
    if path.suffix == ".safetensors" or looks_like_safetensors(head):
        return "safetensors"
    if head[:1] == PICKLE_MAGIC and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "pickle"
    if path.suffix == ".json" and is_state(source):
        return "json"
    return "torch.save" if path.suffix in TORCH_SUFFIXES else "file"


def list_files(folder: Path) -> list[PurePosixPath]:
    """Every file below a folder, relative to it, sorted; linked folders are not followed. Raises RecordError."""
    found: list[PurePosixPath] = []
    for place, folders, names in os.walk(folder):
        here = PurePosixPath(Path(place).relative_to(folder).as_posix())
        if len(here.parts) >= _MOST_DEPTH:
            folders.clear()
        found += [here / name for name in names]
        if len(found) > _MOST_FILES:
            raise RecordError(f"holds more than {_MOST_FILES:,} files", where=str(folder))
    return sorted(found)


def _folder_members(folder: Path) -> list[Member]:
    listed = list_files(folder)
    sharded = {path.parent for path in listed if path.name == METADATA}
    orphaned = {path.parent for path in listed if path.suffix == SHARD_SUFFIX} - sharded
    members = [Member(folder / path, "dcp", _text(path)) for path in sorted(sharded)]
    members += [Member(folder / path, "shards", _text(path)) for path in sorted(orphaned)]
    rest = [
        path
        for path in listed
        if not path.name.startswith(".") and path.suffix != SHARD_SUFFIX and not path.name.endswith(_INDEX_SUFFIX)
    ]
    stems = [_text(path.with_suffix("")) for path in rest]
    indexed = _indexed(folder, listed)
    files = Files()
    try:
        for path, stem in zip(rest, stems, strict=True):
            unique = stem if stems.count(stem) == 1 else _text(path)
            try:
                kind = kind_of(files, folder / path)
            except RecordError:
                kind = "file"  # says why it cannot be read when it is
            prefix = _text(path) if kind == "file" else indexed.get(path, unique)
            members.append(Member(folder / path, kind, prefix))
    finally:
        files.close()
    return members


def _indexed(folder: Path, listed: list[PurePosixPath]) -> dict[PurePosixPath, str]:
    """Shards of one model that an index file joins, and the stem they share: how it was cut up does not matter."""
    found = {}
    for path in listed:
        for name in shards_of_index(folder / path) if path.name.endswith(_INDEX_SUFFIX) else ():
            stem = path.name.removesuffix(_INDEX_SUFFIX).split(".")[0]
            found[path.parent / name] = _text(path.parent / stem)
    return found


def shards_of_index(path: Path) -> list[str]:
    """The files that an index of shards names, `[]` where it cannot be read as one."""
    files = Files()
    try:
        source = files.whole(path)
        document = json.loads(read(source, 0, min(source.length, 1 << 26)))
        return sorted({name for name in document["weight_map"].values() if isinstance(name, str)})
    except (RecordError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return []
    finally:
        files.close()


def _format(path: Path, members: list[Member]) -> str:
    kinds = {member.kind for member in members} - {"file", "json"}
    if not kinds:
        return "files"
    if ITERATION.fullmatch(path.name) and path.is_dir():
        return "iterations"
    kinds = {"dcp" if kind == "shards" else kind for kind in kinds}
    return kinds.pop() if len(kinds) == 1 else "mixed"


def _text(path: PurePosixPath) -> str:
    return "" if path == PurePosixPath(".") else str(path)
