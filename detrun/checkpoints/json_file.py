"""JSON documents among a checkpoint's files: counters, positions and settings as plain values.

A document with very many values (the vocabulary of a tokenizer) is no state of a training, and stays a run of bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from detrun.checkpoints.entry import Entry
from detrun.checkpoints.flatten import flatten
from detrun.checkpoints.sources import Source, read
from detrun.errors import RecordError

_MOST_BYTES = 16 << 20
_MOST_VALUES = 20_000


def json_problem(source: Source) -> str:
    """Why a document cannot be read, "" if it can."""
    try:
        _document(source)
    except RecordError as error:
        return error.what
    return ""


def is_state(source: Source) -> bool:
    """Whether it is a document that is read value by value."""
    if source.length > _MOST_BYTES:
        return False
    try:
        document = _document(source)
    except RecordError:
        return False
    return isinstance(document, (dict, list)) and bool(document) and _values(document) <= _MOST_VALUES


def json_entries(source: Source) -> Iterator[Entry]:
    """The entries of a document. Raises RecordError where it is none."""
    return flatten(_document(source), source.where)


def _document(source: Source) -> Any:
    try:
        return json.loads(read(source, 0, source.length).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        what = "is empty" if not source.length else f"is cut short or damaged: {error}"
        raise RecordError(what, where=source.where) from None


def _values(document: Any) -> int:
    count, waiting = 0, [document]
    while waiting and count <= _MOST_VALUES:
        each = waiting.pop()
        below = each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        waiting.extend(below)
        count += not isinstance(each, (dict, list))
    return count
