"""Folders of torch.distributed.checkpoint: `.metadata` says which tensors there are and in which file each shard lies.

`.metadata` is a pickle of the library's own classes, read here as data. A shard is a `torch.save` archive in a file.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from detrun.checkpoints.entry import Entry
from detrun.checkpoints.flatten import flatten
from detrun.checkpoints.rebuild import CALLS
from detrun.checkpoints.sources import BLOCK, Files, FileSource, read
from detrun.checkpoints.tensors import Rows, StoredTensor, numbers, raw_dtype
from detrun.checkpoints.torch_file import load_zip
from detrun.checkpoints.unpickle import Opaque, unpickle
from detrun.errors import RecordError
from detrun.fingerprint.elements import LAYOUTS
from detrun.records.files import one_line

METADATA = ".metadata"
SHARD_SUFFIX = ".distcp"

_GAPS = "has parts that overlap or leave gaps"
_Array = npt.NDArray[Any]
_Place = tuple[str, tuple[int, ...] | None]
"""A tensor's or object's name, and where its shard begins; None for an object."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Where a shard or an object lies: a file below the folder, and the run of its bytes."""

    file: str
    offset: int
    length: int
    transformed: bool


@dataclass(frozen=True)
class Metadata:
    """What `.metadata` says: the kind of each entry (`Opaque`s of the library) and the places of shards."""

    path: Path
    entries: dict[str, Opaque]
    shards: dict[_Place, Shard]


def read_metadata(files: Files, folder: Path) -> Metadata:
    """The `.metadata` of a folder. Raises RecordError."""
    path = folder / METADATA
    source = files.whole(path)
    root, _ = unpickle(read(source, 0, source.length), str(path), CALLS)
    state = root.state if isinstance(root, Opaque) else None
    if not isinstance(state, dict) or not isinstance(state.get("state_dict_metadata"), dict):
        raise RecordError("holds no metadata of torch.distributed.checkpoint", where=str(path))
    entries = {
        name: about
        for name, about in state["state_dict_metadata"].items()
        if isinstance(name, str) and isinstance(about, Opaque)
    }
    stored = state.get("storage_data")
    try:
        shards = dict(_shard(*item) for item in stored.items()) if isinstance(stored, dict) else {}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise RecordError("holds places of shards that make no sense", where=str(path)) from None
    return Metadata(path, entries, shards)


def dcp_problems(files: Files, folder: Path) -> Iterator[str]:
    """What is missing of a folder, most telling first: its metadata, files, bytes of files. Each file once."""
    try:
        metadata = read_metadata(files, folder)
    except RecordError as error:
        yield f"{METADATA} {error.what}"
        return
    ends: dict[str, int] = {}
    for shard in metadata.shards.values():
        ends[shard.file] = max(ends.get(shard.file, 0), shard.offset + shard.length)
    for name, end in sorted(ends.items()):
        try:
            length = files.whole(_inside(folder, name)).length
        except RecordError as error:
            yield f"{one_line(name)} {error.what}"
            continue
        if length < end:
            yield f"{one_line(name)} is cut short: {length:,} bytes of {end:,}"
    for name, about in metadata.entries.items():
        if any(place not in metadata.shards for place in _places(name, about)):
            yield f"no file is told for a part of {one_line(name)}"
            return


def dcp_entries(files: Files, folder: Path) -> Iterator[Entry]:
    """The entries of a folder, in the order of its metadata. Raises RecordError where that cannot be read; what else is
    missing is the problem of the entries that need it."""
    metadata = read_metadata(files, folder)
    for name, about in metadata.entries.items():
        if about.name.endswith(".TensorStorageMetadata"):
            yield _tensor(files, folder, metadata, name, about)
        else:
            yield from _objects(files, folder, metadata, name)


def _tensor(files: Files, folder: Path, metadata: Metadata, name: str, about: Opaque) -> Entry:
    try:
        properties = about.state["properties"].state
        dtype = (properties[0] if isinstance(properties, tuple) else properties["dtype"]).name.removeprefix("torch.")
        shape = numbers(about.state["size"])
        layout = [(numbers(each.state["offsets"]), numbers(each.state["sizes"])) for each in about.state["chunks"]]
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):
        return Entry(name, problem="has a description that makes no sense")
    if dtype not in LAYOUTS:
        return Entry(name, dtype, shape, problem=f"has a dtype that is not known: {one_line(dtype, 40)}")
    chunks: list[ShardData] = []
    for offsets, sizes in layout:
        shard = metadata.shards.get((name, offsets))
        fault = _fits(offsets, sizes, shape)
        if fault is None and shard is None:
            fault = "has a part whose file is not told"
        if fault is not None or shard is None:
            return Entry(name, dtype, shape, problem=fault)
        try:
            source = _run(files, folder, shard)
        except RecordError as error:
            return Entry(name, dtype, shape, problem=str(error))
        chunks.append(ShardData(dtype, offsets, sizes, source, shard.transformed))
    if sum(math.prod(chunk.shape) for chunk in chunks) != math.prod(shape):
        return Entry(name, dtype, shape, problem=_GAPS)
    whole = chunks[0] if len(chunks) == 1 else Assembled(name, dtype, shape, tuple(chunks))
    return Entry(name, dtype, shape, data=whole, chunks=tuple(chunks))


