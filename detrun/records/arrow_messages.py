"""The messages of an Arrow IPC stream: where each lies in its file, so that single batches can be read and no count in
a hostile file is believed before it was held against the bytes that are there.

pyarrow reads a stream from its beginning only, and allocates what a message asks for. Here the frames are walked over
(format: https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc), and the
messages that a wanted batch needs are handed to pyarrow as a stream of their own.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow
import pyarrow.ipc

from detrun.errors import RecordError

MAX_METADATA = 1 << 20
MAX_DICTIONARIES = 256

_CONTINUATION = b"\xff\xff\xff\xff"
END_MARK = _CONTINUATION + bytes(4)
_FIRST_READ = 4096
_KINDS: dict[int, Literal["schema", "dictionary", "batch"]] = {1: "schema", 2: "dictionary", 3: "batch"}


@dataclass(frozen=True, slots=True)
class Message:
    """One message: its bytes in the file, frame included, and what its header says.

    rows: entries of a dictionary or rows of a batch. dictionary: its id; delta: it continues `previous`.
    buffers: (offset, length) of each buffer within the body; compressed: each begins with its own size.
    """

    kind: Literal["schema", "dictionary", "batch"]
    start: int
    body: int
    end: int
    rows: int = 0
    dictionary: int = -1
    delta: bool = False
    previous: Message | None = None
    buffers: tuple[tuple[int, int], ...] = ()
    compressed: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """A record batch, with the last message of each dictionary that it may refer to."""

    message: Message
    dictionaries: tuple[Message, ...]


class StreamIndex:
    """The batches of a stream in an open file, found as they are asked for.

    torn: what is wrong with the end of the stream, None if it has its end mark; known once all batches were looked for.
    """

    def __init__(self, descriptor: int, where: str) -> None:
        """Raises RecordError where the file does not begin as a stream does."""
        self._descriptor = descriptor
        self._where = where
        self._size = os.fstat(descriptor).st_size
        self._batches: list[Batch] = []
        self._dictionaries: dict[int, Message] = {}
        self.torn: str | None = None
        first = self._read(0)
        if first is None or first.kind != "schema":
            raise RecordError("is no Arrow stream" if self._size else "is empty", where=where)
        self._schema = first
        self._position = first.end
        self._done = False

    @property
    def has_end_mark(self) -> bool:
        """Whether the file's last bytes are a stream's end mark; reads nothing else."""
        return os.pread(self._descriptor, 8, max(0, self._size - 8)) == END_MARK

    def schema(self) -> Any:
        """The stream's pyarrow.Schema."""
        return self._decode(b"").schema

    def batch(self, number: int) -> Batch | None:
        """The batch of that number, from 0; None where the stream ends before it."""
        while len(self._batches) <= number and not self._done:
            self._advance()
        return self._batches[number] if 0 <= number < len(self._batches) else None

    def count(self) -> int:
        """How many batches there are."""
        while not self._done:
            self._advance()
        return len(self._batches)

    def needed(self, first: int, last: int) -> list[Message]:
        """The messages that the batches of these numbers need, in the order of the file. RecordError where a batch is
        missing."""
        wanted: dict[int, Message] = {}
        for number in range(first, last + 1):
            batch = self.batch(number)
            if batch is None:
                raise RecordError(
                    f"ends after batch {len(self._batches) - 1} of those that its index names up to {last}",
                    where=self._where,
                )
            wanted[batch.message.start] = batch.message
            for message in batch.dictionaries:
                link: Message | None = message
                while link is not None and link.start not in wanted:
                    wanted[link.start] = link
                    link = link.previous
        return [wanted[start] for start in sorted(wanted)]

    def read(self, messages: list[Message], most: int) -> Iterator[Any]:
        """The record batches among `messages`, as pyarrow has them, checked to be consistent in themselves.

        most: bytes that all messages together may take when they are decompressed. Raises RecordError.
        """
        parts: list[bytes] = []
        total = 0
        for message in messages:
            raw = self.raw(message)
            total += _expanded(message, raw)
            if total > most:
                raise RecordError(f"is too large: {total:,} bytes in one step, {most:,} at most", where=self._where)
            parts.append(raw)
        try:
            for batch in self._decode(b"".join(parts)):
                batch.validate()
                yield batch
        except (pyarrow.ArrowException, ValueError, TypeError, OSError, MemoryError, OverflowError) as error:
            words = " ".join(str(error).split())[:100]
            raise RecordError(f"cannot be read as Arrow ({words})", where=self._where) from None

    def raw(self, message: Message) -> bytes:
        """The bytes of a message."""
        return os.pread(self._descriptor, message.end - message.start, message.start)

    def _decode(self, messages: bytes) -> Any:
        whole = self.raw(self._schema) + messages + END_MARK
        try:
            return pyarrow.ipc.open_stream(pyarrow.py_buffer(whole), options=_options())
        except (pyarrow.ArrowException, ValueError, OSError) as error:
            words = " ".join(str(error).split())[:100]
            raise RecordError(f"cannot be read as Arrow ({words})", where=self._where) from None

    def _advance(self) -> None:
        message = self._read(self._position)
        if message is None:
            self._done = True
            return
        self._position = message.end
        if message.kind == "dictionary":
            if message.dictionary not in self._dictionaries and len(self._dictionaries) >= MAX_DICTIONARIES:
                raise RecordError(f"has more than {MAX_DICTIONARIES} dictionaries", where=self._where)
            self._dictionaries[message.dictionary] = message
        elif message.kind == "batch":
            self._batches.append(Batch(message, tuple(self._dictionaries.values())))
        else:
            raise RecordError("has two schemas", where=self._where)

    def _read(self, position: int) -> Message | None:
        """The message that begins there; None at the end of the stream, which may be a torn one."""
        if position >= self._size:
            self.torn = "has no end mark"
            return None
        head = os.pread(self._descriptor, _FIRST_READ, position)
        if len(head) < 8:
            self.torn = "is cut off within a message"
            return None
        if head[:4] != _CONTINUATION:
            raise RecordError(f"is no Arrow stream from byte {position:,} on", where=self._where)
        length = int.from_bytes(head[4:8], "little", signed=True)
        if length == 0:
            if position + 8 != self._size:
                raise RecordError(f"goes on after its end mark at byte {position:,}", where=self._where)
            return None
        if length < 0 or length > MAX_METADATA:
            raise RecordError(f"has a header of {length:,} bytes at byte {position:,}", where=self._where)
        if len(head) < 8 + length:
            head = os.pread(self._descriptor, 8 + length, position)
        if len(head) < 8 + length:
            self.torn = "is cut off within a message"
            return None
        try:
            message = self._parse(head[8 : 8 + length], position, position + 8 + length)
        except (struct.error, ValueError, IndexError):
            raise RecordError(f"has a message without sense at byte {position:,}", where=self._where) from None
        if message.end > self._size:
            self.torn = "is cut off within a message"
            return None
        return message

    def _parse(self, metadata: bytes, start: int, body: int) -> Message:
        table = _Table.root(metadata)
        kind = _KINDS.get(table.number(1, "<B"))
        length = table.number(3, "<q")
        if kind is None or length < 0:
            raise ValueError
        end = body + length
        if kind == "schema":
            return Message(kind, start, body, end)
        header = table.table(2)
        if kind == "batch":
            return Message(kind, start, body, end, **_contents(header, length))
        number, delta = header.number(0, "<q"), bool(header.number(2, "<B"))
        before = self._dictionaries.get(number)
        if delta and before is None:
            raise ValueError
        return Message(
            kind,
            start,
            body,
            end,
            dictionary=number,
            delta=delta,
            previous=before if delta else None,
            **_contents(header.table(1), length),
        )


