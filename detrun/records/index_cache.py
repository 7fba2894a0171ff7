"""The index's cache: what was read of each verdict before. What is torn, foreign or of another version counts not."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from detrun.errors import ArchiveError, RecordError
from detrun.records.files import read_plain, write_atomically
from detrun.records.index_entry import STATES, Entry

CACHE = ".index-v1.jsonl"
"""A line with the digest of the next, which holds everything."""


MAX_CACHE_BYTES = 1 << 30
_RACY = 2_000_000_000
"""Nanoseconds: no file system that clusters have tells times apart more coarsely than a second."""

Source = tuple[str, int, int]
"""The file that an entry comes from, when it was written (ns), and its bytes."""


@dataclass(slots=True)
class _Row:
    source: Source
    age: tuple[str, int]
    entry: Entry


class IndexCache:
    """What was read before. Environments, which most nights share, are held once each."""

    def __init__(self) -> None:
        self.rows: dict[str, _Row] = {}
        self.written = 0
        self.changed = False

    @classmethod
    def read(cls, root: Path) -> IndexCache:
        """The cache of an archive; an empty one where it cannot be read, or is not to be relied on."""
        cache = cls()
        path = root / CACHE
        try:
            found = os.lstat(path)
            # Whoever may write verdicts may as well write this; nobody else is believed.
            trusted = found.st_uid in (os.geteuid(), os.lstat(root).st_uid) and not found.st_mode & stat.S_IWOTH
            if not stat.S_ISREG(found.st_mode) or not trusted:
                return cache
            head, _, body = read_plain(path, MAX_CACHE_BYTES).partition(b"\n")
            if from_json(head) != {"digest": _digest(body)}:
                return cache
            cache.rows = _rows(from_json(body))
            cache.written = found.st_mtime_ns
        except (OSError, RecordError, ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError):
            cache.rows = {}
        return cache

    def holds(self, source: Source) -> bool:
        """Whether a file of that time can have been written again since without showing it."""
        return source[1] + _RACY < self.written

    def put(self, name: str, source: Source | None, age: tuple[str, int], entry: Entry) -> None:
        """Notes what was read. `source` was asked before the reading: a file that changes meanwhile is read anew."""
        if source is None:
            self.changed |= self.rows.pop(name, None) is not None
            return
        self.rows[name] = _Row(source, age, entry)
        self.changed = True

    def write(self, root: Path, there: set[str]) -> None:
        """Writes it by rename where something has changed and the archive can be written."""
        gone = [name for name in self.rows if name not in there]
        for name in gone:
            del self.rows[name]
        if not (self.changed or gone) or not root.is_dir():
            return
        try:
            body = json.dumps(_document(self.rows), separators=(",", ":")).encode()
            write_atomically(root / CACHE, json.dumps({"digest": _digest(body)}).encode() + b"\n" + body)
        except (ArchiveError, UnicodeEncodeError):
            return


def _digest(body: bytes) -> str:
    """Against a disk's accidents; whoever may write the cache may write verdicts too."""
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def _document(rows: Mapping[str, _Row]) -> dict[str, Any]:
    shared: list[Any] = []
    place_of: dict[Any, int] = {}

    def place(value: Any) -> int | None:
        if value is None:
            return None
        text: Any
        try:
            text = frozenset(value.items())  # the quick way; most nights have the same
        except (TypeError, AttributeError):
            text = json.dumps(value, sort_keys=True)
        if text not in place_of:
            place_of[text] = len(shared)
            shared.append(value)
        return place_of[text]

    listed = []
    for name, row in rows.items():
        entry, environment = row.entry, row.entry.environment
        packages = None
        if environment is not None:
            packages = place(environment.get("packages"))
            environment = {key: value for key, value in environment.items() if key != "packages"}
        listed.append(
            [
                *(name, list(row.source), list(row.age), entry.experiment, entry.recipe, entry.verdict),
                *(entry.exit_code, entry.created.isoformat(), entry.night, entry.step, entry.culprit, entry.what),
                *(
                    place(environment),
                    packages,
                    entry.state,
                    entry.pairs,
                    entry.baseline,
                    entry.candidate,
                    entry.boundary,
                ),
                dict(entry.labels),
            ]
        )
    return {"version": 1, "shared": shared, "rows": listed}


def _rows(document: Any) -> dict[str, _Row]:
    """The rows of a cache; raises for whatever is not as `_document` writes it."""
    if document["version"] != 1:
        raise ValueError
    shared = document["shared"]
    made: dict[tuple[int, int | None], dict[str, Any]] = {}

    def environment(base: int | None, packages: int | None) -> dict[str, Any] | None:
        if base is None:
            return None
        if (base, packages) not in made:
            value = dict(shared[base])
            if packages is not None:
                value["packages"] = shared[packages]
            made[base, packages] = value
        return made[base, packages]

    rows = {}
    for row in document["rows"]:
        name, source, age, kind, recipe, verdict, code, created, night, step, culprit, what = row[:12]
        base, packages, state, pairs, baseline, candidate, boundary, labels = row[12:]
        texts = (name, kind, recipe, night, what, source[0], age[0])
        numbers = (source[1], source[2], age[1])
        if not all(type(text) is str for text in texts) or not all(type(number) is int for number in numbers):
            raise ValueError
        if verdict not in ("identical", "diverged", "not-verified", None) or state not in STATES:
            raise ValueError
        if not (type(code) in (int, type(None)) and type(step) in (int, type(None))):
            raise ValueError
        if type(labels) is not dict or type(culprit) not in (dict, type(None)):
            raise ValueError
        moment = datetime.fromisoformat(created)
        if moment.tzinfo is None:
            raise ValueError
        entry = Entry(
            *(name, kind, recipe, verdict, code, moment, night, step, culprit, what, environment(base, packages)),
            *(state, (int(pairs[0]), int(pairs[1])) if pairs else None, baseline, candidate, boundary, labels),
        )
        rows[name] = _Row((source[0], source[1], source[2]), (age[0], age[1]), entry)
    return rows
