"""A night as JUnit XML: red is what diverged, an error is whatever was not proved, and nothing is skipped."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import junitparser

from detrun.records.nights import Item, Night
from detrun.report.junit import night_xml


def item(recipe: str, kind: Any = "pair", **fields: Any) -> Item:
    return Item(**{"recipe": recipe, "path": f"/r/{recipe}.yaml", "kind": kind, "state": "done", **fields})


def parse(*items: Item) -> Any:
    return junitparser.JUnitXml.fromstring(night_xml(Night(night="n", created="2026-11-30T02:30:00Z", items=[*items])))


IDENTICAL = {"verdict": "identical", "exit_code": 0, "what": "IDENTICAL  x"}
DIVERGED = {
    "verdict": "diverged",
    "exit_code": 1,
    "what": "DIVERGED  at step 7",
    "experiment": "m-pair-1",
    "seconds": 12.5,
}


def test_each_kind_of_end_is_what_it_is() -> None:
    found = parse(
        item("good", **IDENTICAL),
        item("good", "resume-check", **IDENTICAL),
        item("moe", **DIVERGED),
        item("moe", "resume-check", state="left-out", exit_code=3, what="not checked: the pair is not identical"),
        item("moe", "localize", verdict="diverged", exit_code=1, of="m-pair-1", what="ORIGIN  aten.index_put_"),
        item("cut", verdict="not-verified", exit_code=3, what="NOT VERIFIED  arm b ends at step 3"),
        item("lost", verdict="not-verified", exit_code=4, what="NOT VERIFIED  arm b was lost"),
        item("typo", state="error", exit_code=2, what="line 2: launch.comand is not a known key"),
        item("late", state="running"),
    )
    assert (found.tests, found.failures, found.errors, found.skipped) == (8, 1, 5, 0)
    results = {
        f"{case.classname} {case.name}": [(type(result).__name__, result.type) for result in case.result]
        for suite in found
        for case in suite
    }
    assert results == {
        "good pair": [],
        "good resume-check": [],
        "moe pair": [("Failure", "diverged")],
        "moe resume-check": [("Error", "not-verified")],
        "cut pair": [("Error", "not-verified")],
        "lost pair": [("Error", "infrastructure")],
        "typo pair": [("Error", "recipe")],
        "late pair": [("Error", "unfinished")],
    }
    case = next(case for suite in found for case in suite if case.classname == "moe")
    assert case.result[0].message == "DIVERGED  at step 7; ORIGIN  aten.index_put_"
    assert "m-pair-1" in case.result[0].text and case.time == 12.5


def test_whatever_the_training_side_says_is_text(tmp_path: Path) -> None:
    hostile = "</failure><script>\x1b[2J\x00\ud800]]> & \ufffe"
    raw = night_xml(
        Night(night="n", created="c", items=[item("x", **{**DIVERGED, "what": hostile}), item(hostile, **IDENTICAL)])
    )
    root = ElementTree.fromstring(raw)
    assert not [*root.iter("script")] and b"\x1b" not in raw
    failure = next(root.iter("failure"))
    assert failure.attrib["message"].startswith("</failure><script>")


def test_a_night_without_items_is_one_all_the_same() -> None:
    assert parse().tests == 0
