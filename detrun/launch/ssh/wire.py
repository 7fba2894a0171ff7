"""Messages between the two ends: a line of JSON, and behind it as many bytes as its `bytes` says.

Standard library only. Before the first message the far end says who it is (`greeting`), since a login shell may print
whatever it likes before.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from detrun.errors import ClusterError

MAGIC = "detrun-far-end"
PROTOCOL = 1
CHUNK = 256 * 1024
MAX_LINE = 64 * 1024 * 1024
"""A list of the most files that are uploaded has some MB."""
BEAT = 10.0
"""Seconds between two signs of life of an end that has nothing to say."""


class EndedError(ClusterError):
    """The other end has closed its output."""


class Wire:
    """One end of a conversation over two byte streams."""

    def __init__(
        self, receive: Callable[[int], bytes], send: Callable[[bytes], None], max_line: int = MAX_LINE
    ) -> None:
        self._receive, self._send, self._max_line = receive, send, max_line
        self._buffer = bytearray()

    def write(self, message: dict[str, Any], data: bytes = b"") -> None:
        """One message, in one piece."""
        if data:
            message = {**message, "bytes": len(data)}
        self._send(json.dumps(message).encode() + b"\n" + data)

    def read(self) -> tuple[dict[str, Any], bytes]:
        """The next message and its bytes; EndedError where there is none, ClusterError where it is none of ours."""
        line = self.read_line(self._max_line)
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise ClusterError("the other end did not answer in detrun's protocol")
        size = message.get("bytes", 0)
        if type(size) is not int or not 0 <= size <= CHUNK:
            raise ClusterError("the other end announced an impossible amount of bytes")
        return message, self._take(size)

    def read_line(self, limit: int) -> bytes:
        """Up to the next line end, without it."""
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if searched > limit:
                raise ClusterError("the other end sent a line that is too long")
            self._fill()
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._fill()
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    def _fill(self) -> None:
        data = self._receive(CHUNK)
        if not data:
            raise EndedError("the other end has closed the connection")
        self._buffer += data


class Beat:
    """Signs of life while an end is at work and has nothing to say."""

    def __init__(self, wire: Wire) -> None:
        self._wire, self._last = wire, time.monotonic()

    def if_due(self, spoke: bool = False) -> None:
        """Gives one if the last, or the last word (`spoke`), was BEAT seconds ago."""
        now = time.monotonic()
        if not spoke and now - self._last > BEAT:
            self._wire.write({"beat": True})
            spoke = True
        if spoke:
            self._last = now


def greeting(version: str) -> bytes:
    """What the far end says first, on a line of its own whatever stands before it."""
    return f"\n{MAGIC} {PROTOCOL} {version}\n".encode()


def read_greeting(wire: Wire, limit: int = 64 * 1024) -> tuple[str | None, str]:
    """The other end's version (None where it speaks another protocol) and what was printed before it.

    EndedError where no greeting comes.
    """
    noise: list[str] = []
    seen = 0
    while True:
        try:
            line = wire.read_line(limit).decode("utf-8", "replace")
        except EndedError:
            raise EndedError("\n".join(noise).strip()) from None
        name, _, rest = line.strip().partition(" ")
        if name == MAGIC:
            protocol, _, version = rest.partition(" ")
            return (version if protocol == str(PROTOCOL) else None), "\n".join(noise)
        noise.append(line)
        seen += len(line) + 1
        if seen > limit:
            raise ClusterError("the login shell prints without end before it starts anything")
