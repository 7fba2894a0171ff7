"""One thing that a checkpoint holds: a tensor, or a plain value, under a dotted name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from detrun.checkpoints.sources import HeldSource, Source, blocks
from detrun.checkpoints.tensors import Data
from detrun.errors import RecordError
from detrun.fingerprint.byte_digest import digest_dense


class Chunk(Data, Protocol):
    """A part of a tensor that was saved by itself, as shards are: where it begins, its shape, and its content."""

    @property
    def offsets(self) -> tuple[int, ...]: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Bytes:
    """A run of bytes as content."""

    source: Source

    @property
    def nbytes(self) -> int:
        return self.source.length

    def blocks(self) -> Iterator[memoryview]:
        return blocks(self.source, 0, self.source.length)

    def stored(self) -> None:
        """It is no tensor."""

    @classmethod
    def held(cls, raw: bytes) -> Bytes:
        return cls(HeldSource(raw, "a value in a pickle"))


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A tensor, an array or bytes (`data`), a plain value (`value`), or what could not be read (`problem`).

    name: dotted, as the program nested it; the stem of its file comes first in a folder of several. dtype: torch's name
    without "torch."; for plain values int, float, bool, str, complex, none, list, dict, and object for one whose class
    is not known, with the class as its value. value: canonical text: `float.hex()`, else `repr`. chunks: of a tensor
    saved in parts.
    """

    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    value: str | None = None
    data: Data | None = None
    chunks: tuple[Chunk, ...] = ()
    problem: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its content; 0 for a plain value."""
        return self.data.nbytes if self.data is not None else 0

    def blocks(self) -> Iterator[memoryview]:
        """Its dense, row-major, little-endian bytes; each block is valid until the next. Raises RecordError."""
        if self.problem is not None or self.data is None:
            raise RecordError(self.problem or "has no content", where=self.name)
        return self.data.blocks()

    def read(self) -> bytes:
        """All of its bytes at once. Raises RecordError."""
        return b"".join(self.blocks())

    def digest(self) -> str | None:
        """The digest of its dtype, shape and bytes, as `fingerprint.host.digest_tensors` gives it for the same tensor;
        None for a plain value. Raises RecordError."""
        return None if self.value is not None else digest_dense(self.dtype, self.shape, self.blocks())

    def below(self, prefix: str) -> Entry:
        """The same entry with a name that begins with `prefix`."""
        return self if not prefix else replace(self, name=f"{prefix}.{self.name}" if self.name else prefix)
