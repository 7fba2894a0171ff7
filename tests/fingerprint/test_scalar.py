"""Bits, values and distances: properties over all dtypes."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detrun.fingerprint import scalar

FLOATS = ["float64", "float32", "float16", "bfloat16"]
floats = st.sampled_from(FLOATS)


@st.composite
def bits_and_dtype(draw: st.DrawFn, dtypes: st.SearchStrategy[str]) -> tuple[int, str]:
    dtype = draw(dtypes)
    return draw(st.integers(0, (1 << scalar.width(dtype)) - 1)), dtype


@given(bits_and_dtype(st.sampled_from(sorted(scalar.DTYPES - {"bool"}))))
def test_value_and_bits_are_inverse(case: tuple[int, str]) -> None:
    bits, dtype = case
    value = scalar.value_of(bits, dtype)
    back = scalar.bits_of(value, dtype)
    if isinstance(value, float) and math.isnan(value):
        assert math.isnan(scalar.value_of(back, dtype))
    else:
        assert back == bits


@given(bits_and_dtype(st.sampled_from(sorted(scalar.DTYPES))))
def test_text_and_bits_are_inverse(case: tuple[int, str]) -> None:
    bits, dtype = case
    text = scalar.format_bits(bits, dtype)
    assert len(text) == 2 + scalar.width(dtype) // 4
    assert scalar.parse_bits(text, dtype) == bits


@given(st.floats(allow_nan=False), floats)
def test_rounding_is_to_the_nearest(value: float, dtype: str) -> None:
    """Against torch, which rounds to the nearest, ties to even."""
    torch = pytest.importorskip("torch")
    expected = torch.tensor(value, dtype=torch.float64).to(getattr(torch, dtype)).double().item()
    found = scalar.value_of(scalar.bits_of(value, dtype), dtype)
    if dtype in ("bfloat16", "float16"):  # torch goes through float32 there and may round twice
        through = struct.unpack("f", struct.pack("f", value))[0] if abs(value) < 3.4e38 else value
        if through != value:
            assert abs(found - expected) <= abs(expected) * 2**-7 or not math.isfinite(expected)
            return
    assert found == expected


@given(bits_and_dtype(floats), st.data())
def test_ordered_grows_with_the_value(case: tuple[int, str], data: st.DataObject) -> None:
    bits, dtype = case
    other = data.draw(st.integers(0, (1 << scalar.width(dtype)) - 1))
    a, b = scalar.value_of(bits, dtype), scalar.value_of(other, dtype)
    if math.isnan(a) or math.isnan(b):
        assert scalar.ulp_distance(bits, other, dtype) == (0 if bits == other else None)
        return
    if a < b:
        assert scalar.ordered(bits, dtype) < scalar.ordered(other, dtype)
    assert scalar.ulp_distance(bits, other, dtype) == scalar.ulp_distance(other, bits, dtype)
    assert (scalar.ulp_distance(bits, other, dtype) == 0) == (bits == other)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_neighbours_are_one_apart(value: float) -> None:
    above = math.nextafter(value, math.inf)
    distance = scalar.ulp_distance(scalar.bits_of(value, "float64"), scalar.bits_of(above, "float64"), "float64")
    assert distance == (2 if value == 0.0 and math.copysign(1, value) < 0 else 1)


def test_zeros_and_infinities() -> None:
    zero, minus_zero = scalar.bits_of(0.0, "float32"), scalar.bits_of(-0.0, "float32")
    assert scalar.ulp_distance(zero, minus_zero, "float32") == 1
    assert scalar.ulp_distance(0x7F7FFFFF, 0x7F800000, "float32") == 1
    assert scalar.bits_of(1e300, "bfloat16") == 0x7F80
    assert scalar.bits_of(-1e300, "float16") == 0xFC00
    assert scalar.ulp_distance(2**64 - 1, 1, "int64") == 2


@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_relative_difference_is_symmetric_and_bounded(a: float, b: float) -> None:
    found = scalar.relative_difference(a, b)
    assert found == scalar.relative_difference(b, a)
    if a == b:
        assert found == 0.0
    elif math.isinf(a) or math.isinf(b):
        assert found is None
    else:
        assert found is not None
        assert 0.0 < found <= 2.0


def test_relative_difference_of_nan_and_integers() -> None:
    assert scalar.relative_difference(math.nan, math.nan) is None
    assert scalar.relative_difference(10, 9) == 0.1


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (2.0, 2.0, 6),
        (2.0, 2.0000001, 6),
        (2.1234564, 2.1234571, 5),
        (1.0, 2.0, None),
        (1.04, 1.0, 1),
        (-0.0, 0.0, None),
    ],
)
def test_equal_decimals(a: float, b: float, expected: int | None) -> None:
    assert scalar.equal_decimals(a, b) == expected


@given(bits_and_dtype(floats))
def test_the_value_shown_gives_the_bits_back(case: tuple[int, str]) -> None:
    bits, dtype = case
    shown = scalar.json_value(bits, dtype)
    if not isinstance(shown, str):
        assert scalar.bits_of(shown, dtype) == bits


def test_unknown_dtypes_and_values_too_large_are_refused() -> None:
    with pytest.raises(ValueError, match="float8"):
        scalar.width("float8")
    with pytest.raises(ValueError, match="does not fit"):
        scalar.bits_of(300, "uint8")
    with pytest.raises(ValueError, match="does not fit"):
        scalar.parse_bits("0x1ff", "uint8")
