"""The files of the program that a command starts, by digest: whether it is still the same one that ran before."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

MAX_FILES = 2000
MAX_BYTES = 64 << 20
"""A larger file is known by its size and its time of change."""

_SKIPPED = {"__pycache__", "node_modules", "site-packages"}


def program_digest(argv: Sequence[str], workdir: Path) -> dict[str, str]:
    """Path to digest, for every file that the command names, the Python files below a script's folder, and those of a
    module after `-m` that lies in the working folder. Empty where the program is none of these, such as an installed
    one."""
    found: dict[str, str] = {}
    for path in _named(argv, workdir):
        for file in _with_what_it_imports(path):
            found.setdefault(str(file), _digest(file))
            if len(found) >= MAX_FILES:
                return found
    return found


def _named(argv: Sequence[str], workdir: Path) -> Iterator[Path]:
    for before, text in zip(("", *argv), argv, strict=False):
        if before == "-m":
            place = workdir / text.replace(".", os.sep)
            yield from (path for path in (place, place.with_suffix(".py")) if path.exists())
        elif text and "\0" not in text and len(text) < 4096:
            path = workdir / text
            if os.sep in text or path.suffix:
                yield from (path for path in (path,) if path.is_file())


def _with_what_it_imports(path: Path) -> Iterator[Path]:
    """The file itself and, of a script, what it can import from beside it."""
    if path.is_file():
        yield path
        if path.suffix != ".py":
            return
        path = path.parent
    for root, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _SKIPPED)
        yield from (Path(root) / name for name in sorted(names) if name.endswith(".py"))


def _digest(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            return f"{size} bytes of {path.stat().st_mtime_ns}"
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return "unreadable"
