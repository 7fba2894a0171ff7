"""Log lines, by a named pattern. Fields are found by name, whatever stands around them; what is glued into a number or
cut off is a problem, never a number."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from detrun.records.files import one_line
from detrun.records.sources.number import parse_number
from detrun.records.sources.patterns import LogPattern, matches
from detrun.records.sources.reading import Found, Part, Reading
from detrun.records.sources.text import lines_of, without_colours

Finder = Callable[[str], list[str]]


@dataclass(slots=True)
class _Process:
    """Where the lines of one process are. begins: its first step, if known. last: the step of its last line; first: the
    first step of that line's means; following: the first step of the next line's."""

    begins: int | None = None
    last: int | None = None
    first: int = 0
    following: int = 0

    def take(self, step: int, keeps_first: bool) -> None:
        """Goes on to a line of another step."""
        if self.last is None:
            self.first = self.begins if self.begins is not None and self.begins < step else step
            kept = keeps_first and self.first == step
        else:
            self.first, kept = self.following, False
        self.last = step
        self.following = self.first if kept else step + 1


def read(part: Part, name: str, pattern: LogPattern, wanted: frozenset[str], begins: int | None = None) -> Found:
    """The readings of a part. begins: the first step of the process that wrote it, where that is known: a first line of
    a later step then has the means of the steps from there on."""
    found = Found()
    process = _Process(begins)
    starts = [re.compile(expression) for expression in pattern.starts]
    finders = {metric: _finder(pattern, metric) for metric in sorted(wanted)}
    for line in lines_of(part):
        text = without_colours(line.text)
        if process.last is not None and any(start.search(text) for start in starts):
            process = _Process()
        for step, chunk in _records(text, pattern):
            if line.torn:
                found.note("torn", f"line {line.number} is cut off", name, line.number, step)
                continue
            if process.last is not None and step < process.last:
                process = _Process()
            if step != process.last:  # a launcher that copies two ranks' output prints a line twice
                process.take(step, pattern.keeps_first)
            _take(found, chunk, step, process.first, name, line.number, pattern, finders)
    return found


def _records(text: str, pattern: LogPattern) -> Iterator[tuple[int, str]]:
    """(step, text that belongs to it) for every record that begins in a line; lines may be glued together."""
    if pattern.line is not None:
        for found in re.finditer(pattern.line, text):
            if found["step"] and found["step"].isdecimal() and len(found["step"]) < 16:
                yield int(found["step"]), found[0]
        return
    assert pattern.head is not None
    heads = [found for found in re.finditer(pattern.head, text) if len(found["step"]) < 16]
    for index, head in enumerate(heads):
        end = heads[index + 1].start() if index + 1 < len(heads) else len(text)
        yield int(head["step"]), text[head.end() - 1 : end]


def _finder(pattern: LogPattern, metric: str) -> Finder:
    """What finds the texts that stand for a metric's number in a record."""
    if pattern.line is not None:
        whole = re.compile(pattern.line)

        def by_group(chunk: str) -> list[str]:
            match = whole.search(chunk)
            text = match[metric] if match and metric in whole.groupindex else None
            return [] if text is None else [text]

        return by_group
    assert pattern.field is not None
    plain = re.compile(pattern.field.replace("{name}", re.escape(metric)))
    loose = None
    if pattern.glued is not None and matches(metric, pattern.fields):
        loose = re.compile(pattern.glued.replace("{name}", re.escape(metric)))

    def by_name(chunk: str) -> list[str]:
        texts = [match["number"] for match in plain.finditer(chunk)]
        if not texts and loose is not None:
            texts = [match["number"] for match in loose.finditer(chunk)]
        return texts

    return by_name


def _take(
    found: Found,
    chunk: str,
    step: int,
    first: int,
    name: str,
    line: int,
    pattern: LogPattern,
    finders: Mapping[str, Finder],
) -> None:
    skipped = _count(chunk, pattern.skipped, pattern)
    is_whole = pattern.whole is None or _count(chunk, pattern.whole, pattern) is not None
    lacking = []
    for metric, finder in finders.items():
        averaged = matches(metric, pattern.averaged)
        begins = first if averaged else step
        partial = averaged and skipped != 0
        texts = list(dict.fromkeys(finder(chunk)))
        if not texts:
            if averaged and pattern.omits and is_whole:
                found.readings.append(Reading(metric, step, None, name, line, begins, partial))
            elif metric in found.names:
                lacking.append(metric)
            continue
        found.names.add(metric)
        number = parse_number(texts[0]) if len(texts) == 1 else None
        if number is None:
            shown = one_line(" and ".join(texts), 60)
            what = (
                f"line {line}: {one_line(metric, 60)} is {'no number' if len(texts) == 1 else 'there twice'} ({shown})"
            )
            found.note("invalid", what, name, line, step)
            continue
        found.readings.append(Reading(metric, step, number, name, line, begins, partial))
    if lacking and not is_whole:
        what = f"line {line} is cut short or has other text in it: {one_line(', '.join(lacking), 80)} cannot be read"
        found.note("invalid", what, name, line, step)


def _count(chunk: str, field: str | None, pattern: LogPattern) -> int | None:
    """The whole number that a field of the record holds; 0 where the pattern knows no such field, None where the record
    should have it and has not."""
    if field is None:
        return 0
    texts = _finder(pattern, field)(chunk)
    return int(texts[-1]) if texts and texts[-1].isdecimal() and len(texts[-1]) < 16 else None
