"""Arrays of addresses are recognized; nothing else is taken for one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from detrun.fingerprint import pointers
from detrun.fingerprint.pointers import MOST_ELEMENTS, pointer_like

seeds = st.integers(0, 2**32 - 1)


def addresses(*sizes: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    held = [torch.empty(size) for size in sizes]
    return torch.tensor([tensor.data_ptr() for tensor in held]), held


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_addresses_of_tensors_are_recognized(dtype: torch.dtype) -> None:
    found, _held = addresses(3, 100, 5000, 3_000_000, 16)
    assert pointer_like(found.view(dtype))
    assert pointer_like(found.view(dtype).view(1, 5))


def test_groups_without_rows_have_no_address() -> None:
    found, _held = addresses(10, 20, 30)
    assert pointer_like(torch.cat([torch.zeros(3, dtype=torch.int64), found]))
    assert not pointer_like(torch.cat([torch.zeros(4, dtype=torch.int64), found]))


def test_parts_of_one_tensor_are_recognized() -> None:
    base = torch.empty(8, 1024)
    assert pointer_like(torch.tensor([row.data_ptr() for row in base]))


def test_one_address_is_not_enough() -> None:
    found, _held = addresses(10, 20)
    assert not pointer_like(found[:1])
    assert not pointer_like(found[:1].expand(4).contiguous())


@pytest.mark.parametrize("spoil", ["an id", "odd", "far away", "not mapped"])
def test_one_number_that_is_no_address_spoils_it(spoil: str) -> None:
    found, _held = addresses(10, 20, 5_000_000)
    assert pointer_like(found)
    extra = {
        "an id": 50256,
        "odd": int(found[0]) + 3,
        "far away": 1 << 33,
        "not mapped": int(found.max()) // 2**40 * 2**40 + 16,
    }
    assert not pointer_like(torch.cat([found, torch.tensor([extra[spoil]])]))


@settings(max_examples=200, deadline=None)
@given(seeds, st.integers(2, 512), st.sampled_from([2, 8, 1024, 50_257, 2**31, 2**40]))
def test_ids_counts_and_positions_are_not(seed: int, size: int, below: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, below, (size,), generator=generator)
    for tensor in (ids, ids.cumsum(0), ids.sort().values, -ids, torch.arange(size) * 16, torch.zeros_like(ids)):
        assert not pointer_like(tensor)


@settings(max_examples=200, deadline=None)
@given(seeds, st.integers(2, 512))
def test_hashes_are_not(seed: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    hashes = torch.randint(-(2**63), 2**63 - 1, (size,), generator=generator)
    for tensor in (hashes, hashes & (2**47 - 1), hashes & (2**47 - 16), hashes.view(torch.uint64)):
        assert not pointer_like(tensor)


@settings(max_examples=200, deadline=None)
@given(st.integers(2**32, 2**46), st.integers(2, 200), st.sampled_from([16, 512, 4096, 8192, 2**20]))
def test_large_offsets_in_even_steps_are_not(first: int, size: int, step: int) -> None:
    # bytes of a data set, tokens seen so far, times: as large and as aligned as addresses, but nothing is there
    first -= first % 16
    assert not pointer_like(first + torch.arange(size) * step)


@given(st.lists(st.integers(1_000_000_000_000, 2_000_000_000_000), min_size=2, max_size=20))
def test_times_are_not(times: list[int]) -> None:
    assert not pointer_like(torch.tensor(times))
    assert not pointer_like(torch.tensor(times) * 1_000_000 % 2**62)


def test_cumulative_sequence_lengths_are_not() -> None:
    lengths = torch.randint(1, 4096, (512,), generator=torch.Generator().manual_seed(0)) * 16
    assert not pointer_like(lengths.cumsum(0))
    assert not pointer_like(torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))


def test_other_dtypes_sizes_and_kinds_are_not_even_read() -> None:
    found, _held = addresses(10, 20, 30)
    assert not pointer_like(found.double())
    assert not pointer_like(found.repeat(MOST_ELEMENTS))
    assert not pointer_like(found.to("meta"))
    assert not pointer_like(found.repeat(4)[::2])
    assert not pointer_like(found.to_sparse())
    assert not pointer_like(torch.empty(0, dtype=torch.int64))
    freed = found.clone()
    freed.untyped_storage().resize_(0)
    assert not pointer_like(freed)
    inside = []

    def under_vmap(x: torch.Tensor) -> torch.Tensor:
        inside.append(pointer_like(x))
        return x

    torch.vmap(under_vmap)(torch.stack([found, found]))
    assert inside == [False]


def test_where_mappings_are_not_listed_nothing_is_flagged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found, _held = addresses(10, 20)
    monkeypatch.setattr(pointers, "_MAPS", tmp_path / "none")
    monkeypatch.setattr(pointers, "_mapped", ([], []))
    assert not pointer_like(found)
