"""Files of `torch.save`: a zip archive of a pickle and the memory of its tensors, or the older run of pickles."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

from detrun.checkpoints.entry import Bytes, Entry
from detrun.checkpoints.flatten import flatten
from detrun.checkpoints.rebuild import CALLS, storage_dtype
from detrun.checkpoints.sources import FileSource, HeldSource, Source, SourceFile, read
from detrun.checkpoints.tensors import Storage, numbers
from detrun.checkpoints.unpickle import MOST_BYTES, unpickle
from detrun.errors import RecordError
from detrun.fingerprint.elements import LAYOUTS

ZIP_MAGIC = b"PK\x03\x04"
PICKLE_MAGIC = b"\x80"
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_FIRST_READ = 1 << 20

Run = FileSource | HeldSource


def load_zip(source: Run) -> Any:
    """The object that a `torch.save` archive holds, its tensors as `StoredTensor`s that are still in the file.

    Raises RecordError for an archive that is cut short or holds no `data.pkl`. A tensor whose memory is missing is made
    all the same; reading it says so.
    """
    records = _records(source)
    pickled = records.get("data.pkl")
    if pickled is None:
        raise RecordError("is a zip archive without data.pkl, which torch.save writes", where=source.where)
    if pickled.file_size > MOST_BYTES:
        raise RecordError(f"holds a pickle of {pickled.file_size:,} bytes", where=source.where)
    order = records.get("byteorder")
    big_endian = order is not None and order.file_size < 16 and _content(source, order) == b"big"

    def storage(pid: Any) -> Storage:
        if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage" or not isinstance(pid[2], str):
            raise ValueError("a persistent id that is no storage")
        dtype = storage_dtype(pid[1])
        return _storage(source, records.get(f"data/{pid[2]}"), pid[2], dtype, numbers((pid[4],))[0], big_endian)

    return unpickle(_content(source, pickled), source.where, CALLS, storage)[0]


def load_pickles(source: Run) -> Any:
    """The object of a file that `torch.save` wrote without a zip archive, or of a plain pickle. Raises RecordError."""
    size = _FIRST_READ
    while True:
        head = read(source, 0, min(size, source.length))
        try:
            return _load_pickles(source, head)
        except RecordError:
            # A pickle does not tell its length: read on while there is more, in case it was only cut off here.
            if size >= min(source.length, MOST_BYTES):
                raise
        size *= 8


def zip_entries(source: Run) -> Iterator[Entry]:
    """The entries of a `torch.save` archive. Raises RecordError."""
    return flatten(load_zip(source), source.where)


def pickle_entries(source: Run) -> Iterator[Entry]:
    """The entries of an older `torch.save` file or a plain pickle. Raises RecordError."""
    return flatten(load_pickles(source), source.where)


def is_other_archive(source: Run) -> bool:
    """Is it a zip archive, whole, that `torch.save` did not write?"""
    try:
        return "data.pkl" not in _records(source)
    except RecordError:
        return False


def archive_entries(source: Run) -> Iterator[Entry]:
    """The entries of a zip archive of any other kind: of each of its records the bytes, or, where that is a file of
    `torch.save`, what it holds. Raises RecordError."""
    for name, info in sorted(_records(source).items()):
        if info.is_dir():
            continue
        try:
            found: Run = _unpacked(source, info)
            inner = read(found, 0, min(len(ZIP_MAGIC), found.length)) == ZIP_MAGIC and not is_other_archive(found)
        except RecordError as error:
            yield Entry(name, problem=error.what)
            continue
        if inner:
            yield from (entry.below(name) for entry in zip_entries(found))
        else:
            yield Entry(name, "bytes", (found.length,), data=Bytes(found))


def _unpacked(source: Run, info: zipfile.ZipInfo) -> Run:
    if info.compress_type == zipfile.ZIP_STORED:
        return _run(source, info)
    if info.file_size > MOST_BYTES:
        raise RecordError(f"holds a compressed record of {info.file_size:,} bytes", where=source.where)
    try:
        with zipfile.ZipFile(SourceFile(source)) as archive:
            return HeldSource(archive.read(info), source.where)
    except (zipfile.BadZipFile, OSError, ValueError, RuntimeError, NotImplementedError, zlib.error) as error:
        raise RecordError(f"is damaged: {error}", where=source.where) from None


def _records(source: Run) -> dict[str, zipfile.ZipInfo]:
    """The archive's records by name, without the folder that `torch.save` names after the file."""
    try:
        with zipfile.ZipFile(SourceFile(source)) as archive:
            listed = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, struct.error, NotImplementedError, OverflowError) as error:
        reason = "its directory, which is written last, is missing" if isinstance(error, zipfile.BadZipFile) else error
        raise RecordError(f"is cut short or damaged: {reason}", where=source.where) from None
    pickles = [info.filename for info in listed if info.filename.endswith("data.pkl")]
    folder = min(pickles, key=len).removesuffix("data.pkl") if pickles else ""
    return {info.filename.removeprefix(folder): info for info in listed if info.filename.startswith(folder)}


