"""A night's one line, its news, and what is told of it."""

from __future__ import annotations

from typing import Any

import pytest

from detrun.records.nights import Item
from detrun.report.night_words import has_news, message, state_of, summary


def item(recipe: str, verdict: str | None = "identical", kind: Any = "pair", **fields: Any) -> Item:
    codes = {"identical": 0, "diverged": 1, "not-verified": 3}
    made: dict[str, Any] = {"recipe": recipe, "path": f"/r/{recipe}.yaml", "kind": kind, "state": "done"}
    made.update(verdict=verdict, exit_code=codes.get(verdict or ""), what=f"what {recipe} came to", **fields)
    return Item(**made)


def error(recipe: str, code: int = 2) -> Item:
    return Item(recipe=recipe, path=f"/r/{recipe}.yaml", kind="pair", state="error", exit_code=code, what="is refused")


def test_the_worst_comes_first_and_what_is_not_identical_by_name() -> None:
    items = [
        item("ssm"),
        item("moe", "diverged", step=7),
        item("moe", "diverged", "localize", of="x"),
        item("cut", "not-verified"),
        error("typo"),
    ]
    assert summary("2026-11-30", items) == (
        "DIVERGED  night 2026-11-30: 4 recipes: 1 diverged (moe: pair at step 7, what moe came to), "
        "1 error (typo: pair: is refused), 1 not verified (cut: pair: what cut came to), 1 identical (ssm)"
    )
    assert summary("n", [item("a"), item("b")]) == "IDENTICAL  night n: 2 recipes: 2 identical"
    assert summary("n", [error("a")]).startswith("ERROR  night n: 1 recipe: 1 error (a: pair: is refused)")


def test_what_was_not_localized_is_said() -> None:
    left = Item(recipe="moe", path="/r/moe.yaml", kind="localize", state="left-out", what="the budget")
    assert summary("n", [item("moe", "diverged", step=7), left]).endswith("(moe: pair at step 7); not localized: moe")


def test_a_word_is_not_said_twice() -> None:
    cut = item("cut", "not-verified")
    cut.what = "NOT VERIFIED  cut: arm b ends at step 3"
    assert summary("n", [cut]) == ("NOT VERIFIED  night n: 1 recipe: 1 not verified (cut: pair: arm b ends at step 3)")


def test_many_are_counted() -> None:
    line = summary("n", [error(f"r{number:03d}") for number in range(40)])
    assert "40 error" in line and "35 more" in line and "\n" not in line


@pytest.mark.parametrize(
    ("items", "state"),
    [
        ([item("a")], "identical"),
        ([item("a"), item("a", "diverged", "resume-check")], "diverged"),
        ([item("a", "diverged"), error("a", 4)], "diverged"),
        ([item("a"), error("a", 4)], "error"),
        ([item("a", "not-verified")], "not verified"),
        ([item("a"), item("a", "identical", "localize")], "identical"),
        ([item("a", None)], "error"),
    ],
)
def test_a_recipes_state(items: list[Item], state: str) -> None:
    assert state_of(items) == state


def test_news_is_any_check_that_came_out_otherwise() -> None:
    path = "/r/a.yaml"
    assert has_news([item("a")], {})
    assert not has_news([item("a")], {path: [item("a")]})
    assert not has_news([item("a", what_else=1)], {path: [item("a"), item("a", "diverged", "localize")]})
    assert has_news([item("a", "diverged")], {path: [item("a")]})
    assert has_news([item("a")], {path: [item("a"), item("a", "identical", "resume-check")]})
    assert not has_news([error("a")], {path: [error("a")]})
    assert has_news([error("a", 4)], {path: [error("a")]})


def test_a_change_is_told_with_what_was_before() -> None:
    before = {"/r/a.yaml": [item("a")], "/r/b.yaml": [item("b", "diverged")], "/r/c.yaml": [item("c")]}
    told = message("n", [item("a", "diverged", step=3), item("b"), item("c"), error("d")], before)
    assert told.changes == [
        "a: diverged, was identical the night before: pair: what a came to",
        "b: identical, was diverged the night before",
        "d: error, its first night: pair: is refused",
    ]
    assert told.bad and len(told.state) == 4
    assert not message("n", [item("c")], before).changes


def test_what_the_training_side_says_stays_one_line() -> None:
    hostile = item("a", "diverged", step=1)
    hostile.what = "x\n\x1b[2Jy" * 200
    assert "\n" not in summary("n", [hostile])
    assert all("\n" not in line and len(line) < 700 for line in message("n", [hostile], {}).changes)
