"""The device digest, against an implementation of its definition in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from detrun.fingerprint.device import SEGMENT, ml128_text, multilinear, segment_sums
from detrun.fingerprint.keys import KEY_SETS, ROW, level_keys, splitmix64

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.bool, torch.complex64,
    torch.complex128,
]  # fmt: skip


def reference(lanes: np.ndarray[Any, Any], key_set: int, level: int = 0) -> int:
    """One sum of the digest as the module's docstring defines it, in Python's integers."""
    keys = level_keys(level)[key_set]
    rows = [lanes[i : i + ROW].astype(np.uint64) for i in range(0, len(lanes), ROW)]
    with np.errstate(over="ignore"):
        values = [int((row * keys[: len(row)]).sum(dtype=np.uint64)) for row in rows]
    if len(values) == 1:
        return values[0]
    halves = [half for value in values for half in (value & 0xFFFFFFFF, value >> 32)]
    return reference(np.array(halves, np.uint64), key_set, level + 1)


def expected(raw: bytes) -> list[int]:
    lanes = np.frombuffer(raw + bytes(-len(raw) % 4), np.uint32)
    return [reference(lanes, key_set) for key_set in range(KEY_SETS)]


def unsigned(sums: torch.Tensor) -> list[int]:
    return [value & (2**64 - 1) for value in sums.tolist()]


def tensor_of(raw: bytes, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.tensor(list(raw), dtype=torch.uint8).view(dtype)


def test_keys_are_splitmix64() -> None:
    # The first outputs of the generator seeded with 0, from its authors' program; ours starts at another seed.
    def plain(seed: int, count: int) -> list[int]:
        out = []
        for _ in range(count):
            seed = (seed + 0x9E3779B97F4A7C15) % 2**64
            z = seed
            z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
            z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
            out.append(z ^ z >> 31)
        return out

    assert plain(0, 2) == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    assert splitmix64(0, 3).tolist() == plain(0x6465_7472_756E_3031, 3)
    assert splitmix64(2, 1).tolist() == plain(0x6465_7472_756E_3031, 3)[2:]


def test_no_two_keys_of_a_row_cancel_in_their_low_bits() -> None:
    for keys in level_keys(0):
        low = keys & np.uint64(2**33 - 1)
        assert len(np.unique(low)) == ROW
        assert not np.intersect1d(low, (np.uint64(2**33) - low) & np.uint64(2**33 - 1)).size


@given(st.binary(min_size=1, max_size=200))
def test_small_inputs_agree_with_the_definition(raw: bytes) -> None:
    sums = segment_sums([tensor_of(raw)])
    assert sums is not None
    assert unsigned(sums[0]) == expected(raw)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([ROW - 1, ROW, ROW + 1, 2 * ROW, 3 * ROW + 17, 40_000]),
    st.integers(1, 5),
    st.integers(0, 2**32 - 1),
)
def test_rows_and_chunks(size: int, chunk_rows: int, seed: int) -> None:
    raw = np.random.default_rng(seed).integers(-(2**31), 2**31, size, np.int32)
    lanes = torch.from_numpy(raw)
    found = unsigned(multilinear(lanes, chunk_rows))
    assert found == unsigned(multilinear(lanes)) == expected(raw.tobytes())


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**32 - 1), st.sampled_from(["element", "swap", "rows", "roll", "sign pair", "top bits", "double"])
)
def test_corruptions_are_seen(seed: int, kind: str) -> None:
    random = np.random.default_rng(seed)
    raw = random.standard_normal((64, 1024)).astype(np.float32)
    raw[5] = raw[9] + 1
    changed = raw.copy()
    bits = changed.view(np.int32)
    i, j = random.choice(raw.size, 2, replace=False)
    if kind == "element":
        bits.flat[i] ^= 1
    elif kind == "swap":
        changed.flat[[i, j]] = changed.flat[[j, i]]
    elif kind == "rows":
        changed[[5, 9]] = changed[[9, 5]]
    elif kind == "roll":
        changed = np.roll(changed, 1, axis=0)
    elif kind == "sign pair":
        bits.flat[[i, j]] ^= np.int32(-(2**31))
    elif kind == "top bits":
        bits.flat[[i, j]] ^= np.int32(1 << 30)
    else:
        bits.flat[[i, j]] ^= np.int32(1)
    if changed.tobytes() == raw.tobytes():
        return
    first, second = (segment_sums([torch.from_numpy(array)]) for array in (raw, np.ascontiguousarray(changed)))
    assert first is not None
    assert second is not None
    assert first[0, 0] != second[0, 0]
    assert first[0, 1] != second[0, 1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 3, 5, 8])
def test_every_dtype_is_taken_by_its_bytes(dtype: torch.dtype, size: int) -> None:
    raw = bytes(range(1, 1 + size * dtype.itemsize))
    if dtype == torch.bool:
        raw = bytes(i % 2 for i in range(size))
    sums = segment_sums([tensor_of(raw, dtype)])
    assert sums is not None
    assert unsigned(sums[0]) == expected(raw)


def test_an_odd_offset_into_a_storage_is_no_obstacle() -> None:
    raw = bytes(range(40))
    view = tensor_of(raw)[3:35]
    sums = segment_sums([view])
    assert sums is not None
    assert unsigned(sums[0]) == expected(raw[3:35])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_element_of_a_strided_view(dtype: torch.dtype) -> None:
    tensor = tensor_of(bytes([1] * 2 * dtype.itemsize), dtype)[::2]
    assert tensor.is_contiguous()
    sums = segment_sums([tensor])
    assert sums is not None
    assert unsigned(sums[0]) == expected(bytes([1] * dtype.itemsize))


def test_segments_follow_from_sizes_alone() -> None:
    small, large, empty = torch.arange(10), torch.arange(ROW), torch.empty(0)
    sums = segment_sums([small, empty, small, large, small])
    assert sums is not None
    assert sums.shape == (3, 2)
    raw = [small.numpy().tobytes() * 2, large.numpy().tobytes(), small.numpy().tobytes()]
    assert [unsigned(row) for row in sums] == [expected(part) for part in raw]
    assert segment_sums([empty]) is None
    many = segment_sums([torch.zeros(ROW - 1, dtype=torch.int32)] * (SEGMENT // (ROW - 1) + 1))
    assert many is not None
    assert many.shape == (2, 2)


def test_the_text_tells_descriptions_apart() -> None:
    assert ml128_text(b"a", b"") != ml128_text(b"", b"a")
    assert ml128_text(b"a", b"").startswith("ml128:")
    assert len(ml128_text(b"a", b"")) == 6 + 32
