"""What is said about two tensors whose bytes differ."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from detrun.fingerprint import bytes_compare
from detrun.fingerprint.bytes_compare import MOST_CELLS, MOST_ROWS, ByteDifference, compare_tensors
from detrun.fingerprint.elements import LAYOUTS, compare_bytes

seeds = st.integers(0, 2**32 - 1)


def compare(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], dtype: str = "") -> ByteDifference:
    return compare_tensors(a.tobytes(), b.tobytes(), dtype or str(a.dtype), a.shape)


def normal(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_equal_tensors() -> None:
    a = normal(6, 4)
    found = compare(a, a.copy())
    assert found == ByteDifference(24, total_rows=6, bitmap="······")
    assert found.equal


def test_one_bit_of_one_element() -> None:
    a = normal(6, 4)
    b = a.copy()
    b.view(np.int32)[4, 2] ^= 1
    found = compare(a, b)
    assert (found.differing, found.max_ulp, found.ulps) == (1, 1, {"1": 1})
    b.view(np.int32)[4, 2] ^= 1 << 10
    assert (compare(a, b).min_ulp, compare(a, b).max_ulp) in [(1023, 1023), (1025, 1025)]
    assert (found.first, found.rows, found.differing_rows) == ((4, 2), (4,), 1)
    assert found.bitmap == "····▂·"
    assert found.permutation is None
    assert not found.equal


def test_distances_are_counted_by_powers_of_two() -> None:
    a = np.full(8, 1.0, np.float32)
    b = a.copy()
    b.view(np.int32)[1:] += np.array([1, 2, 3, 4, 5, 8, 9], np.int32)
    found = compare(a, b)
    assert found.ulps == {"1": 1, "2": 1, "3–4": 2, "5–8": 2, "9–16": 1}
    assert list(found.ulps) == ["1", "2", "3–4", "5–8", "9–16"]
    far = compare_tensors(b"\0" * 8, b"\xff" * 8, "uint64", ())
    assert far.ulps == {f"{2**63 + 1}–{2**64}": 1}
    assert far.max_ulp == 2**64 - 1


def test_rows_in_another_order() -> None:
    a = normal(100, 7)
    b = a.copy()
    b[[3, 40, 41]] = a[[41, 3, 40]]
    found = compare(a, b)
    assert found.permutation == "rows"
    assert found.rows == (3, 40, 41)
    assert found.differing == 21


def test_elements_in_another_order() -> None:
    a = normal(10, 10)
    b = a.copy()
    b[2, 3], b[7, 1] = a[7, 1], a[2, 3]
    assert compare(a, b).permutation == "elements"
    assert compare(a.ravel(), b.ravel()).permutation == "elements"
    # a column of numbers has no rows to move, only elements
    assert compare(a.reshape(-1, 1), b.reshape(-1, 1)).permutation == "elements"


@given(seeds, st.sampled_from(["float64", "float32", "float16", "int8", "int64", "complex64", "complex128"]))
def test_any_permutation_is_seen_and_one_changed_bit_spoils_it(seed: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    a = (100 * rng.standard_normal((int(rng.integers(2, 40)), 5))).astype(dtype)
    rows = a[rng.permutation(len(a))]
    elements = rng.permutation(a.ravel()).reshape(a.shape)
    for b, word in ((rows, {"rows"}), (elements, {"rows", "elements"})):
        differing = compare(a, b).differing
        assert compare(a, b).permutation in (word if differing else {None})
        b = b.copy()
        b.view(np.uint8).flat[int(rng.integers(b.nbytes))] ^= 1 << int(rng.integers(8))
        assert compare(a, b).permutation is None


def test_the_same_number_of_true_ones_is_no_permutation() -> None:
    a = np.zeros(64, np.bool_)
    b = a.copy()
    a[3] = b[5] = True
    assert compare(a, b).permutation is None
    routing = np.zeros((8, 4), np.bool_)
    routing[0, 1] = routing[1, 2] = True
    swapped = routing[[1, 0, *range(2, 8)]]
    assert compare(routing, swapped).permutation == "rows"


def test_equal_sums_are_no_permutation() -> None:
    assert compare(np.array([1, 4], np.int64), np.array([2, 3], np.int64)).permutation is None
    assert compare(np.array([1, 1, 2], np.int64), np.array([1, 2, 2], np.int64)).permutation is None
    # bits that cancel under an exclusive or
    assert compare(np.array([5, 5, 7], np.int64), np.array([6, 6, 7], np.int64)).permutation is None


def test_signed_zeros() -> None:
    a, b = np.array([0.0, -0.0, 1.0, -0.0], np.float32), np.array([-0.0, 0.0, 1.0, -0.0], np.float32)
    found = compare(a, b)
    assert (found.differing, found.signed_zero, found.max_ulp) == (2, 2, 1)
    assert found.permutation == "elements"
    assert compare(np.array([0j]), np.array([complex(0, -0.0)])).signed_zero == 1
    assert compare(np.array([1.0], np.float32), np.array([-1.0], np.float32)).signed_zero == 0
    # 0x80 is the only NaN there, and no zero
    assert compare_tensors(b"\x00", b"\x80", "float8_e4m3fnuz", (1,)).signed_zero == 0


def test_nan_payloads() -> None:
    a = np.array([0x7FC00000, 0x7FC00000, 0x3F800000, 0x7FC00001], np.uint32).view(np.float32)
    b = np.array([0x7FC00001, 0x3F800000, 0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    found = compare(a, b)
    assert (found.differing, found.nan, found.nan_payload, found.max_ulp) == (3, 3, 1, None)


def test_four_bit_numbers_have_a_place_each() -> None:
    a = bytes(range(12))
    b = bytearray(a)
    b[7] ^= 0x10
    found = compare_tensors(a, bytes(b), "float4_e2m1fn_x2", (3, 4))
    assert (found.elements, found.differing, found.first) == (24, 1, (1, 7))
    assert (found.rows, found.total_rows) == ((1,), 3)


def test_a_tensor_without_dimensions_or_elements() -> None:
    assert compare(np.float32(1), np.float32(2)).first == ()  # type: ignore[arg-type]
    assert compare(np.float32(1), np.float32(2)).bitmap == "█"  # type: ignore[arg-type]
    empty = compare_tensors(b"", b"", "float32", (0, 5))
    assert (empty.equal, empty.bitmap, empty.total_rows) == (True, "", 0)
    assert compare_tensors(b"", b"", "float32", (5, 0)).equal


def test_the_bitmap_and_the_rows_stay_small() -> None:
    a = normal(1000, 3)
    found = compare(a, -a)
    assert len(found.bitmap) == MOST_CELLS
    assert set(found.bitmap) == {"█"}
    assert found.rows == tuple(range(MOST_ROWS))
    assert found.differing_rows == found.total_rows == 1000
    b = a.copy()
    b[-1, -1] += 1
    assert compare(a, b).bitmap.index("▁") == MOST_CELLS - 1


@given(seeds, st.sampled_from(sorted(LAYOUTS)), st.integers(1, 3))
def test_agrees_with_the_plain_comparison_in_every_dtype(seed: int, dtype: str, chunks: int) -> None:
    rng = np.random.default_rng(seed)
    shape = (int(rng.integers(1, 9)), int(rng.integers(1, 9)))
    size = shape[0] * shape[1] * LAYOUTS[dtype].element_bytes
    a = rng.integers(0, 256, size, np.uint8)
    b = a.copy()
    b[rng.random(size) < 0.1] ^= np.uint8(1 << int(rng.integers(8)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bytes_compare, "_CHUNK_BYTES", 16 * chunks)
        found = compare_tensors(a.tobytes(), b.tobytes(), dtype, shape)
    plain = compare_bytes(a.tobytes(), b.tobytes(), dtype)
    assert (found.elements, found.differing, found.max_ulp, found.nan) == (
        plain.count, plain.differing, plain.max_ulp, plain.nan,
    )  # fmt: skip
    assert found == compare_tensors(a.tobytes(), b.tobytes(), dtype, shape)
    rows = np.flatnonzero((a != b).reshape(shape[0], -1).any(axis=1)).tolist()
    assert (list(found.rows), found.differing_rows) == (rows, len(rows))
    if plain.differing:
        assert found.first is not None
        assert np.ravel_multi_index(found.first, (shape[0], plain.count // shape[0])) == plain.first


@pytest.mark.parametrize("shape", [(8_000_000,), (1000, 8000), (2, 4_000_000)])
def test_memory_does_not_grow_with_the_tensors(shape: tuple[int, ...]) -> None:
    a = normal(*shape)
    b = a[::-1].copy()
    x, y = memoryview(a).cast("B"), memoryview(b).cast("B")
    tracemalloc.start()
    try:
        found = compare_tensors(x, y, "float32", shape)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.permutation == ("elements" if len(shape) == 1 else "rows")
    assert peak < a.nbytes // 2


def test_goes_into_a_record() -> None:
    a = normal(4, 4)
    document = json.loads(json.dumps(dataclasses.asdict(compare(a, a[::-1]))))
    assert document["permutation"] == "rows"
    assert document["rows"] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("a", "b", "dtype", "shape", "words"),
    [
        (b"1234", b"1234", "float32", (2,), r"float32\[2\] takes 8 bytes, not 4"),
        (b"1234", b"123", "float32", (1,), r"float32\[1\] takes 4 bytes, not 3"),
        (b"", b"", "float32", (1 << 60, 1 << 60), "bytes, not 0"),
        (b"1234", b"1234", "float32", (-1, -1), "bytes, not 4"),
        (b"1", b"1", "float7", (1,), "no elements of dtype 'float7'"),
    ],
)
def test_what_is_not_as_said_is_refused(a: bytes, b: bytes, dtype: str, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        compare_tensors(a, b, dtype, shape)


def test_needs_no_torch() -> None:
    code = "import sys; import detrun.fingerprint.bytes_compare; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
