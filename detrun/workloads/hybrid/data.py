"""Real text as bytes, and a loader whose every random choice and position can be saved.

Which stream decides what (each must be restored, or the first batch after a resume shows it):

    torch.Generator of the loader   order of documents, drawn once an epoch
    numpy Generator of the loader   where in a document a sample begins
    Python's `random`               whether a sample begins with its document's title
    NumPy's legacy `np.random`      which input bytes are corrupted
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import detrun
from detrun.workloads.hybrid.settings import SettingsError

END_OF_DOCUMENT = 256
CORRUPTED = 257
VOCABULARY = 272
"""256 bytes and two special ids, padded to a multiple of 16; ids from 258 on never occur in any data."""

TITLE_PROBABILITY = 0.25
CORRUPTION_PROBABILITY = 0.01
PIECE_BYTES = 4096

GLOBAL_STREAMS = ("python", "numpy")
"""The process's own streams that a loader draws from."""


class Document(NamedTuple):
    name: str
    text: bytes


def load_documents(path: Path | None) -> list[Document]:
    """Documents in a fixed order: the standard library's `pydoc_data` topics, or pieces of the file `path`.

    A file is cut at line ends into pieces of about 4 KiB, so that it can be shuffled like the topics.
    """
    if path is None:
        from pydoc_data.topics import topics

        return [Document(name, topics[name].encode()) for name in sorted(topics) if topics[name]]
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"--data {path}: {error.strerror}") from error
    documents: list[Document] = []
    start = 0
    while start < len(content):
        line_end = content.find(b"\n", start + PIECE_BYTES)
        end = len(content) if line_end < 0 else line_end + 1
        documents.append(Document(f"{path.name}#{len(documents):05d}", content[start:end]))
        start = end
    if not documents:
        raise SettingsError(f"--data {path}: the file is empty")
    return documents


class ByteLoader:
    """Endless batches of one rank's documents: every `world_size`-th of an order that all ranks share.

    An iterator: `next(loader)` is int64 [batch_size, sequence_length + 2] on the CPU. With `prefetch` it keeps so many
    batches ready beside the one it hands out; its saved position counts those handed out, never those read ahead.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        *,
        batch_size: int,
        sequence_length: int,
        seed: int,
        rank: int,
        world_size: int,
        prefetch: int = 0,
    ) -> None:
        if len(documents) < world_size:
            raise SettingsError(f"the data has {len(documents)} documents, fewer than the {world_size} ranks")
        self.documents = list(documents)
        self.batch_size = batch_size
        self.tokens_per_sample = sequence_length + 2
        self.rank = rank
        self.world_size = world_size
        self.prefetch = prefetch
        self.order_generator = torch.Generator().manual_seed(seed)  # the same on every rank
        self.crop_generator = np.random.Generator(np.random.PCG64([seed, rank]))
        self.epoch = 0
        self.cursor = 0
        self.samples = 0
        self.order = self._draw_order()
        self.ahead: deque[tuple[dict[str, Tensor], Tensor]] = deque()  # (state before it was read, batch), oldest first

    def __iter__(self) -> ByteLoader:
        return self

    def __next__(self) -> Tensor:
        if not self.prefetch:
            return self._read()
        self._read_ahead(self.prefetch + 1)
        return self.ahead.popleft()[1]

    def state_dict(self) -> dict[str, Tensor]:
        """Position and generators from which the next batch is read, as tensors of fixed shape."""
        return self.ahead[0][0] if self.ahead else self._state()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from `state`. With `prefetch` that reads ahead, and so moves Python's and NumPy's streams."""
        self._rewind(state)
        self._read_ahead(self.prefetch)

    def reorder(self, names: Sequence[str]) -> None:
        """From the next batch on, go through the documents in this order, from its start."""
        self._rewind(self.state_dict())
        index = {document.name: position for position, document in enumerate(self.documents)}
        self.order = np.array([index[name] for name in names], dtype=np.int64)
        self.cursor = self.rank

    def _state(self) -> dict[str, Tensor]:
        return {
            "position": torch.tensor([self.epoch, self.cursor, self.samples]),
            "order": torch.from_numpy(self.order.copy()),
            **detrun.rng_state(include=self._streams, **self._generators),
        }

    def _rewind(self, state: dict[str, Tensor]) -> None:
        self.epoch, self.cursor, self.samples = state["position"].tolist()
        self.order = state["order"].numpy().copy()
        streams = {name: state[name] for name in (*self._streams, *self._generators)}
        detrun.set_rng_state(streams, include=self._streams, **self._generators)
        self.ahead.clear()

    @property
    def _streams(self) -> tuple[str, ...]:
        """What is read ahead has drawn from the process's own streams already, so they are part of the position."""
        return GLOBAL_STREAMS if self.prefetch else ()

    @property
    def _generators(self) -> dict[str, object]:
        return {"order_generator": self.order_generator, "crop_generator": self.crop_generator}

    def _read_ahead(self, batches: int) -> None:
        while len(self.ahead) < batches:
            self.ahead.append((self._state(), self._read()))

    def _read(self) -> Tensor:
        batch = torch.from_numpy(np.stack([self._sample() for _ in range(self.batch_size)]))
        self.samples += self.batch_size
        return batch

    def _draw_order(self) -> npt.NDArray[np.int64]:
        self.cursor = self.rank
        return torch.randperm(len(self.documents), generator=self.order_generator).numpy()

    def _next_document(self) -> Document:
        if self.cursor >= len(self.order):
            self.epoch += 1
            self.order = self._draw_order()
        document = self.documents[int(self.order[self.cursor])]
        self.cursor += self.world_size
        return document

    def _sample(self) -> npt.NDArray[np.int64]:
        document = self._next_document()
        start = int(self.crop_generator.integers(len(document.text)))
        title = f"{document.name}\n".encode() if random.random() < TITLE_PROBABILITY else b""
        tokens = list(title + document.text[start : start + self.tokens_per_sample])
        while len(tokens) < self.tokens_per_sample:
            tokens.append(END_OF_DOCUMENT)
            tokens.extend(self._next_document().text[: self.tokens_per_sample])
        sample = np.array(tokens[: self.tokens_per_sample], dtype=np.int64)
        # The legacy global stream on purpose: much real augmentation code still draws from it.
        sample[np.random.random_sample(len(sample)) < CORRUPTION_PROBABILITY] = CORRUPTED
        return sample