def _contents(table: _Table, length: int) -> dict[str, Any]:
    """What the header of a batch says of its rows and buffers."""
    rows = table.number(0, "<q")
    buffers = tuple(table.structs(2, "<qq"))
    if rows < 0 or any(offset < 0 or size < 0 or offset + size > length for offset, size in buffers):
        raise ValueError
    return {"rows": rows, "buffers": buffers, "compressed": table.has(3)}


def _expanded(message: Message, raw: bytes) -> int:
    """Bytes that a message takes when it is decompressed, by its own word; a decompressor writes no more than that."""
    if not message.compressed:
        return message.end - message.body
    total, body = 0, message.body - message.start
    for offset, size in message.buffers:
        if size >= 8:
            told = int.from_bytes(raw[body + offset : body + offset + 8], "little", signed=True)
            total += size if told < 0 else told
    return total


def _options() -> Any:
    # Ranks are shared out to processes; threads within one would only wait for each other.
    return pyarrow.ipc.IpcReadOptions(use_threads=False)


class _Table:
    """A table of a flatbuffer; every access is held against the buffer's end (struct.error, ValueError)."""

    def __init__(self, raw: bytes, at: int) -> None:
        self._raw = raw
        self._at = at
        self._vtable = at - _unpack("<i", raw, at)
        self._slots = (_unpack("<H", raw, self._vtable) - 4) // 2

    @staticmethod
    def root(raw: bytes) -> _Table:
        return _Table(raw, _unpack("<I", raw, 0))

    def _field(self, slot: int) -> int:
        """Where a field lies, 0 if it is absent."""
        if slot >= self._slots:
            return 0
        offset = _unpack("<H", self._raw, self._vtable + 4 + 2 * slot)
        return self._at + offset if offset else 0

    def has(self, slot: int) -> bool:
        return self._field(slot) != 0

    def number(self, slot: int, form: str) -> int:
        at = self._field(slot)
        return _unpack(form, self._raw, at) if at else 0

    def table(self, slot: int) -> _Table:
        at = self._field(slot)
        if not at:
            raise ValueError
        return _Table(self._raw, at + _unpack("<I", self._raw, at))

    def structs(self, slot: int, form: str) -> Iterator[tuple[Any, ...]]:
        """The entries of a vector of structs."""
        at = self._field(slot)
        if not at:
            return iter(())
        at += _unpack("<I", self._raw, at)
        count = _unpack("<I", self._raw, at)
        end = at + 4 + count * struct.calcsize(form)
        if at < 0 or end > len(self._raw):
            raise ValueError
        return struct.iter_unpack(form, self._raw[at + 4 : end])


def _unpack(form: str, raw: bytes, at: int) -> int:
    if at < 0:
        raise ValueError
    value: int = struct.unpack_from(form, raw, at)[0]
    return value
