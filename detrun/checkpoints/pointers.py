"""Files that say which checkpoint is the newest, beside the checkpoints: `latest` and its like."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detrun.checkpoints.sources import Files, read
from detrun.errors import RecordError

TRACKER = "latest_checkpointed_iteration.txt"
_NAMES = (TRACKER, "latest", "latest.txt", "latest.json", "latest_checkpoint", "last")
_LONG = 4096


@dataclass(frozen=True)
class Pointer:
    """A pointer file or link. target: the checkpoint's name or path as it is written there. step: the last number of
    it, None if it holds none."""

    name: str
    target: str
    step: int | None


def pointers(directory: Path) -> list[Pointer]:
    """Every pointer that lies in a directory and can be read."""
    return [pointer for pointer in (read_pointer(directory, name) for name in _NAMES) if pointer is not None]


def read_pointer(directory: Path, name: str) -> Pointer | None:
    """The pointer of this name in a directory, None where it is not there or names nothing that can be read."""
    path = directory / name
    target = _link(path) if path.is_symlink() else _text(path)
    if not target:
        return None
    numbers = re.findall(r"\d+", Path(target).name)
    return Pointer(name, target, int(numbers[-1]) if numbers and len(numbers[-1]) < 19 else None)


def _link(path: Path) -> str | None:
    try:
        return str(path.readlink())
    except OSError:
        return None


def _text(path: Path) -> str | None:
    files = Files()
    try:
        source = files.whole(path)
        if source.length > _LONG:
            return None
        text = read(source, 0, source.length).decode().strip()
    except (RecordError, UnicodeDecodeError):
        return None
    finally:
        files.close()
    if path.suffix == ".json":
        return _named(text)
    return text if text and "\n" not in text else None


def _named(text: str) -> str | None:
    """The checkpoint that a small JSON document names: the document itself, or its first telling value."""
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(document, dict):
        told = [key for key in document if re.search(r"path|checkpoint|latest|name|step|iteration", key, re.IGNORECASE)]
        document = next((document[key] for key in told if isinstance(document[key], (str, int))), None)
    return str(document) if isinstance(document, (str, int)) and not isinstance(document, bool) else None