def _objects(files: Files, folder: Path, metadata: Metadata, name: str) -> Iterator[Entry]:
    shard = metadata.shards.get((name, None))
    if shard is None:
        yield Entry(name, problem="has no file that is told")
        return
    try:
        source = _run(files, folder, shard)
        if shard.transformed:
            raise RecordError("is compressed, which detrun does not read", where=source.where)
        for entry in flatten(load_zip(source), source.where):
            yield entry.below(name)
    except RecordError as error:
        yield Entry(name, problem=str(error))


@dataclass(frozen=True, slots=True, eq=False)
class ShardData:
    """One shard: where it begins in its tensor, and its content, whose archive is opened when it is read."""

    dtype: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    source: FileSource
    transformed: bool

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * LAYOUTS[self.dtype].element_bytes

    def stored(self) -> StoredTensor:
        """The tensor as it lies in its file. Raises RecordError where it is not the one that the metadata says."""
        if self.transformed:
            raise RecordError("is compressed, which detrun does not read", where=self.source.where)
        found = load_zip(self.source)
        if not isinstance(found, StoredTensor) or found.dtype != self.dtype or found.shape != self.shape:
            raise RecordError("holds another tensor than the metadata says", where=self.source.where)
        return found

    def blocks(self) -> Iterator[memoryview]:
        return self.stored().blocks()


@dataclass(frozen=True, slots=True, eq=False)
class Assembled:
    """A tensor put together from its shards, a slab of rows at a time: each shard's rows lie together in its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[ShardData, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * LAYOUTS[self.dtype].element_bytes

    def stored(self) -> None:
        """It lies in several pieces."""

    def blocks(self) -> Iterator[memoryview]:
        size = LAYOUTS[self.dtype].element_bytes
        step = max(1, BLOCK // max(math.prod(self.shape[1:]) * size, 1))
        waiting = deque(sorted((chunk for chunk in self.chunks if math.prod(chunk.shape)), key=lambda c: c.offsets))
        at_hand: list[tuple[ShardData, Rows]] = []
        for begin in range(0, self.shape[0], step):
            end = min(begin + step, self.shape[0])
            at_hand = [(chunk, rows) for chunk, rows in at_hand if chunk.offsets[0] + chunk.shape[0] > begin]
            while waiting and waiting[0].offsets[0] < end:
                chunk = waiting.popleft()
                at_hand.append((chunk, chunk.stored().rows()))
            yield self._slab(begin, end, at_hand).reshape(-1).view(np.uint8).data

    def _slab(self, begin: int, end: int, at_hand: list[tuple[ShardData, Rows]]) -> _Array:
        """Rows `begin` to `end`, put together from the shards that reach into them."""
        shape = (end - begin, *self.shape[1:])
        runs = []
        for chunk, rows in at_hand:
            first = chunk.offsets[0]
            runs.append((chunk, rows, max(begin, first) - first, min(end, first + chunk.shape[0]) - first))
        # Before anything is allocated: a damaged description must not claim more memory than its shards have.
        if sum((high - low) * math.prod(chunk.shape[1:]) for chunk, _, low, high in runs) != math.prod(shape):
            raise RecordError(_GAPS, where=self.name)
        slab = np.empty(shape, dtype=raw_dtype(LAYOUTS[self.dtype].element_bytes))
        filled = np.zeros(shape, dtype=np.bool_)
        for chunk, rows, low, high in runs:
            first = chunk.offsets[0] - begin
            place = (
                slice(first + low, first + high),
                *(slice(o, o + s) for o, s in zip(chunk.offsets[1:], chunk.shape[1:], strict=True)),
            )
            slab[place] = rows.read(low, high)
            filled[place] = True
        if not filled.all():
            raise RecordError(_GAPS, where=self.name)
        return slab


def _places(name: str, about: Opaque) -> Iterator[_Place]:
    if not about.name.endswith(".TensorStorageMetadata"):
        yield name, None
        return
    try:
        for each in about.state["chunks"]:
            yield name, numbers(each.state["offsets"])
    except (AttributeError, KeyError, TypeError, ValueError):
        return


def _shard(index: Any, info: Any) -> tuple[_Place, Shard]:
    name, offset, about = index.state["fqn"], index.state.get("offset"), info.state
    if not isinstance(name, str) or not isinstance(about["relative_path"], str):
        raise ValueError("no name")
    begin, length = numbers((about["offset"], about["length"]))
    place = (name, None if offset is None else numbers(offset))
    return place, Shard(about["relative_path"], begin, length, bool(about.get("transform_descriptors")))


def _fits(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> str | None:
    if not len(offsets) == len(sizes) == len(shape) or any(
        offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)
    ):
        return "has a part that reaches beyond it"
    return None


def _inside(folder: Path, name: str) -> Path:
    """A file below the folder. Raises RecordError for a name that leads out of it."""
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\0" in name:
        raise RecordError("lies outside the checkpoint", where=one_line(name))
    return folder / pure


def _run(files: Files, folder: Path, shard: Shard) -> FileSource:
    return files.whole(_inside(folder, shard.file)).part(shard.offset, shard.length)
