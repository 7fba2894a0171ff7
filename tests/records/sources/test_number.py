"""Printed numbers as intervals, hexadecimal floats as bits."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detrun.records.sources.number import agree, exact, overlap, parse_number, same, single

finite = st.floats(allow_nan=False, allow_infinity=False)
floats32 = st.floats(allow_nan=False, allow_infinity=False, width=32)
FORMATS = (".0f", ".3f", ".6f", ".6E", ".3E", ".4g", ".9g", ".17g", "")
formats = st.sampled_from(FORMATS)


@given(finite, formats)
def test_a_printed_number_holds_the_number_that_was_printed(value: float, how: str) -> None:
    number = parse_number(format(value, how))
    assert number is not None and number.resolution == "decimal"
    interval = number.interval()
    assert interval is not None
    assert interval[0] <= Fraction(value) <= interval[1]
    assert agree(number, exact(value))


@given(floats32, formats)
def test_event_files_and_logs_of_one_float32_never_contradict_each_other(value: float, how: str) -> None:
    printed, written = parse_number(format(value, how)), single(value)
    assert printed is not None
    assert agree(printed, written) and agree(written, printed)
    assert agree(written, exact(value)) and agree(written, exact(value, "float32"))


@given(finite)
def test_what_an_event_file_rounded_agrees_with_the_double_and_a_neighbour_does_not(value: float) -> None:
    written = single(value)
    if not written.is_finite:
        return
    assert agree(written, exact(value))
    bits = struct.unpack("<I", struct.pack("<f", written.value))[0]
    beyond = struct.unpack("<f", struct.pack("<I", bits + 1))[0]
    if math.isfinite(beyond):
        assert not agree(single(beyond), exact(value, "float64"))


@given(finite)
def test_hexadecimal_floats_are_exact(value: float) -> None:
    number = parse_number(value.hex())
    assert number is not None and number.resolution == "exact"
    assert struct.pack("<d", number.value) == struct.pack("<d", value)
    assert same(number, exact(value))


@given(finite, finite, st.sampled_from((".6E", ".3f", ".17g")))
def test_other_digits_of_one_format_are_another_number(a: float, b: float, how: str) -> None:
    x, y = parse_number(format(a, how)), parse_number(format(b, how))
    assert x is not None and y is not None
    assert same(x, y) == (format(a, how) == format(b, how))
    if format(a, how) == format(b, how):
        assert overlap(x.interval() or (0, 0), y.interval() or (0, 0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1,024",
        "1_000",
        "12.5%",
        "0x1f",
        "1.09[rank1]6E+01",
        "--1",
        "1e",
        "nanx",
        ".",
        "1 2",
        "0x1.0p+99999",
        "9" * 1300,
    ],
)
def test_what_is_no_number_is_none(text: str) -> None:
    assert parse_number(text) is None


def test_more_bits_than_a_double_has_are_no_double() -> None:
    assert parse_number("0x1.00000000000001p+0") is None
    assert parse_number("0x1.fffffffffffffp+0") is not None


def test_nan_agrees_with_nan_alone() -> None:
    nan, one = parse_number("NaN"), parse_number("1.0")
    assert nan is not None and one is not None
    assert agree(nan, single(math.nan)) and same(nan, nan)
    assert not agree(nan, one) and not agree(one, single(math.nan))


def test_infinities_keep_their_sign() -> None:
    up, down = parse_number("inf"), parse_number("-inf")
    assert up is not None and down is not None
    assert agree(up, single(math.inf)) and not agree(up, down) and not same(up, down)


def test_zeros_of_two_signs_are_two_numbers_where_the_sign_is_held() -> None:
    assert not same(exact(0.0), exact(-0.0))
    assert not agree(single(0.0), exact(-0.0))
    plus, minus = parse_number("0.000"), parse_number("-0.000")
    assert plus is not None and minus is not None
    assert not same(plus, minus)


def test_how_fine_a_number_is() -> None:
    words = [number.digits() for text in ("1.096596E+01", "2.4", "0x1p+0") if (number := parse_number(text))]
    assert words == ["7 significant digits", "2 significant digits", "every bit"]
    assert single(1.0).digits() == "float32"
