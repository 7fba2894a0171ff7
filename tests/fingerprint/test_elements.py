"""Differing elements and distances of raw buffers, of every dtype, against exact arithmetic and torch's own order."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from detrun.fingerprint import scalar
from detrun.fingerprint.elements import LAYOUTS, ElementComparison, Elements, compare_bytes, element_bytes

EIGHT_BIT_FLOATS = [name for name in LAYOUTS if name.startswith("float8")]


def torch_dtypes() -> list[str]:
    """Every dtype this torch has, by name."""
    found = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted(found)


@pytest.mark.parametrize("name", torch_dtypes())
def test_every_dtype_of_torch_is_known_with_its_size(name: str) -> None:
    assert element_bytes(name) == getattr(torch, name).itemsize


@pytest.mark.parametrize("dtype", sorted(scalar.DTYPES))
@given(data=st.data())
def test_agrees_with_the_exact_arithmetic_of_scalars(dtype: str, data: Any) -> None:
    size = scalar.width(dtype) // 8
    bits = st.integers(0, (1 << 8 * size) - 1)
    pairs = data.draw(st.lists(st.tuples(bits, bits | st.just(0)) | bits.map(lambda x: (x, x)), max_size=12))
    a, b = (b"".join(pair[side].to_bytes(size, "little") for pair in pairs) for side in (0, 1))
    distances = [scalar.ulp_distance(x, y, dtype) for x, y in pairs if x != y]
    found = compare_bytes(a, b, dtype)
    assert found == Elements(
        differing=len(distances),
        max_ulp=max((d for d in distances if d is not None), default=None),
        first=next((index for index, (x, y) in enumerate(pairs) if x != y), -1),
        nan=sum(d is None for d in distances),
        count=len(pairs),
    )


@pytest.mark.parametrize("dtype", EIGHT_BIT_FLOATS)
def test_eight_bit_floats_are_ordered_as_their_values(dtype: str) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values = codes.view(getattr(torch, dtype)).double()
    numbers = sorted(
        ((float(v), math.copysign(1, v), code) for code, v in enumerate(values) if not torch.isnan(v)),
    )
    nans = [code for code, v in enumerate(values) if torch.isnan(v)]
    order = [code for *_, code in numbers]
    for low, high in itertools.pairwise(order):
        assert compare_bytes(bytes([low]), bytes([high]), dtype) == Elements(1, 1, 0, 0, 1)
    assert compare_bytes(bytes([order[0]]), bytes([order[-1]]), dtype).max_ulp == len(order) - 1
    for code in nans:
        assert compare_bytes(bytes([code]), bytes([order[0]]), dtype) == Elements(1, None, 0, 1, 1)
        assert compare_bytes(bytes([code]), bytes([code]), dtype) == Elements(0, None, -1, 0, 1)


def test_packed_four_bit_floats_count_each_half() -> None:
    # 0x1 is 0.5, 0x9 is −0.5: +0 and −0 lie between; the low half is the first element
    assert compare_bytes(b"\x01\x00", b"\x09\x00", "float4_e2m1fn_x2") == Elements(1, 3, 0, 0, 4)
    assert compare_bytes(b"\x00\x10", b"\x00\x20", "float4_e2m1fn_x2") == Elements(1, 1, 3, 0, 4)
    assert compare_bytes(b"\x21", b"\x12", "float4_e2m1fn_x2") == Elements(2, 1, 0, 0, 2)


def test_a_complex_element_counts_once_with_its_larger_distance() -> None:
    a = np.array([1 + 1j, 2 + 2j, 0], np.complex64)
    b = a.copy().view(np.uint32)
    b[2] += 1
    b[3] += 7
    assert compare_bytes(a.tobytes(), b.tobytes(), "complex64") == Elements(1, 7, 1, 0, 3)


def test_a_nan_in_one_half_of_a_complex_leaves_the_other_its_distance() -> None:
    a = np.array([1 + 1j], np.complex128)
    b = np.array([complex(np.nan, np.nextafter(1.0, 2))], np.complex128)
    assert compare_bytes(a.tobytes(), b.tobytes(), "complex128") == Elements(1, 1, 0, 1, 1)


def test_the_largest_distance_of_64_bits_does_not_overflow() -> None:
    low, high = np.array([-(2**63)], np.int64).tobytes(), np.array([2**63 - 1], np.int64).tobytes()
    assert compare_bytes(low, high, "int64").max_ulp == 2**64 - 1
    assert compare_bytes(b"\0" * 8, b"\xff" * 8, "uint64").max_ulp == 2**64 - 1


def test_in_pieces_is_as_in_one() -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal(700_001).astype(np.float32)
    b = a.copy()
    b[[5, 300_000, 700_000]] = np.nextafter(b[[5, 300_000, 700_000]], 9, dtype=np.float32)
    b[6] = np.nan
    whole = compare_bytes(a.tobytes(), b.tobytes(), "float32")
    assert whole == Elements(4, 1, 5, 1, 700_001)
    pieces = ElementComparison("float32")
    x, y = memoryview(a.tobytes()), memoryview(b.tobytes())
    for begin in range(0, len(x), 400_004):
        pieces.feed(x[begin : begin + 400_004], y[begin : begin + 400_004])
    assert pieces.result() == whole


def test_nothing_to_compare_is_equal() -> None:
    assert compare_bytes(b"", b"", "bfloat16") == Elements(0, None, -1, 0, 0)


@pytest.mark.parametrize(
    ("a", "b", "dtype", "words"),
    [
        (b"12", b"1", "uint8", "2 bytes cannot be compared with 1"),
        (b"123", b"123", "float32", "whole number"),
        (b"1", b"1", "float7", "no elements of dtype 'float7'"),
    ],
)
def test_what_cannot_be_compared_is_refused(a: bytes, b: bytes, dtype: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        compare_bytes(a, b, dtype)


def test_needs_no_torch() -> None:
    code = "import sys; import detrun.fingerprint.elements; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
