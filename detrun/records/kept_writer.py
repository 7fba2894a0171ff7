"""Writes the tensors of single events, byte for byte: `kept/rank00000.jsonl` and `kept/rank00000.bytes`.

A line an event. `call` says how the operation was called: {"op": "aten.add.Tensor", "args": […], "kwargs": {…}} with a
tensor as {"tensor": n}, a list or a tuple as a list, None, a bool, an integer, a string and a finite float as
themselves (a float as the shortest text that is exactly it), another float as {"float": "nan"}, {"float": "inf"} or
{"float": "-inf"}, a complex number as {"complex": [re, im]}, {"dtype": "float32"}, {"device": "cpu"},
{"layout": "strided"}, {"memory_format": "preserve_format"}, {"generator": "cpu"}, and whatever else as {"repr": "…"}.

`tensors` lists the parts of the tensors, dense and in C order, with where they lie in the bytes (offset, nbytes) and
how the program had them (strides in elements; storage: tensors of one side with the same number shared memory, at
storage_offset elements; device). side "input": index is the n of {"tensor": n}; side "output": its place among what the
operation returned or wrote. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any


@dataclass(frozen=True)
class KeptPart:
    """A part of a tensor. side: "input" or "output". part: "" for the whole of a plain tensor. strides: in elements.
    raw: its elements in C order."""

    side: str
    index: int
    part: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: int
    storage_offset: int
    device: str
    raw: bytes


class KeptWriter:
    """Appends events as long as they fit into `budget` bytes. Its files are made with the first one. What it raises is
    OSError."""

    def __init__(self, attempt: Path, rank: int, budget: int) -> None:
        self._path = attempt / "kept" / f"rank{rank:05d}"
        self._budget = budget
        self._lines: IO[bytes] | None = None
        self._bytes: IO[bytes] | None = None
        self._offset = 0

    def fits(self, nbytes: int) -> bool:
        return self._offset + nbytes <= self._budget

    def write(self, line: dict[str, Any], parts: Sequence[KeptPart], generator: tuple[str, bytes] | None) -> None:
        """Append an event. generator: the kind and the state of the random number generator that it draws from."""
        lines, content = self._files()
        described = None
        if generator is not None:
            described = {"kind": generator[0], "offset": self._offset, "nbytes": len(generator[1])}
            self._put(content, generator[1])
        tensors = []
        for part in parts:
            entry = asdict(part)
            raw = entry.pop("raw")
            tensors.append({**entry, "offset": self._offset, "nbytes": len(raw)})
            self._put(content, raw)
        content.flush()
        document = {**line, "generator": described, "tensors": tensors}
        lines.write(json.dumps(document, separators=(",", ":")).encode() + b"\n")
        lines.flush()

    def close(self) -> None:
        for file in (self._lines, self._bytes):
            if file is not None:
                file.close()

    def _put(self, content: IO[bytes], raw: bytes) -> None:
        content.write(raw)
        self._offset += len(raw)

    def _files(self) -> tuple[IO[bytes], IO[bytes]]:
        if self._lines is None or self._bytes is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lines = self._path.with_suffix(".jsonl").open("wb")
            self._bytes = self._path.with_suffix(".bytes").open("wb")
        return self._lines, self._bytes
