"""The error tree: as drawn, each with its exit code, and how one reads."""

from __future__ import annotations

import re

import pytest

from detrun import errors
from detrun.errors import DetrunError, ExitCode, RecipeError


def family(base: type[DetrunError]) -> set[type[DetrunError]]:
    return {base}.union(*(family(child) for child in base.__subclasses__()))


def test_the_drawing_shows_every_error_below_its_parent_with_its_code() -> None:
    drawn: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^    ([│├└─ ]*)(\w+Error)\s+([0-9]+)?", line)
        if not found:
            continue
        depth = len(found[1]) // 4
        drawn = [*drawn, (depth, found[2])]
        cls = getattr(errors, found[2])
        if found[3]:
            assert cls.exit_code == int(found[3]), found[2]
        if depth:
            parent = next(name for level, name in reversed(drawn) if level == depth - 1)
            assert cls.__base__ is getattr(errors, parent), found[2]
    assert {name for _, name in drawn} == {
        cls.__name__ for cls in family(DetrunError) if cls.__module__ == "detrun.errors"
    }


@pytest.mark.parametrize("cls", sorted(family(DetrunError), key=lambda cls: cls.__name__))
def test_every_error_has_an_exit_code_that_is_documented(cls: type[DetrunError]) -> None:
    assert cls.exit_code in set(ExitCode) - {ExitCode.OK, ExitCode.DIVERGED, ExitCode.INTERRUPTED}


def test_an_error_reads_as_what_where_and_what_to_do() -> None:
    error = RecipeError(
        "launch.ranks_per_nod is not a known key",
        where="recipes/moe.yaml, line 9",
        excerpt=["9 |   ranks_per_nod: 8", "      ^^^^^^^^^^^^^"],
        hint="did you mean ranks_per_node? `detrun init` writes a commented recipe.",
    )
    assert error.render() == (
        "error: recipes/moe.yaml, line 9: launch.ranks_per_nod is not a known key\n"
        "\n"
        "  9 |   ranks_per_nod: 8\n"
        "        ^^^^^^^^^^^^^\n"
        "hint: did you mean ranks_per_node? `detrun init` writes a commented recipe."
    )
    assert str(error) == "recipes/moe.yaml, line 9: launch.ranks_per_nod is not a known key"
    assert DetrunError("it broke").render() == "error: it broke"
