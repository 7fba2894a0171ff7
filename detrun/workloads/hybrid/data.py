"""Real text as bytes, and a loader whose every random choice and position can be saved.

Which stream decides what (each must be restored, or the first batch after a resume shows it):

    torch.Generator of the loader   order of documents, drawn once an epoch
    numpy Generator of the loader   where in a document a sample begins
    Python's `random`               whether a sample begins with its document's title
    NumPy's legacy `np.random`      which input bytes are corrupted
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from detrun.workloads.hybrid import rng
from detrun.workloads.hybrid.settings import SettingsError

END_OF_DOCUMENT = 256
CORRUPTED = 257
VOCABULARY = 272
"""256 bytes and two special ids, padded to a multiple of 16; ids from 258 on never occur in any data."""

TITLE_PROBABILITY = 0.25
CORRUPTION_PROBABILITY = 0.01
PIECE_BYTES = 4096


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
    """Endless batches of one rank's documents: every `world_size`-th of an order that all ranks share."""

    def __init__(
        self,
        documents: Sequence[Document],
        *,
        batch_size: int,
        sequence_length: int,
        seed: int,
        rank: int,
        world_size: int,
    ) -> None:
        if len(documents) < world_size:
            raise SettingsError(f"the data has {len(documents)} documents, fewer than the {world_size} ranks")
        self.documents = list(documents)
        self.batch_size = batch_size
        self.tokens_per_sample = sequence_length + 2
        self.rank = rank
        self.world_size = world_size
        self.order_generator = torch.Generator().manual_seed(seed)  # the same on every rank
        self.crop_generator = np.random.Generator(np.random.PCG64([seed, rank]))
        self.epoch = 0
        self.cursor = 0
        self.samples = 0
        self.order = self._draw_order()

    def next_batch(self) -> Tensor:
        """int64 [batch_size, sequence_length + 2], on the CPU."""
        batch = torch.from_numpy(np.stack([self._sample() for _ in range(self.batch_size)]))
        self.samples += self.batch_size
        return batch

    def state_dict(self) -> dict[str, Tensor]:
        """Position and generators, as tensors of fixed shape."""
        return {
            "position": torch.tensor([self.epoch, self.cursor, self.samples]),
            "order": torch.from_numpy(self.order.copy()),
            "order_generator": self.order_generator.get_state(),
            "crop_generator": rng.encode_pcg64(self.crop_generator),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.epoch, self.cursor, self.samples = state["position"].tolist()
        self.order = state["order"].numpy().copy()
        self.order_generator.set_state(state["order_generator"])
        rng.decode_pcg64(self.crop_generator, state["crop_generator"])

    def reorder(self, names: Sequence[str]) -> None:
        """From the next sample on, go through the documents in this order, from its start."""
        index = {document.name: position for position, document in enumerate(self.documents)}
        self.order = np.array([index[name] for name in names], dtype=np.int64)
        self.cursor = self.rank

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
