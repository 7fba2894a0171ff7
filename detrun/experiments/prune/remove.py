"""Removes parts of an experiment's folder, and nothing else, whatever lies in its way.

Every step down is taken from an open folder and never through a symbolic link, so that no link, and nobody who puts
one there meanwhile, leads out of the experiment. A link that lies within what is removed is removed itself.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from detrun.records.layout import MARKER

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Size:
    """What a folder holds: its files, and the bytes that they take on disk."""

    files: int = 0
    bytes: int = 0


@contextmanager
def open_experiment(root: Path, id: str) -> Iterator[Folder | None]:
    """An experiment's folder; None where it is none of ours: no plain folder, or without the marker."""
    top = inner = -1
    try:
        try:
            top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            inner = os.open(id, _FOLDER, dir_fd=top)
            ours = stat.S_ISREG(os.stat(MARKER, dir_fd=inner, follow_symlinks=False).st_mode)
        except OSError:
            ours = False
        yield Folder(inner) if ours else None
    finally:
        for descriptor in (inner, top):
            if descriptor >= 0:
                os.close(descriptor)


class Folder:
    """An open folder. Paths are relative to it; none of their parts may be a link."""

    def __init__(self, descriptor: int) -> None:
        self._top = descriptor
        self._device = os.fstat(descriptor).st_dev

    def folders(self, path: str) -> list[str]:
        """The names of the plain folders in a folder, in order; none where it is no plain folder itself."""
        return self._names(path, stat.S_ISDIR)

    def files(self, path: str) -> list[str]:
        """The names of the plain files in it."""
        return self._names(path, stat.S_ISREG)

    def size(self, path: str) -> Size | str | None:
        """What a file or a folder takes, with all that is in it; None where it is not there, a text where it is not as
        it should be: a link, or on another file system, which nobody removes unasked."""
        try:
            with self._parent(path) as (parent, name):
                found = os.stat(name, dir_fd=parent, follow_symlinks=False)
                if found.st_dev != self._device:
                    return "lies on another file system"
                if stat.S_ISLNK(found.st_mode):
                    return "is a symbolic link"
                if not stat.S_ISDIR(found.st_mode):
                    return Size(1, _bytes(found))
                return self._size_of(name, parent)
        except FileNotFoundError:
            return None
        except OSError as error:
            return f"cannot be looked at: {error.strerror}"

    def remove(self, path: str) -> str | None:
        """Removes a file, or a folder with all that is in it; why that failed, or None. Nothing there is no failure."""
        try:
            with self._parent(path) as (parent, name):
                found = os.stat(name, dir_fd=parent, follow_symlinks=False)
                if found.st_dev != self._device:
                    return "lies on another file system"
                if not stat.S_ISDIR(found.st_mode):
                    os.unlink(name, dir_fd=parent)
                    return None
                return self._remove_folder(name, parent)
        except FileNotFoundError:
            return None
        except OSError as error:
            return error.strerror or "it cannot be removed"

    def _remove_folder(self, name: str, parent: int) -> str | None:
        why: list[str] = []
        for _, folders, files, here in os.fwalk(
            name, topdown=False, onerror=lambda error: why.append(str(error)), follow_symlinks=False, dir_fd=parent
        ):
            if os.fstat(here).st_dev != self._device:
                why.append("a part of it lies on another file system")
                continue
            for each in files:
                _quietly(os.unlink, each, here, why)
            for each in folders:
                # A link to a folder is listed among the folders.
                _quietly(_unlink_or_rmdir, each, here, why)
        _quietly(os.rmdir, name, parent, why)
        return why[0] if why else None

    def _size_of(self, name: str, parent: int) -> Size:
        count = total = 0
        for _, _, files, here in os.fwalk(name, follow_symlinks=False, dir_fd=parent):
            for each in files:
                try:
                    total += _bytes(os.stat(each, dir_fd=here, follow_symlinks=False))
                except OSError:
                    continue
                count += 1
        return Size(count, total)

    def _names(self, path: str, wanted: Callable[[int], bool]) -> list[str]:
        found = []
        try:
            with self._opened(path) as here:
                for name in sorted(os.listdir(here)):  # noqa: PTH208  (of an open folder)
                    mode = os.stat(name, dir_fd=here, follow_symlinks=False).st_mode
                    if wanted(mode):
                        found.append(name)
        except OSError:
            return []
        return found

    @contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        folder, _, name = path.rpartition("/")
        with self._opened(folder) as here:
            yield here, name

    @contextmanager
    def _opened(self, path: str) -> Iterator[int]:
        here = os.dup(self._top)
        try:
            for part in filter(None, path.split("/")):
                if part in (".", ".."):
                    raise FileNotFoundError(part)
                below = os.open(part, _FOLDER, dir_fd=here)
                os.close(here)
                here = below
            yield here
        finally:
            os.close(here)


def _quietly(act: Callable[..., None], name: str, here: int, why: list[str]) -> None:
    try:
        act(name, dir_fd=here)
    except FileNotFoundError:
        return
    except OSError as error:
        why.append(f"{name}: {error.strerror}")


def _unlink_or_rmdir(name: str, *, dir_fd: int) -> None:
    linked = stat.S_ISLNK(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode)
    (os.unlink if linked else os.rmdir)(name, dir_fd=dir_fd)


def _bytes(found: os.stat_result) -> int:
    return found.st_blocks * 512
