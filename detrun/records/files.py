"""Plain files of an experiment: read with care, written whole or not at all.

Records are written by other processes on other machines, some of which were killed, so nothing about a file
is taken for granted: it may be a folder, a symbolic link, a pipe, endless, or not text at all. Whatever is
wrong becomes a `RecordError` that names the file.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from detrun.errors import ArchiveError, RecordError

MAX_DOCUMENT_BYTES = 64 * 1024 * 1024
"""No JSON document of an experiment comes near this; a larger one would only fill the memory."""


def open_plain(path: Path) -> int:
    """A file descriptor open for reading, of a regular file that is not a symbolic link; else RecordError.

    O_NONBLOCK keeps a named pipe from holding us for ever.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise RecordError("is missing", where=str(path)) from None
    except ValueError:
        raise RecordError("is not a possible file name", where=repr(str(path))) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise RecordError("is a symbolic link, which no record is", where=str(path)) from None
        raise RecordError(f"cannot be opened: {error.strerror}", where=str(path)) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = "a folder" if stat.S_ISDIR(mode) else "not a plain file"
        raise RecordError(f"is {kind}", where=str(path))
    return descriptor


def read_plain(path: Path, limit: int = MAX_DOCUMENT_BYTES, offset: int = 0) -> bytes:
    """The bytes of a plain file from `offset` on; RecordError where unreadable or more than `limit` bytes."""
    descriptor = open_plain(path)
    with os.fdopen(descriptor, "rb") as file:
        try:
            size = os.fstat(file.fileno()).st_size
            if size - offset > limit:
                raise RecordError(f"is too large: {size:,} bytes, {limit:,} at most", where=str(path))
            if offset:
                file.seek(offset)
            return file.read(max(0, size - offset))
        except OSError as error:
            raise RecordError(f"cannot be read: {error.strerror}", where=str(path)) from None


def parse_object(raw: bytes, where: str) -> dict[str, Any]:
    """A JSON object; RecordError where the bytes are anything else (torn, not UTF-8, too deep)."""
    try:
        document = from_json(raw)
    except ValueError as error:
        try:
            # Only the standard library reads lone surrogates, which stand for bytes of an environment
            # variable or a path that are not UTF-8.
            document = _printable(json.loads(raw))
        except (ValueError, RecursionError):
            raise RecordError(f"is not valid JSON ({one_line(str(error))})", where=where) from None
    if not isinstance(document, dict):
        raise RecordError("is not a JSON object", where=where)
    return document


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a plain file; RecordError where it cannot be read as one."""
    return parse_object(read_plain(path), str(path))


def modified(path: Path) -> float:
    """When a file was last written to, in seconds of unix time; 0 where it cannot be asked."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def check_version(document: dict[str, Any], reads: int, where: str) -> None:
    """RecordError where a document has another schema version than this detrun reads."""
    version = document.get("schema_version")
    if type(version) is not int or version != reads:
        raise RecordError(
            f"has schema version {one_line(str(version), 40)}, this detrun reads {reads}",
            where=where,
            hint="a detrun of the version that wrote it reads it",
        )


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that a reader sees the old one or the whole new one; makes its folder where needed.

    The bytes reach the disk before the name does: a machine that dies must not leave an empty verdict.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                os.fchmod(file.fileno(), 0o644 & ~_umask())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ArchiveError(
            f"cannot be written: {error.strerror}",
            where=str(path),
            hint="is the disk full, or the archive read-only? --archive DIR names another one",
        ) from None


def read_moment(text: Any) -> datetime | None:
    """A time of ISO 8601 in UTC; one without a zone is taken to be in UTC. None for what is none."""
    if not isinstance(text, str):
        return None
    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
        return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).astimezone(timezone.utc)
    except (ValueError, OverflowError):
        return None


def one_line(text: str, limit: int = 160) -> str:
    """Foreign text as one printable line of at most `limit` characters; control characters are escaped."""
    cut = text if len(text) <= limit else f"{text[: limit - 1]}…"
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def printable(text: str) -> str:
    """Foreign text with its line ends and tabs, and every other control or formatting character escaped."""
    return _HIDDEN.sub(lambda found: found[0] if found[0].isprintable() else _escape(found[0]), text)


_HIDDEN = re.compile(r"[^\x20-\x7e\n\t]")


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def _printable(value: Any) -> Any:
    """The same JSON value with lone surrogates written as escapes, so that every later step can encode it."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list):
        return [_printable(item) for item in value]
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    return value


def _umask() -> int:
    current = os.umask(0o022)
    os.umask(current)
    return current
