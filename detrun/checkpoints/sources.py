"""Bytes of checkpoint files, read by position, a piece at a time.

By `pread` and never through a memory map: a file that is cut short while it is read gives an error here, where a map
would end the process, and pages of a map count as this process's memory.
"""

from __future__ import annotations

import io
import os
import stat
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from detrun.errors import RecordError

BLOCK = 4 << 20
"""Bytes held at a time."""

_MOST_OPEN = 64


class Source(Protocol):
    """A run of bytes of known length; `where` names it in errors."""

    @property
    def length(self) -> int: ...

    @property
    def where(self) -> str: ...

    def read_into(self, begin: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `begin` on. Raises RecordError if they are not all there."""
        ...


class Files:
    """The open files of a checkpoint: few at a time, however many it has. Symbolic links are followed, since
    checkpoints are kept in stores of linked files; what is not a plain file is refused."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, int] = OrderedDict()

    def descriptor(self, path: Path) -> int:
        """A descriptor to read from, valid until others are asked for. Raises RecordError."""
        found = self._open.pop(path, None)
        if found is None:
            while len(self._open) >= _MOST_OPEN:
                os.close(self._open.popitem(last=False)[1])
            found = _open(path)
        self._open[path] = found
        return found

    def whole(self, path: Path) -> FileSource:
        """The bytes of a file as it is now. Raises RecordError."""
        return FileSource(self, path, 0, os.fstat(self.descriptor(path)).st_size)

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


@dataclass(frozen=True, eq=False)
class FileSource:
    """A run of bytes of a file."""

    files: Files
    path: Path
    offset: int
    length: int

    @property
    def where(self) -> str:
        return str(self.path)

    def part(self, begin: int, length: int) -> FileSource:
        """A run within this one. Raises RecordError if it reaches beyond."""
        if begin < 0 or length < 0 or begin + length > self.length:
            raise RecordError(
                f"ends too early: bytes {begin:,} to {begin + length:,} are wanted of {self.length:,}", where=self.where
            )
        return FileSource(self.files, self.path, self.offset + begin, length)

    def read_into(self, begin: int, target: memoryview) -> None:
        if begin < 0 or begin + len(target) > self.length:
            raise RecordError(
                f"ends too early: bytes {begin:,} to {begin + len(target):,} are wanted of {self.length:,}",
                where=self.where,
            )
        descriptor, done = self.files.descriptor(self.path), 0
        try:
            while done < len(target):
                got = os.preadv(descriptor, [target[done:]], self.offset + begin + done)
                if not got:
                    raise RecordError("was cut short while it was read", where=self.where)
                done += got
        except OSError as error:
            raise RecordError(f"cannot be read: {error.strerror}", where=self.where) from None


@dataclass(frozen=True, eq=False)
class HeldSource:
    """Bytes that are in memory, such as an array inside a pickle."""

    raw: bytes
    where: str

    @property
    def length(self) -> int:
        return len(self.raw)

    def part(self, begin: int, length: int) -> HeldSource:
        """A run within this one. Raises RecordError if it reaches beyond."""
        if begin < 0 or length < 0 or begin + length > len(self.raw):
            raise RecordError(f"ends too early: {begin + length:,} bytes of {len(self.raw):,}", where=self.where)
        return HeldSource(self.raw[begin : begin + length], self.where)

    def read_into(self, begin: int, target: memoryview) -> None:
        if begin < 0 or begin + len(target) > len(self.raw):
            raise RecordError(f"ends too early: {begin + len(target):,} bytes of {len(self.raw):,}", where=self.where)
        target[:] = memoryview(self.raw)[begin : begin + len(target)]


def read(source: Source, begin: int, length: int) -> bytes:
    """Bytes of a source as a copy. Raises RecordError before anything is allocated if they are not there."""
    if begin < 0 or length < 0 or begin + length > source.length:
        raise RecordError(
            f"ends too early: bytes {begin:,} to {begin + length:,} are wanted of {source.length:,}", where=source.where
        )
    held = bytearray(length)
    source.read_into(begin, memoryview(held))
    return bytes(held)


def blocks(source: Source, begin: int, length: int, size: int = BLOCK) -> Iterator[memoryview]:
    """Bytes of a source in pieces of at most `size`. Each is valid until the next one is asked for."""
    held = memoryview(bytearray(min(size, length)))
    done = 0
    while done < length:
        piece = held[: min(size, length - done)]
        source.read_into(begin + done, piece)
        yield piece
        done += len(piece)


class SourceFile(io.RawIOBase):
    """A source as a file object that can be read and sought in, for zipfile."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._source.length}[whence]
        if base + offset < 0:
            raise OSError("seek before the beginning")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        target = target[: max(0, min(len(target), self._source.length - self._at))]
        self._source.read_into(self._at, target)
        self._at += len(target)
        return len(target)


def _open(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise RecordError("is missing", where=str(path)) from None
    except ValueError:
        raise RecordError("is not a possible file name", where=repr(str(path))) from None
    except OSError as error:
        raise RecordError(f"cannot be opened: {error.strerror}", where=str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RecordError("is not a plain file", where=str(path))
    return descriptor