def _run(source: Run, info: zipfile.ZipInfo) -> Run:
    """Where the bytes of a record lie. Raises RecordError."""
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.file_size != info.compress_size:
        raise RecordError("holds compressed or encrypted records, which torch.save does not write", where=source.where)
    header = read(source, info.header_offset, _LOCAL_HEADER.size)
    magic, *_, name, extra = _LOCAL_HEADER.unpack(header)
    if magic != ZIP_MAGIC:
        raise RecordError("is damaged: its directory points where no record begins", where=source.where)
    return source.part(info.header_offset + _LOCAL_HEADER.size + name + extra, info.file_size)


def _content(source: Run, info: zipfile.ZipInfo) -> bytes:
    found = _run(source, info)
    return read(found, 0, found.length)


def _storage(
    source: Run, info: zipfile.ZipInfo | None, key: str, dtype: str, elements: int, big_endian: bool
) -> Storage:
    if info is None:
        return Storage(dtype, None, f"its memory, record data/{key[:40]}, is missing")
    try:
        found = _run(source, info)
    except RecordError as error:
        return Storage(dtype, None, f"its memory, record data/{key[:40]}: {error.what}")
    wanted = elements * LAYOUTS[dtype].element_bytes
    if found.length < wanted:
        return Storage(dtype, None, f"its memory, record data/{key[:40]}, has {found.length:,} bytes of {wanted:,}")
    return Storage(dtype, found, big_endian=big_endian)


def _load_pickles(source: Run, head: bytes) -> Any:
    where = source.where
    first, at = unpickle(head, where, CALLS)
    if first != _LEGACY_MAGIC:
        return first
    _version, at = unpickle(head, where, CALLS, begin=at)
    system, at = unpickle(head, where, CALLS, begin=at)
    big_endian = isinstance(system, dict) and system.get("little_endian") is False
    sizes: dict[str, tuple[str, int]] = {}

    def note(pid: Any) -> None:
        dtype, elements = storage_dtype(pid[1]), numbers((pid[4],))[0]
        sizes[str(pid[2])] = (dtype, elements)

    begin = at
    # Once for the sizes of the storages, which follow the pickles; then again with their places known.
    _, at = unpickle(head, where, {}, note, begin)
    keys, at = unpickle(head, where, CALLS, begin=at)
    places: dict[str, Run] = {}
    for key in map(str, keys if isinstance(keys, list) else []):
        if key not in sizes:
            raise RecordError("lists a storage that no tensor has", where=where)
        dtype, elements = sizes[key]
        length = elements * LAYOUTS[dtype].element_bytes
        places[key] = source.part(at + 8, length)  # after its number of elements
        at += 8 + length

    def storage(pid: Any) -> Storage:
        found = places.get(str(pid[2]))
        return Storage(storage_dtype(pid[1]), found, "its memory is missing", big_endian)

    return unpickle(head, where, CALLS, storage, begin)[0]


__all__ = [
    "PICKLE_MAGIC",
    "ZIP_MAGIC",
    "Source",
    "archive_entries",
    "is_other_archive",
    "load_pickles",
    "load_zip",
    "pickle_entries",
    "zip_entries",
]
