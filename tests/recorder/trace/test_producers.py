"""Who wrote a piece of memory last, and which of it nobody did."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from detrun.recorder.trace.producers import Producers

BYTES = 32


@pytest.fixture
def producers() -> Iterator[Producers]:
    made = Producers()
    yield made
    made.clear()


@pytest.fixture
def memory() -> Tensor:
    return torch.zeros(BYTES // 4)


def writer(producers: Producers, memory: Tensor, low: int = 0, high: int = BYTES) -> int:
    known = producers.find(memory.untyped_storage())
    return -2 if known is None else known.writer(low, high)


def test_the_last_writer_of_any_byte_of_a_region_counts(producers: Producers, memory: Tensor) -> None:
    storage = memory.untyped_storage()
    assert writer(producers, memory) == -2
    producers.wrote(storage, 0, BYTES, 1, BYTES)
    producers.wrote(storage, 8, 16, 2, 8)
    assert [writer(producers, memory, low, high) for low, high in ((0, 8), (4, 12), (12, 16), (16, 32), (0, 32))] == [
        1, 2, 2, 1, 2,
    ]  # fmt: skip
    producers.wrote(storage, 0, BYTES, 3, BYTES)
    assert writer(producers, memory, 8, 16) == 3


def test_memory_without_content_is_covered_by_what_is_written(producers: Producers, memory: Tensor) -> None:
    storage = memory.untyped_storage()
    producers.reserved(memory)
    producers.wrote(storage, 0, 12, 1, 12)
    known = producers.find(storage)
    assert known is not None
    assert known.covered(0, 12)
    assert not known.covered(8, 16)
    producers.wrote(storage, 12, BYTES, 2, BYTES - 12)
    known = producers.find(storage)
    assert known is not None
    assert known.covered(0, BYTES)


def test_memory_written_through_views_with_gaps_has_content_when_all_of_it_was(
    producers: Producers, memory: Tensor
) -> None:
    storage = memory.untyped_storage()
    producers.reserved(memory)
    producers.wrote(storage, 0, BYTES - 4, 1, BYTES // 2)
    known = producers.find(storage)
    assert known is not None
    assert not known.covered(0, 8)
    producers.wrote(storage, 4, BYTES, 2, BYTES // 2)
    known = producers.find(storage)
    assert known is not None
    assert known.covered(0, BYTES)
    assert known.writer(0, BYTES) == 2


def test_a_write_with_gaps_into_memory_with_content_is_a_write(producers: Producers, memory: Tensor) -> None:
    producers.wrote(memory.untyped_storage(), 0, BYTES, 1, BYTES)
    producers.wrote(memory.untyped_storage(), 0, BYTES - 4, 2, BYTES // 2)
    assert writer(producers, memory, 0, 8) == 2


def test_new_room_at_the_end_has_no_content(producers: Producers) -> None:
    memory = torch.zeros(4)
    producers.wrote(memory.untyped_storage(), 0, 16, 1, 16)
    producers.growing(memory)
    memory.resize_(8)
    producers.grown(memory)
    known = producers.find(memory.untyped_storage())
    assert known is not None
    assert known.covered(0, 16)
    assert known.writer(0, 16) == 1
    assert not known.covered(16, 32)


def test_what_is_in_flight_is_settled_once_and_whole_memory_keeps_its_writer(
    producers: Producers, memory: Tensor
) -> None:
    storage = memory.untyped_storage()
    producers.wrote(storage, 0, BYTES, 1, BYTES)
    told: list[int] = []
    producers.pending(storage, lambda: told.append(1))
    assert writer(producers, memory) == 1
    producers.settle(storage)
    producers.settle(storage)
    assert told == [1]


def test_a_mark_lasts_until_the_next_write(producers: Producers, memory: Tensor) -> None:
    storage = memory.untyped_storage()
    producers.wrote(storage, 0, BYTES, 1, BYTES, "nonblocking")
    known = producers.find(storage)
    assert known is not None
    assert known.mark == "nonblocking"
    producers.wrote(storage, 0, BYTES, 2, BYTES)
    known = producers.find(storage)
    assert known is not None
    assert known.mark == ""


def test_memory_that_is_gone_is_forgotten_and_its_successor_is_not_taken_for_it(producers: Producers) -> None:
    kept = torch.zeros(4)
    producers.wrote(kept.untyped_storage(), 0, 16, 1, 16)
    for seq in range(2, 40):
        gone = torch.zeros(4)
        assert writer(producers, gone, 0, 16) == -2  # not that of the one before, at the same address perhaps
        producers.wrote(gone.untyped_storage(), 0, 16, seq, 16)
        del gone
    producers.purge()
    assert len(producers.refs) == 1
    assert writer(producers, kept, 0, 16) == 1
    assert not producers.storages
