"""Digests of byte strings: xxh3-128, or BLAKE2b where xxhash is not installed. Does not import torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

_new_state: Callable[[], Any]
try:
    import xxhash
except ImportError:
    ALGORITHM, _new_state = "blake2b", partial(hashlib.blake2b, digest_size=16)
else:
    ALGORITHM, _new_state = "xxh3", xxhash.xxh3_128


class ByteHasher:
    """A running 128-bit digest. What is fed is framed, so that (ab, c) and (a, bc) differ."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state: Any = _new_state()

    def feed_bytes(self, raw: bytes | bytearray | memoryview) -> None:
        """Add a byte string, or a contiguous view of bytes."""
        self._state.update(b"%d:" % len(raw))
        self._state.update(raw)

    def feed_text(self, text: str) -> None:
        self.feed_bytes(text.encode("utf-8", "surrogatepass"))

    def raw(self) -> bytes:
        """The 16 bytes of the digest so far."""
        result: bytes = self._state.digest()
        return result

    def text(self) -> str:
        """The digest so far, with its algorithm in front: `xxh3:` and 32 hex digits."""
        return f"{ALGORITHM}:{self._state.hexdigest()}"


def digest_bytes(raw: bytes | bytearray | memoryview) -> str:
    """The digest of one byte string, with its algorithm in front."""
    hasher = ByteHasher()
    hasher.feed_bytes(raw)
    return hasher.text()


def digest_parts(*pieces: bytes | bytearray | memoryview) -> str:
    """The digest of byte strings one behind the other, without anything between them: that of a tensor is the one of
    its description and of its memory."""
    state = _new_state()
    for piece in pieces:
        state.update(piece)
    return f"{ALGORITHM}:{state.hexdigest()}"


def digest_dense(dtype: str, shape: Sequence[int], blocks: Iterable[bytes | bytearray | memoryview]) -> str:
    """The digest of a tensor whose memory is given in pieces: dense, row-major, little-endian bytes.

    The same text as `host.digest_tensors` gives for one plain tensor of that dtype (torch's name without "torch.") and
    shape, so that what lies in a file can be held against what was live. An empty piece changes nothing.
    """
    state = _new_state()
    state.update(f"|{dtype}|{','.join(map(str, shape))};".encode())
    for block in blocks:
        state.update(block)
    return f"{ALGORITHM}:{state.hexdigest()}"
