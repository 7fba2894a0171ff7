"""JSON lines: an object a line with a step, and metrics as numbers (whose digits are kept), as hexadecimal floats in
text (`float.hex()`, exact), or as `{"bits": "0x…", "dtype": "float32"}`."""

from __future__ import annotations

import json
from typing import Any

from detrun.fingerprint import scalar
from detrun.records.files import one_line
from detrun.records.sources.number import Number, parse_number
from detrun.records.sources.reading import Found, Part, Reading
from detrun.records.sources.text import as_step, lines_of

MAX_LINE = 4 << 20


class _Digits(str):
    """A JSON number as it is written."""

    __slots__ = ()


class _Twice(ValueError):  # noqa: N818  (never leaves this module)
    """A key that an object holds twice."""


def read(part: Part, name: str, step_key: str, wanted: frozenset[str]) -> Found:
    """The readings of a part. Lines without a step and without a wanted metric are something else and passed over."""
    found = Found()
    for line in lines_of(part):
        if not line.text.strip():
            continue
        if len(line.text) > MAX_LINE:
            found.note("invalid", f"line {line.number} is {len(line.text):,} characters long", name, line.number)
            continue
        try:
            entry = _parse(line.text)
        except (ValueError, RecursionError) as error:
            if line.torn:
                found.note("torn", f"line {line.number} is cut off", name, line.number)
            else:
                why = f"holds {error} twice" if isinstance(error, _Twice) else "is not valid JSON"
                found.note("invalid", f"line {line.number} {why}", name, line.number)
            continue
        if isinstance(entry, dict):
            _take(found, entry, name, line.number, step_key, wanted)
    return found


def _parse(text: str) -> Any:
    return json.loads(
        text, parse_float=_Digits, parse_int=_Digits, parse_constant=_Digits, object_pairs_hook=_without_twins
    )


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    whole = dict(pairs)
    if len(whole) < len(pairs):
        seen: set[str] = set()
        raise _Twice(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    return whole


def _take(found: Found, entry: dict[str, Any], name: str, line: int, step_key: str, wanted: frozenset[str]) -> None:
    found.names |= {key for key, value in entry.items() if isinstance(value, _Digits) and key != step_key}
    here = {metric: value for metric in wanted if (value := _at(entry, metric)) is not None}
    if not here:
        return
    found.names |= here.keys()
    step = as_step(_at(entry, step_key))
    if step is None:
        metric = one_line(next(iter(here)), 60)
        found.note("invalid", f"line {line} has {metric} and no step ({one_line(step_key, 40)})", name, line)
        return
    for metric, value in here.items():
        number = number_of(value)
        if number is None:
            what = f"line {line}: {one_line(metric, 60)} is no number ({one_line(json.dumps(value), 40)})"
            found.note("invalid", what, name, line, step)
        else:
            found.readings.append(Reading(metric, step, number, name, line, step))


def _at(entry: Any, key: str) -> Any:
    """A value by its key, or by keys with dots between where objects lie in objects; None where there is none."""
    if not isinstance(entry, dict):
        return None
    if key in entry:
        return entry[key]
    head, dot, rest = key.partition(".")
    return _at(entry.get(head), rest) if dot else None


def number_of(value: Any) -> Number | None:
    """A JSON value as a number."""
    if isinstance(value, str):
        return parse_number(value)
    if isinstance(value, dict) and isinstance(value.get("bits"), str) and value.get("dtype") in scalar.DTYPES:
        try:
            bits = scalar.parse_bits(value["bits"], value["dtype"])
        except ValueError:
            return None
        return Number(bits, value["dtype"], "exact")
    return None
