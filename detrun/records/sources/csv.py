"""CSV files with a header: a column holds the step, others the metrics; an empty cell holds nothing.

A header that comes again (a program that appends after a resume) is no row, and one with other columns holds for the
rows below it.
"""

from __future__ import annotations

import csv
from itertools import chain

from detrun.records.files import one_line
from detrun.records.sources.number import parse_number
from detrun.records.sources.reading import Found, Part, Reading
from detrun.records.sources.text import as_step, head_of, lines_of


def read(part: Part, name: str, step_key: str, wanted: frozenset[str]) -> Found:
    """The readings of a part."""
    found = Found()
    lines = list(lines_of(part))
    torn = lines.pop() if lines and lines[-1].torn else None
    header = _cells(head_of(part)) if part.start else None
    for line in lines:
        cells = _cells(line.text)
        if not cells or cells == [""]:
            continue
        if header is None or step_key in cells:
            header = cells
            found.names |= {cell for cell in cells if cell != step_key}
            if step_key not in cells:
                found.note("invalid", f"has no column {one_line(step_key, 40)}", name, line.number)
                return found
            if twins := sorted({cell for cell in cells if cells.count(cell) > 1} & {step_key, *wanted}):
                found.note("invalid", f"line {line.number} names {one_line(twins[0], 60)} twice", name, line.number)
                return found
            continue
        if len(cells) != len(header):
            what = f"line {line.number} has {len(cells)} cells, its header has {len(header)}"
            found.note("invalid", what, name, line.number)
            continue
        row = dict(zip(header, cells, strict=True))
        here = {metric: row[metric] for metric in wanted if row.get(metric, "").strip()}
        step = as_step(row[step_key])
        if step is None:
            if here:
                found.note(
                    "invalid", f"line {line.number} has no step ({one_line(row[step_key], 40)})", name, line.number
                )
            continue
        for metric, text in here.items():
            number = parse_number(text)
            if number is None:
                what = f"line {line.number}: {one_line(metric, 60)} is no number ({one_line(text, 40)})"
                found.note("invalid", what, name, line.number, step)
            else:
                found.readings.append(Reading(metric, step, number, name, line.number, step))
    if torn is not None:
        found.note("torn", f"line {torn.number} is cut off", name, torn.number)
    return found


def _cells(line: str) -> list[str]:
    """One line's cells; a cell that runs over several lines is none that a metric stands in."""
    return list(chain.from_iterable(csv.reader([line], skipinitialspace=True)))
