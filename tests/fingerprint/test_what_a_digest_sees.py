"""What every digest must see, and what must not change it: on the host and in the device's operations alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from detrun.fingerprint.device import ml128_text, multilinear, segment_sums
from detrun.fingerprint.host import digest_tensors, memory_of
from detrun.fingerprint.keys import ROW
from detrun.fingerprint.tensors import describe


def on_device(tensors: list[torch.Tensor]) -> str:
    """The digest that these tensors have on a device, here computed by the same operations on the host."""
    sums = segment_sums([tensor.contiguous() for tensor in tensors])
    raw = b"" if sums is None else bytes(memory_of(sums))
    return ml128_text(b"".join(map(describe, tensors)), raw)


DIGESTS: dict[str, Callable[[list[torch.Tensor]], str]] = {"host": digest_tensors, "device": on_device}
WIDTHS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8]

either = pytest.mark.parametrize("digest", DIGESTS.values(), ids=DIGESTS)
seeds = st.integers(0, 2**32 - 1)
shapes = st.tuples(st.integers(4, 40), st.sampled_from([4, 12, 128, 1024]))
dtypes = st.sampled_from(DTYPES)


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Near-equal numbers, as activations are: few exponents, many equal high bits."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    return (values * 30).to(dtype) if not dtype.is_floating_point else values.to(dtype)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(WIDTHS[8 * tensor.element_size()])


def flipped(tensor: torch.Tensor, places: list[int], bit: int) -> torch.Tensor:
    """A copy in which one bit of the elements at these flat places is the other one."""
    other = tensor.clone()
    flat = bits_of(other).view(-1)
    width = 8 * tensor.element_size()
    mask = torch.tensor([1 << bit], dtype=torch.uint8) if width == 8 else None
    for place in places:
        flat[place] ^= mask[0] if mask is not None else (1 << bit if bit < width - 1 else -(1 << bit))
    return other


def places(rng: np.random.Generator, count: int, most: int) -> list[int]:
    return [int(place) for place in rng.choice(most, count, replace=False)]


@either
@settings(max_examples=60, deadline=None)
@given(seeds, shapes, dtypes, st.integers(1, 3))
def test_flipped_bits(digest: Any, seed: int, shape: tuple[int, int], dtype: torch.dtype, count: int) -> None:
    rng = np.random.default_rng(seed)
    tensor = numbers(shape, dtype, seed)
    for bit in (0, int(rng.integers(8 * dtype.itemsize)), 8 * dtype.itemsize - 1):
        # several flips of one bit at different places: what an exclusive or and many sums cancel
        other = flipped(tensor, places(rng, count, tensor.numel()), bit)
        assert digest([other]) != digest([tensor])


@either
@settings(max_examples=60, deadline=None)
@given(seeds, shapes, dtypes, st.sampled_from(["elements", "rows", "blocks", "halves", "columns"]))
def test_swaps(digest: Any, seed: int, shape: tuple[int, int], dtype: torch.dtype, kind: str) -> None:
    rng = np.random.default_rng(seed)
    tensor = numbers(shape, dtype, seed)
    other = tensor.clone()
    if kind == "elements":
        i, j = places(rng, 2, tensor.numel())
        bits_of(other).view(-1)[[i, j]] = bits_of(tensor).view(-1)[[j, i]]
    elif kind == "rows":
        i, j = places(rng, 2, shape[0])
        bits_of(other)[[i, j]] = bits_of(tensor)[[j, i]]
    elif kind == "blocks":
        bits_of(other)[:2], bits_of(other)[2:4] = bits_of(tensor)[2:4], bits_of(tensor)[:2]
    elif kind == "halves":
        other = bits_of(tensor).roll(shape[1] // 2, dims=1).view(dtype)
    else:
        i, j = places(rng, 2, shape[1])
        bits_of(other)[:, [i, j]] = bits_of(tensor)[:, [j, i]]
    equal = bool((bits_of(other) == bits_of(tensor)).all())
    assert (digest([other]) == digest([tensor])) == equal


@either
@settings(max_examples=40, deadline=None)
@given(seeds, shapes, st.sampled_from([torch.int32, torch.int64, torch.float32]))
def test_equal_pairs_that_cancel(digest: Any, seed: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    rng = np.random.default_rng(seed)
    base = numbers(shape, dtype, seed)
    i, j = places(rng, 2, base.numel())
    texts = set()
    # (a, a) and (b, b) in the same two places; (a, -a), (0, 0); (a + 1, b - 1)
    values = [(5, 5), (6, 6), (0, 0), (5, -5), (-5, 5), (6, 4), (4, 6)]
    for first, second in values:
        tensor = base.clone()
        tensor.view(-1)[i], tensor.view(-1)[j] = first, second
        texts.add(digest([tensor]))
    assert len(texts) == len(values)


@either
@given(st.integers(0, 63), st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]))
def test_zeros_of_either_sign(digest: Any, place: int, dtype: torch.dtype) -> None:
    zeros = torch.zeros(64, dtype=dtype)
    one, all_of_them = zeros.clone(), -zeros
    one[place] = -0.0
    two = one.clone()
    two[(place + 7) % 64] = -0.0
    assert len({digest([tensor]) for tensor in (zeros, one, two, all_of_them)}) == 4


@either
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_payloads_of_nans(digest: Any, dtype: torch.dtype) -> None:
    width = 8 * dtype.itemsize
    nan = torch.tensor([0.0, float("nan")], dtype=dtype)
    quiet = width - 1 - {64: 11, 32: 8, 16: 5 if dtype == torch.float16 else 8}[width] - 1
    # other payloads, the other sign, and a signalling one
    others = [flipped(nan, [1], 0), flipped(nan, [1], 1), flipped(nan, [1], width - 1)]
    others.append(flipped(others[0], [1], quiet))
    assert torch.stack([nan, *others])[:, 1].isnan().all()
    assert len({digest([tensor]) for tensor in (nan, *others)}) == 5


@either
@given(st.lists(st.integers(0, 3 * ROW), min_size=2, max_size=5, unique=True))
def test_zeros_of_different_lengths(digest: Any, lengths: list[int]) -> None:
    texts = {digest([torch.zeros(length, dtype=torch.uint8)]) for length in lengths}
    assert len(texts) == len(lengths)
    split = {
        digest([torch.zeros(2), torch.zeros(3)]),
        digest([torch.zeros(3), torch.zeros(2)]),
        digest([torch.zeros(5)]),
    }
    assert len(split) == 3


@either
@settings(max_examples=40, deadline=None)
@given(seeds, shapes, dtypes)
def test_equal_values_in_any_layout_are_equal(
    digest: Any, seed: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    tensor = numbers(shape, dtype, seed)
    wide = torch.zeros((shape[0], 2 * shape[1]), dtype=dtype)
    wide.view(torch.uint8 if dtype.itemsize == 1 else dtype)[:, ::2] = tensor.view(
        torch.uint8 if dtype.itemsize == 1 else dtype
    )
    shifted = torch.zeros(tensor.numel() + 3, dtype=dtype)[3:].view(shape)
    bits_of(shifted).copy_(bits_of(tensor))
    transposed = tensor.t().contiguous().t()
    for view in (wide[:, ::2], shifted, transposed):
        assert digest([view]) == digest([tensor])
    row = tensor[:1]
    assert digest([row.expand(shape)]) == digest([bits_of(row).expand(shape).contiguous().view(dtype)])


@settings(max_examples=12, deadline=None)
@given(seeds, st.integers(1, 5 * ROW + 100), st.integers(1, 7))
def test_no_thread_count_and_no_chunking_changes_the_device_digest(seed: int, size: int, chunk: int) -> None:
    lanes = torch.from_numpy(np.random.default_rng(seed).integers(-(2**31), 2**31, size, np.int32))
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found += [multilinear(lanes).tolist(), multilinear(lanes, chunk).tolist()]
    finally:
        torch.set_num_threads(before)
    assert all(sums == found[0] for sums in found)


@settings(max_examples=20, deadline=None)
@given(seeds, st.lists(st.integers(1, 20_000), min_size=1, max_size=6))
def test_packing_small_tensors_never_lets_them_be_mixed_up(seed: int, sizes: list[int]) -> None:
    tensors = [numbers((size,), torch.bfloat16, seed + index) for index, size in enumerate(sizes)]
    other = [tensor.clone() for tensor in tensors]
    rng = np.random.default_rng(seed)
    which = int(rng.integers(len(sizes)))
    other[which] = flipped(other[which], [int(rng.integers(sizes[which]))], 0)
    assert on_device(tensors) == on_device([tensor.clone() for tensor in tensors])
    assert on_device(other) != on_device(tensors)
    if len(tensors) > 1 and sizes[0] != sizes[1]:
        assert on_device([tensors[1], tensors[0], *tensors[2:]]) != on_device(tensors)
