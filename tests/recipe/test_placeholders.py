"""Placeholders: a name in braces, and nothing that runs or reaches into an object."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detrun.errors import RecipeError
from detrun.recipe import PLACEHOLDERS, escape, expand
from detrun.recipe.placeholders import check

VALUES = {"seed": 1234, "out": "/a b/{x}", "steps": 3}


def test_values_are_put_in_once() -> None:
    assert expand("--x={seed}:{out}", VALUES) == "--x=1234:/a b/{x}"


def test_doubled_braces_are_braces() -> None:
    assert expand('{{"lr": {seed}}}', VALUES) == '{"lr": 1234}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{sed}", "error: {sed} is not a placeholder in '{sed}'\nhint: did you mean {seed}?"),
        ("{Seed}", "error: {Seed} is not a placeholder in '{Seed}'\nhint: did you mean {seed}?"),
        ("{seed.real}", "error: {seed.real} is not a placeholder in '{seed.real}'\nhint: did you mean {seed}?"),
        ("{seed!r}", "error: {seed!r} is not a placeholder in '{seed!r}'\nhint: did you mean {seed}?"),
        (
            "{0}",
            "error: {0} is not a placeholder in '{0}'\n"
            "hint: write {{ and }} for braces; placeholders here: {seed} {out} {steps}",
        ),
        ("a}", "error: a } stands alone in 'a}'\nhint: write }} for a brace."),
        ("{", "error: a { stands alone in '{'\nhint: write {{ for a brace."),
        ("{arm}", "error: {arm} has no value here in '{arm}'\nhint: {arm} is a, b, c, …."),
    ],
)
def test_what_is_no_placeholder(text: str, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        expand(text, VALUES)
    assert caught.value.render() == said


@given(st.text())
def test_escaped_text_comes_back(text: str) -> None:
    assert expand(escape(text), {}) == text
    assert check(escape(text)) is None


@given(st.lists(st.one_of(st.text(), st.sampled_from(sorted(PLACEHOLDERS)).map("{{{}}}".format)), max_size=6))
def test_nothing_but_a_recipe_error(parts: list[str]) -> None:
    text = "".join(parts)
    values = dict.fromkeys(PLACEHOLDERS, "v")
    fault = check(text)
    if fault is None:
        assert isinstance(expand(text, values), str)
    else:
        with pytest.raises(RecipeError):
            expand(text, values)


@given(st.lists(st.tuples(st.text(), st.sampled_from(sorted(PLACEHOLDERS))), max_size=5))
def test_mixed_text_is_expanded_piece_by_piece(pieces: list[tuple[str, str]]) -> None:
    values = {name: f"<{name}>{{" for name in PLACEHOLDERS}
    text = "".join(f"{escape(literal)}{{{name}}}" for literal, name in pieces)
    assert expand(text, values) == "".join(f"{literal}{values[name]}" for literal, name in pieces)
