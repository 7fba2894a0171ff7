"""TensorBoard's event files, by TensorBoard's own reader: scalars as float32, or as float64 where the program wrote
them so.

A killed program loses what its writer had not flushed yet, up to two minutes of steps, and may leave a record in part.
"""

from __future__ import annotations

import logging
import math
import struct
from typing import Any

from detrun.errors import RecordError
from detrun.records.sources.number import Number, exact, single
from detrun.records.sources.reading import Found, Part, Reading

_FLOAT, _DOUBLE = 1, 2  # tensorflow's DT_FLOAT and DT_DOUBLE
_FRAME = 16  # a record's length and the two checksums around it, in bytes


def read(part: Part, name: str, wanted: frozenset[str]) -> Found:
    """The readings of an event file; `line` is the number of the record. Raises RecordError where TensorBoard is not
    installed, or the file is none of its."""
    try:
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError:
        raise RecordError(
            "cannot be read: tensorboard is not installed here",
            where=str(part.path),
            hint="pip install 'detrun[tensorboard]'",
        ) from None
    found = Found()
    size, taken = part.path.stat().st_size, 0
    # Its reader says through a log that a file ends in the middle of a record; the sizes tell it too.
    logger = logging.getLogger("tensorboard")
    before, logger.disabled = logger.disabled, True
    try:
        for number, raw in enumerate(RawEventFileLoader(str(part.path)).Load(), 1):
            taken += len(raw) + _FRAME
            event = Event.FromString(raw)
            for value in event.summary.value:
                _take(found, value, int(event.step), number, name, wanted)
    except Exception as error:  # noqa: BLE001  (DataLossError, DecodeError: whatever its stub of tensorflow raises)
        found.note("invalid", f"cannot be read on behind byte {taken:,} ({type(error).__name__})", name)
        return found
    finally:
        logger.disabled = before
    if taken < size:
        if _is_whole(part, taken, size):
            found.note("invalid", f"is damaged at byte {taken:,}", name)
        else:
            found.note("torn", f"its last record is cut off (byte {taken:,} of {size:,})", name)
    return found


def _is_whole(part: Part, at: int, size: int) -> bool:
    """Whether all of the record at byte `at` is there by its own length, so that it is something else that is wrong."""
    with part.path.open("rb") as file:
        file.seek(at)
        head = file.read(8)
    return len(head) == 8 and at + _FRAME + int(struct.unpack("<Q", head)[0]) <= size


def _take(found: Found, value: Any, step: int, record: int, name: str, wanted: frozenset[str]) -> None:
    kind = value.WhichOneof("value")
    scalar = kind == "simple_value" or (kind == "tensor" and _is_scalar(value))
    if scalar:
        found.names.add(value.tag)
    if value.tag not in wanted:
        return
    number = single(value.simple_value) if kind == "simple_value" else _of_tensor(value.tensor) if scalar else None
    if number is None:
        found.note("invalid", f"record {record}: {value.tag} is no scalar", name, record, step)
    else:
        found.readings.append(Reading(value.tag, step, number, name, record, step))


def _is_scalar(value: Any) -> bool:
    return value.tensor.dtype in (_FLOAT, _DOUBLE) and math.prod(dim.size for dim in value.tensor.tensor_shape.dim) == 1


def _of_tensor(tensor: Any) -> Number | None:
    values = tensor.float_val if tensor.dtype == _FLOAT else tensor.double_val
    if len(values) == 1:
        number = float(values[0])
    else:
        code = "<f" if tensor.dtype == _FLOAT else "<d"
        if len(tensor.tensor_content) != struct.calcsize(code):
            return None
        number = struct.unpack(code, tensor.tensor_content)[0]
    return single(number) if tensor.dtype == _FLOAT else exact(number)
