"""Digests of rows and chunks: of any dimension and layout, the same on the host and in torch's own operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from detrun.fingerprint.device import segment_sums
from detrun.fingerprint.host import memory_of
from detrun.fingerprint.keys import ROW
from detrun.fingerprint.lanes import moved, row_sums
from detrun.fingerprint.rows import row_digests, row_digests_on_device
from tests.fingerprint.test_device import DTYPES, expected

seeds = st.integers(0, 2**32 - 1)


def bits(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (size,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def on_device(tensor: torch.Tensor, dim: int = 0, chunk: int = 1) -> list[int]:
    return [value & (2**64 - 1) for value in row_digests_on_device(tensor, dim, chunk).tolist()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(st.data())
@settings(max_examples=15, deadline=None)
def test_a_row_has_the_device_digests_sum_of_its_bytes(dtype: torch.dtype, data: Any) -> None:
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    chunk = data.draw(st.integers(1, 4))
    tensor = bits(*shape, dtype=dtype, seed=data.draw(seeds))
    order = data.draw(st.permutations(range(len(shape))))
    if data.draw(st.booleans()):
        tensor = tensor.permute(*order)[..., :: data.draw(st.integers(1, 2))]
    found = row_digests(tensor, dim, chunk)
    pieces = tensor.movedim(dim, 0).clone(memory_format=torch.contiguous_format).split(chunk)
    assert found.dtype == np.uint64
    assert found.tolist() == [expected(bytes(memory_of(piece)))[0] for piece in pieces]
    assert found.tolist() == on_device(tensor, dim, chunk)


def test_rows_longer_than_a_level_are_folded_like_the_digest() -> None:
    tensor = bits(3, 2 * ROW + 5, dtype=torch.int32)
    found = row_digests(tensor)
    sums = [segment_sums([row]) for row in tensor]
    assert found.tolist() == [int(s[0, 0]) & (2**64 - 1) for s in sums if s is not None] == on_device(tensor)


@given(seeds)
@settings(max_examples=25, deadline=None)
def test_one_flipped_bit_changes_its_row_and_only_that(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tensor = bits(9, 4, 5, seed=seed)
    other = tensor.clone()
    place = tuple(int(rng.integers(size)) for size in tensor.shape)
    other.view(torch.int32)[place] ^= 1 << int(rng.integers(31))
    for dim in range(3):
        assert np.flatnonzero(row_digests(tensor, dim) != row_digests(other, dim)).tolist() == [place[dim]]
    assert np.flatnonzero(row_digests(tensor, 0, 4) != row_digests(other, 0, 4)).tolist() == [place[0] // 4]


def test_signed_zeros_nan_payloads_and_places_within_a_row_count() -> None:
    rows = torch.tensor([[0.0, 1.0], [-0.0, 1.0], [1.0, 0.0], [float("nan"), 1.0], [0.0, 1.0]])
    rows.view(torch.int32)[3, 0] ^= 1
    payload = rows.clone()
    payload.view(torch.int32)[3, 0] ^= 3
    found = row_digests(rows)
    assert len(set(found.tolist())) == 4
    assert found[0] == found[4]
    assert row_digests(payload)[3] != found[3]


def test_where_rows_came_from() -> None:
    before = bits(50, 3)
    after = before.clone()
    after[[4, 7, 9]] = before[[7, 9, 4]]
    after[20] = 1.5
    a, b = row_digests(before), row_digests(after)
    assert moved(a, b) == [(7, 4), (9, 7), (4, 9)]
    assert moved(a, b, most=1) == [(7, 4)]
    assert moved(a, a) == []
    with pytest.raises(ValueError, match="50 rows cannot be held against 49"):
        moved(a, b[1:])


def test_equal_rows_are_taken_once_each() -> None:
    a, b = np.array([5, 5, 6, 6], np.uint64), np.array([6, 6, 5, 5], np.uint64)
    assert moved(a, b) == [(2, 0), (3, 1), (0, 2), (1, 3)]
    assert moved(np.array([5, 1], np.uint64), np.array([1, 1], np.uint64)) == []


def test_what_has_no_rows() -> None:
    assert (
        row_digests(torch.tensor(2.0)).tolist()
        == row_digests(torch.tensor([2.0])).tolist()
        == on_device(torch.tensor(2.0))
    )
    assert row_digests(torch.empty(3, 0)).tolist() == [0, 0, 0] == on_device(torch.empty(3, 0))
    assert row_digests(torch.empty(0, 3)).tolist() == [] == on_device(torch.empty(0, 3))
    assert row_sums(np.zeros((2, 0), np.uint8)).tolist() == [0, 0]
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    wrong: list[tuple[torch.Tensor, int, int, str]] = [
        (torch.ones(2, 2).to_sparse(), 0, 1, "layout torch.sparse_coo has no rows"),
        (torch.ones(2), 1, 1, "dimension 1 of a tensor with 1"),
        (torch.ones(2), 0, 0, "a chunk of 0"),
        (torch.empty(2, device="meta"), 0, 1, "on meta has no rows here"),
        (freed, 0, 1, "given back"),
    ]
    for tensor, dim, chunk, words in wrong:
        with pytest.raises(ValueError, match=words):
            row_digests(tensor, dim, chunk)


def test_lazy_conjugates_and_negatives_are_taken_by_value() -> None:
    lazy = torch.tensor([[1 + 2j, 3j], [4, 5 - 1j]]).conj()
    assert row_digests(lazy).tolist() == row_digests(lazy.resolve_conj()).tolist() == on_device(lazy)
    negative = lazy.imag
    assert negative.is_neg()
    assert row_digests(negative).tolist() == row_digests(negative.resolve_neg()).tolist() == on_device(negative)


def test_large_tensors_in_pieces() -> None:
    tensor = bits(3000, 130)
    assert row_digests(tensor).tolist() == on_device(tensor)
    assert row_digests(tensor.t(), 1, 7).tolist() == on_device(tensor.t(), 1, 7)


def test_nothing_is_done_to_the_tensor_and_a_tracer_sees_nothing() -> None:
    seen = []

    class Tracer(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    weight = torch.nn.Parameter(torch.randn(6, 4))
    lazy = torch.tensor([[1 + 2j, 3j], [4, 5 - 1j]]).conj()
    with Tracer():
        row_digests(weight)
        row_digests(weight.detach().t(), 1)
        seen.clear()  # the views above are the test's own
        row_digests(lazy)
        row_digests_on_device(weight)
    assert seen == []
    assert weight._version == 0
    weight.detach().untyped_storage().resize_(0)  # still possible: nothing was taken through numpy
