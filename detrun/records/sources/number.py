"""One number as a source gives it: its bits where the source holds them, the digits it was printed with where not.

A printed number stands for an interval: all that would have been printed alike. Two intervals that overlap do not
contradict each other, and never prove that the numbers were the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal

from detrun.fingerprint import scalar

Resolution = Literal["exact", "float32", "decimal"]
"""exact: every bit of what the program had. float32: what it had, rounded to float32. decimal: digits as printed."""

MAX_CHARACTERS = 1200
"""More than any float64 has digits."""

_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")
_HEX = re.compile(r"([+-]?)0[xX]([0-9a-fA-F]{1,32})(?:\.([0-9a-fA-F]{0,32}))?[pP]([+-]?[0-9]{1,5})")
_WORD = re.compile(r"([+-]?)(nan|inf|infinity)", re.IGNORECASE)

Interval = tuple[Fraction, Fraction]


@dataclass(frozen=True, slots=True)
class Number:
    """bits: of the number in `dtype`; of a decimal one, of the nearest float64. printed: the text, where it was one."""

    bits: int
    dtype: str
    resolution: Resolution
    printed: str | None = None

    @property
    def value(self) -> float | int:
        return scalar.value_of(self.bits, self.dtype)

    @property
    def is_nan(self) -> bool:
        return self.value != self.value

    @property
    def is_finite(self) -> bool:
        if self.resolution == "decimal":  # the digits may round to a number that no float64 holds
            return Decimal(str(self.printed)).is_finite()
        return not self.is_nan and abs(self.value) != float("inf")

    def interval(self) -> Interval | None:
        """All numbers that the source would have given alike, both ends with them; None for NaN and infinity."""
        if not self.is_finite:
            return None
        if self.resolution == "decimal":
            return decimal_interval(str(self.printed))
        middle = Fraction(self.value)
        if self.resolution == "exact":
            return middle, middle
        return _half_way(self.bits, -1), _half_way(self.bits, 1)

    def digits(self) -> str:
        """How fine it is, in words: `7 significant digits`, `float32`, `every bit`."""
        if self.resolution == "decimal":
            count = len(Decimal(str(self.printed)).as_tuple().digits) if self.is_finite else 0
            return f"{count} significant digit{'' if count == 1 else 's'}" if count else "no digits"
        return "float32" if self.resolution == "float32" else "every bit"

    def metric(self, source: str, place: str) -> dict[str, Any]:
        """As a metrics line has it, with what was printed (of decimals) and where it stood."""
        found: dict[str, Any] = {
            "bits": scalar.format_bits(self.bits, self.dtype),
            "dtype": self.dtype,
            "value": scalar.json_value(self.bits, self.dtype),
            "source": source,
            "place": place,
        }
        if self.resolution == "decimal":
            found["printed"] = self.printed
        return found


def parse_number(text: str) -> Number | None:
    """A number as text: C's and Python's hexadecimal floats are exact, decimals have the digits they have; None for
    anything else, whatever it looks like (1,024 or 1_000 or 12.5%)."""
    text = text.strip()
    if not text or len(text) > MAX_CHARACTERS:
        return None
    if _DECIMAL.fullmatch(text):
        return Number(scalar.bits_of(float(text), "float64"), "float64", "decimal", text)
    if found := _HEX.fullmatch(text):
        return _hexadecimal(found, text)
    if _WORD.fullmatch(text):
        return Number(scalar.bits_of(float(text), "float64"), "float64", "decimal", text)
    return None


def _hexadecimal(found: re.Match[str], text: str) -> Number | None:
    fraction = found[3] or ""
    exponent = int(found[4]) - 4 * len(fraction)
    if abs(exponent) > 20_000:
        return None
    exact = Fraction(int(found[2] + fraction, 16)) * Fraction(2) ** exponent
    try:
        value = float.fromhex(text)
    except OverflowError:
        return None
    if Fraction(value) != (-exact if found[1] == "-" else exact):
        return None  # more bits than a float64 has
    return Number(scalar.bits_of(value, "float64"), "float64", "exact", text)


def exact(value: float, dtype: str = "float64") -> Number:
    """A number of which every bit is known."""
    return Number(scalar.bits_of(value, dtype), dtype, "exact")


def single(value: float) -> Number:
    """A number that a source rounded to float32."""
    return Number(scalar.bits_of(value, "float32"), "float32", "float32")


def decimal_interval(printed: str) -> Interval:
    """The reals that a printer which rounds to the nearest prints as `printed`, both ends with them."""
    number = Decimal(printed)
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)
    half = Fraction(10) ** exponent / 2
    middle = Fraction(number)
    return middle - half, middle + half


def _half_way(bits: int, towards: int) -> Fraction:
    """The middle between a float32 and its next one up (1) or down (-1)."""
    here = Fraction(scalar.value_of(bits, "float32"))
    order = scalar.ordered(bits, "float32") + towards
    if bits in (0, 1 << 31):  # both zeros have the smallest numbers as neighbours
        return here + towards * Fraction(2) ** -150
    if order in (0, -1):
        return here / 2
    beyond = order if order >= 0 else (1 << 31) | (-1 - order)
    if beyond & 0x7FFFFFFF >= 0x7F800000:
        return here * (1 + Fraction(2) ** -25)  # the largest of all: as if numbers went on
    return (here + Fraction(scalar.value_of(beyond, "float32"))) / 2


def same(a: Number, b: Number) -> bool:
    """Whether one program that gave a number once as `a` and once as `b` had the same: it prints equal numbers alike,
    so that other digits are another number, however few they are."""
    if a.resolution == "decimal" and b.resolution == "decimal":
        if not (a.is_finite and b.is_finite):
            return (a.is_nan and b.is_nan) or (not a.is_nan and not b.is_nan and a.value == b.value)
        x, y = Decimal(str(a.printed)), Decimal(str(b.printed))
        return x == y and x.is_signed() == y.is_signed()
    if a.resolution == b.resolution:
        return (a.bits, a.dtype) == (b.bits, b.dtype)
    return agree(a, b)


def agree(a: Number, b: Number) -> bool:
    """Whether two sources may speak of the same number, as far as their resolutions tell."""
    if a.is_nan or b.is_nan:
        return a.is_nan and b.is_nan
    mine, theirs = a.interval(), b.interval()
    if mine is None or theirs is None:
        if mine is None and theirs is None:
            return a.value == b.value
        return False
    if "decimal" not in (a.resolution, b.resolution) and a.value == b.value == 0:
        return _negative(a) == _negative(b)
    if {a.resolution, b.resolution} == {"exact", "float32"}:
        single_, other = (a, b) if a.resolution == "float32" else (b, a)
        return scalar.bits_of(other.value, "float32") == single_.bits
    return overlap(mine, theirs)


def overlap(a: Interval, b: Interval) -> bool:
    """Whether two intervals have a number in common."""
    return a[0] <= b[1] and b[0] <= a[1]


def _negative(number: Number) -> bool:
    return scalar.is_float(number.dtype) and bool(number.bits >> (scalar.width(number.dtype) - 1))
