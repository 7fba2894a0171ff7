"""Steps, ranks and sizes as they are written on a command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detrun.cli.windows import parse_bytes, parse_ranks, parse_steps
from detrun.compare.folding import ranges
from detrun.errors import UsageError


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_steps, None, None),
        (parse_steps, "7", (7, 7)),
        (parse_steps, "7-9", (7, 9)),
        (parse_steps, " 1-1 ", (1, 1)),
        (parse_ranks, None, None),
        (parse_ranks, "0", (0,)),
        (parse_ranks, "0,2-3", (0, 2, 3)),
        (parse_ranks, "3, 1,1", (1, 3)),
        (parse_bytes, "4096", 4096),
        (parse_bytes, "512MiB", 512 << 20),
        (parse_bytes, "1GB", 10**9),
        (parse_bytes, "1.5 kB", 1500),
        (parse_bytes, "2tib", 2 << 40),
    ],
)
def test_what_is_written_is_what_is_meant(parse: Callable[[Any], object], text: str | None, value: object) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text", "said", "hint"),
    [
        (parse_steps, "seven", "is no step and no range of steps", "--steps 7, or --steps 7-9"),
        (parse_steps, "", "is no step", "--steps 7"),
        (parse_steps, "7-", "is no step", "--steps 7"),
        (parse_steps, "0-3", "counted from 1", "--steps 1-3"),
        (parse_steps, "9-7", "ends before it begins", "--steps 7-9"),
        (parse_steps, "-7", "is no step", "--steps 7"),
        (parse_ranks, "", "is no list of ranks", "--ranks 0,2-3"),
        (parse_ranks, "0,,1", "is no list of ranks", "--ranks 0,2-3"),
        (parse_ranks, "all", "is no list of ranks", "--ranks 0,2-3"),
        (parse_ranks, "3-2", "ends before it begins", "2-3"),
        (parse_ranks, "0-999999999", "there is no rank 999,999,999", None),
        (parse_bytes, "much", "is no size", "--bytes 512MiB"),
        (parse_bytes, "1 parsec", "is no size", "--bytes 512MiB"),
        (parse_bytes, "0", "is not between 1 byte and 1024 PiB", None),
        (parse_bytes, "9999999TiB", "is not between 1 byte and 1024 PiB", None),
    ],
)
def test_what_is_wrong_is_told_with_what_is_right(
    parse: Callable[[str], object], text: str, said: str, hint: str | None
) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert said in caught.value.what
    assert (hint or "") in (caught.value.hint or "")


@given(st.sets(st.integers(0, 500), min_size=1))
def test_ranks_as_reports_write_them_are_understood(ranks: set[int]) -> None:
    assert parse_ranks(ranges(ranks, most=1000)) == tuple(sorted(ranks))


@given(st.text(max_size=20))
def test_whatever_is_written_is_a_value_or_an_error_of_the_user(text: str) -> None:
    for parse in (parse_steps, parse_ranks, parse_bytes):
        try:
            parse(text)
        except UsageError as error:
            assert error.what.startswith("--")
