"""Weights & Biases' offline files (`offline-run-*/run-*.wandb`): records in wandb's own message format.

wandb had a reader of them in Python until its core became a binary (gone in 0.31); its frame is that of LevelDB's logs
and read here, the messages are taken apart by wandb's own definitions. Numbers are JSON text in them: decimals.
"""

from __future__ import annotations

import importlib
import json
import struct
import zlib
from collections.abc import Iterator
from typing import Any

from detrun.errors import RecordError
from detrun.records.files import one_line, read_plain
from detrun.records.sources.jsonl import number_of
from detrun.records.sources.number import parse_number
from detrun.records.sources.reading import Found, Part, Reading
from detrun.records.sources.text import MAX_FILE_BYTES, as_step

_MAGIC = b":W&B"
_BLOCK = 32 * 1024
_HEADER = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


class _Broken(Exception):  # noqa: N818  (never leaves this module)
    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind


def read(part: Part, name: str, step_key: str, wanted: frozenset[str]) -> Found:
    """The readings of a file; `line` is the number of the record. Raises RecordError where wandb is not installed, or
    the file is none of its."""
    try:
        messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    except ImportError:
        raise RecordError(
            "cannot be read: wandb is not installed here", where=str(part.path), hint="pip install 'detrun[wandb]'"
        ) from None
    raw = read_plain(part.path, MAX_FILE_BYTES)
    if raw[:4] != _MAGIC:
        raise RecordError("is no offline file of wandb", where=str(part.path))
    found = Found()
    try:
        for number, body in enumerate(_records(raw), 1):
            record = messages.Record()
            record.ParseFromString(body)
            if record.WhichOneof("record_type") == "history":
                _take(found, record.history, number, name, step_key, wanted)
    except _Broken as broken:
        found.note(broken.kind, str(broken), name)
    except Exception as error:  # noqa: BLE001  (whatever protobuf raises for a message of another kind)
        found.note("invalid", f"holds a record that is none of wandb's ({type(error).__name__})", name)
    return found


def _records(raw: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log whose first block has a header of seven bytes."""
    at, parts = 7, b""
    while at < len(raw):
        room = _BLOCK - at % _BLOCK
        if room < _HEADER.size:  # what is left of a block is padding
            at += room
            continue
        if at + _HEADER.size > len(raw):
            raise _Broken("torn", f"its last record is cut off (byte {at:,} of {len(raw):,})")
        checksum, length, kind = _HEADER.unpack_from(raw, at)
        body = raw[at + _HEADER.size : at + _HEADER.size + length]
        if checksum == length == kind == 0:
            raise _Broken("torn", f"holds nothing behind byte {at:,} of {len(raw):,}")
        if len(body) < length:
            raise _Broken("torn", f"its last record is cut off (byte {at:,} of {len(raw):,})")
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or zlib.crc32(bytes([kind]) + body) != checksum:
            raise _Broken("invalid", f"is damaged at byte {at:,}")
        parts = body if kind in (_FULL, _FIRST) else parts + body
        at += _HEADER.size + length
        if kind in (_FULL, _LAST):
            yield parts
    if at > len(raw):
        raise _Broken("torn", f"its last record is cut off (byte {len(raw):,})")


def _take(found: Found, history: Any, record: int, name: str, step_key: str, wanted: frozenset[str]) -> None:
    entry = {item.key or ".".join(item.nested_key): item.value_json for item in history.item}
    found.names |= {key for key, text in entry.items() if not key.startswith("_") and parse_number(text)}
    here = {metric: entry[metric] for metric in wanted if metric in entry}
    if not here:
        return
    step = as_step(entry.get(step_key))
    if step is None and step_key == "step":  # its own count, which `wandb.log(…, step=…)` sets
        step = int(history.step.num) if history.HasField("step") else as_step(entry.get("_step"))
    if step is None:
        found.note("invalid", f"record {record} has no step ({one_line(step_key, 40)})", name, record)
        return
    for metric, text in here.items():
        number = parse_number(text)
        if number is None:
            try:
                number = number_of(json.loads(text))
            except (ValueError, RecursionError):
                number = None
        if number is None:
            what = f"record {record}: {one_line(metric, 60)} is no number ({one_line(text, 40)})"
            found.note("invalid", what, name, record, step)
        else:
            found.readings.append(Reading(metric, step, number, name, record, step))
