"""Lines wrapped for a terminal."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from detrun.report.wrapping import GAP, Labelled, wrapped

words = st.lists(st.text("abc-,", min_size=1, max_size=9), min_size=1, max_size=30).map(" ".join)
facts = st.lists(words, min_size=1, max_size=5).map(GAP.join)


@given(facts, st.integers(30, 120), st.sampled_from(["", "label"]))
def test_no_word_is_lost_and_no_row_is_too_wide(text: str, width: int, label: str) -> None:
    for line in (Text(text), Labelled.of(label, text, 10)):
        rows = [row.plain for row in wrapped(line, width)]
        assert " ".join(rows).split() == line.plain.split()
        assert max(map(len, rows)) <= width


@given(facts, st.integers(40, 120))
def test_the_rest_stands_below_the_text(text: str, width: int) -> None:
    for row in wrapped(Labelled.of("label", text, 10), width)[1:]:
        assert re.match(r" {10}", row.plain)


def test_without_a_width_a_line_is_left_whole() -> None:
    line = Labelled.of("label", "word " * 100, 10)
    assert wrapped(line, None) == [line]


def test_facts_are_kept_together_where_there_is_room() -> None:
    text = GAP.join(["one fact", "another fact", "a third"])
    assert [row.plain for row in wrapped(Labelled.of("l", text, 4), 30)] == [
        "l   one fact     another fact",
        "    a third",
    ]


def test_a_word_that_no_line_holds_is_kept_whole_with_its_indentation() -> None:
    path = "/" + "x" * 50
    assert [row.plain for row in wrapped(Text(f"  {path} and more"), 30)] == [f"  {path}", "    and more"]
