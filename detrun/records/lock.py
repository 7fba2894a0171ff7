"""A lock that one command of many holds, on a file system that many machines share.

It is a file, made whole by a hard link, which every network file system does atomically; it says who holds it, and its
time of modification is the holder's heartbeat. It is broken only when it is stale: the heartbeat is older than STALE
seconds by the file system's own clock, or the holder was a process of this machine that is no more. Kernel locks
(flock, fcntl) are left aside: over NFS some mounts keep them to one machine. So is the library filelock: its lease is
taken over by exchanging two names (renameat2), which NFS cannot, so that there nobody's death would ever free it.

A holder that slept too long loses the lock like a dead one. It asks `held` before anything that must not happen twice.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from detrun.errors import ArchiveError, RecordError
from detrun.records.files import one_line, open_plain, parse_object
from detrun.records.processes import boot_id, describe_process, is_gone, pid_namespace

BEAT = 15.0
"""Seconds between heartbeats."""

STALE = 120.0
"""Seconds without one after which a holder counts as gone. A network file system may show it up to a minute late."""

MAX_BYTES = 64 * 1024
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


@dataclass(frozen=True)
class Holder:
    """Who holds a lock. since: ISO time by its own clock. age: seconds since its last heartbeat by the file system's
    clock. note: what it said it is at. token: empty where the file cannot be read."""

    token: str = ""
    host: str = "?"
    pid: int = 0
    start: str = ""
    boot: str = ""
    namespace: str = ""
    since: str = "?"
    note: dict[str, str] = field(default_factory=dict)
    age: float = 0.0
    file: tuple[int, int] = (0, 0)

    @property
    def words(self) -> str:
        """`process 4711 on login1, since 2026-11-30T02:30:00Z`."""
        return f"process {self.pid} on {one_line(self.host, 80)}, since {one_line(self.since, 40)}"

    def is_stale(self, stale: float = STALE) -> bool:
        """Whether its holder is gone, or has been silent for so long that it counts as gone."""
        if self.age > stale:
            return True
        here = bool(self.boot) and self.boot == boot_id() and bool(self.namespace) and self.namespace == pid_namespace()
        return here and self.pid > 0 and is_gone(self.pid, self.start)


class Lock:
    """One file that at most one process holds. note: what others are told of what its holder is at."""

    def __init__(
        self, path: Path, note: Mapping[str, str] | None = None, *, beat: float = BEAT, stale: float = STALE
    ) -> None:
        self.path = path
        self.note = dict(note or {})
        self.beat = beat
        self.stale = stale
        self._token: str | None = None
        self._lost = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> Holder | None:
        """None once the lock is ours, else who holds it. Returns at once; raises ArchiveError where the folder cannot
        be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            for _ in range(5):
                if self._take():
                    return None
                holder = read_holder(self.path)
                if holder is None:
                    continue  # it was given back in between
                if not holder.is_stale(self.stale):
                    return holder
                self._break(holder)
            return read_holder(self.path) or Holder()
        except OSError as error:
            raise ArchiveError(
                f"the lock cannot be made here: {error.strerror or error}",
                where=str(self.path),
                hint="is the disk full, or the archive read-only? --archive DIR names another one",
            ) from None

    def held(self) -> bool:
        """Whether the lock is still ours: another one may have found us dead. Asked of the file, now."""
        if self._token is None or self._lost:
            return False
        try:
            holder = read_holder(self.path)
        except OSError:
            return True  # the file system does not answer, to others neither
        self._lost = holder is None or holder.token != self._token
        return not self._lost

    def release(self) -> None:
        """Gives the lock back, if it is still ours."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(self.beat)
        # A beat first: whoever looks from now on does not take us for dead while the file is removed.
        with suppress(OSError):
            if self._token is not None and self._beat():
                self.path.unlink()
        self._token = None

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_error: object) -> None:
        self.release()

    def _take(self) -> bool:
        token = secrets.token_hex(16)
        document = {
            "schema_version": 1,
            "token": token,
            "pid": os.getpid(),
            "namespace": pid_namespace(),
            "since": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "note": self.note,
            **describe_process(os.getpid()),
        }
        if not _create(self.path, token, f"{json.dumps(document)}\n".encode()):
            return False
        self._token, self._lost = token, False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, args=(self._stop,), name="detrun-lock", daemon=True)
        self._thread.start()
        return True

    def _keep(self, stop: threading.Event) -> None:
        while not stop.wait(self.beat):
            with suppress(OSError):  # an outage of the file system is waited out: what counts is whose file it is
                if not self._beat():
                    self._lost = True
                    return

    def _beat(self) -> bool:
        """Touches the file, if it is ours. By its descriptor: what is touched is what was looked at."""
        try:
            descriptor = open_plain(self.path)
        except RecordError:
            return False
        with os.fdopen(descriptor, "rb") as file:
            if _parse(file.read(MAX_BYTES), self.path).get("token") != self._token:
                return False
            os.utime(file.fileno())  # now, by the file server's clock
        return True

    def _break(self, holder: Holder) -> None:
        """Removes a stale lock, unless somebody else is at it. One at a time: of two who found the same lock stale, the
        second must not remove what the first has put in its place."""
        guard = self.path.with_name(f"{self.path.name}.breaking")
        token = secrets.token_hex(16)
        if not _create(guard, token, f'{{"token": "{token}", "host": "{socket.gethostname()}"}}\n'.encode()):
            other = read_holder(guard)
            if other is not None and other.age > self.stale:
                _remove(guard, other)  # who was breaking died over it
            else:
                time.sleep(0.05)
            return
        try:
            now = read_holder(self.path)
            if now is not None and (now.token, now.file) == (holder.token, holder.file) and now.is_stale(self.stale):
                _remove(self.path, now)
        finally:
            with suppress(OSError):
                ours = read_holder(guard)
                if ours is not None and ours.token == token:
                    guard.unlink()


def read_holder(path: Path) -> Holder | None:
    """Who holds the lock; None where nobody does. A file that says nothing has a holder without a name, whose age alone
    tells. Raises OSError where the file system does not answer."""
    try:
        descriptor = open_plain(path)
    except RecordError:
        if not os.path.lexists(path):
            return None
        status = path.lstat()
        return Holder(age=_clock_of(path.parent) - status.st_mtime, file=(status.st_dev, status.st_ino))
    with os.fdopen(descriptor, "rb") as file:
        # Of the open file: what is opened is asked of the server, and not of a cache.
        status = os.fstat(file.fileno())
        document = _parse(file.read(MAX_BYTES), path)
    note = document.get("note")
    pid = document.get("pid")
    texts = {key: str(document.get(key) or "") for key in ("token", "start", "boot", "namespace")}
    return Holder(
        host=str(document.get("host") or "?"),
        since=str(document.get("since") or "?"),
        pid=pid if type(pid) is int and 0 < pid < 1 << 31 else 0,
        note={str(key): str(value) for key, value in note.items()} if isinstance(note, dict) else {},
        age=_clock_of(path.parent) - status.st_mtime,
        file=(status.st_dev, status.st_ino),
        **texts,
    )


def _parse(raw: bytes, path: Path) -> dict[str, Any]:
    try:
        return parse_object(raw, str(path))
    except RecordError:
        return {}


def _clock_of(folder: Path) -> float:
    """The time by which that folder's files are dated, which need not be this machine's. A folder that cannot be
    written says nothing: then it is this machine's."""
    try:
        with tempfile.NamedTemporaryFile(prefix=".clock.", dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def _create(path: Path, token: str, content: bytes) -> bool:
    """Makes the file, whole, if there is none of its name."""
    draft = path.with_name(f".{path.name}.{token}")
    _write_new(draft, content)
    try:
        try:
            os.link(draft, path)
        except FileExistsError:
            # A server's first answer may have been lost, and what is there be ours.
            return draft.stat().st_nlink == 2
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            try:
                _write_new(path, content)
            except FileExistsError:
                return False
        return True
    finally:
        with suppress(OSError):
            draft.unlink()


def _write_new(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _remove(path: Path, holder: Holder) -> None:
    """Takes a stale file away under another name, and puts it back if it is another one than was found stale."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(16)}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    taken = read_holder(aside)
    if taken is None or (taken.token, taken.file) != (holder.token, holder.file):
        with suppress(OSError):
            os.link(aside, path)
    with suppress(OSError):
        aside.unlink()
