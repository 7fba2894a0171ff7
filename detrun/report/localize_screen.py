"""The screen of a localization below its first line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from detrun.records.files import one_line
from detrun.records.jobs import ExperimentFile
from detrun.records.verdict import Verdict
from detrun.report import localize_rows, localize_words
from detrun.report.wrapping import GAP, Labelled

LABEL = 21
"""Columns of the labels, where none is longer."""

INDENT = 8
MAX_LABEL = 40
MAX_CLEAN_ROWS = 12
MAX_BITMAPS = 1
MAX_BITMAP_LINES = 16


def body(verdict: Verdict, experiment: ExperimentFile) -> Iterator[Text]:
    """What stands between the first line and the facts about the runs."""
    for facts in localize_words.below_the_head(verdict, experiment):
        yield _labelled("", facts, INDENT)
    brackets = localize_words.brackets(verdict)
    if brackets:
        yield Text()
    for label, facts in brackets:
        yield _labelled(label, facts, max(len(each) for each, _ in brackets) + 2)
    rows = localize_rows.rows(verdict, experiment)
    if rows:
        yield Text()
    width = max([LABEL, *(len(clean(row.label, MAX_LABEL)) + 2 for row in rows)])
    for row in rows:
        yield _labelled(row.label, row.facts, width)
    yield from _bitmap(verdict)
    yield from _clean_table(verdict)


def _labelled(label: str, facts: Sequence[str], width: int) -> Text:
    return Labelled.of(clean(label, MAX_LABEL), GAP.join(clean(fact) for fact in facts), width)


def _bitmap(verdict: Verdict) -> Iterator[Text]:
    for text in localize_rows.bitmaps(verdict)[:MAX_BITMAPS]:
        lines = text.splitlines()
        yield Text()
        yield Text("where in the tensor the differing elements lie:")
        for line in lines[:MAX_BITMAP_LINES]:
            yield Text(f"  {clean(line)}")


def _clean_table(verdict: Verdict) -> Iterator[Text]:
    rows = localize_rows.clean_table(verdict)
    if not rows:
        return
    yield Text()
    shown = rows[:MAX_CLEAN_ROWS]
    widths = [
        max(len(name), *(len(f"{number:,}") for number in numbers))
        for name, numbers in (
            ("clean", [row.clean for row in shown]),
            ("differ", [row.differing for row in shown]),
        )
    ]
    width = sum(widths) + 4
    heading = f"{'clean':>{widths[0]}}  {'differ':>{widths[1]}}"
    yield Labelled.of(heading, clean(f"calls of {localize_rows.guilty_of_table(verdict)}"), width, style="bold")
    for row in shown:
        numbers = f"{row.clean:>{widths[0]},}  {row.differing:>{widths[1]},}"
        yield Labelled.of(numbers, clean(f"{row.by} {row.value}".strip()), width)
    if len(rows) > MAX_CLEAN_ROWS:
        yield Text(f"and {len(rows) - MAX_CLEAN_ROWS:,} more, all in report.html")


def clean(text: str, limit: int = 2000) -> str:
    """Text of foreign origin on one line."""
    return one_line(text, limit)
