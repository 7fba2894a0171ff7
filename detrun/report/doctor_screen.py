"""What doctor found, as values and as a screen: a line a check, the remedy below each that is not well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from detrun.errors import ExitCode
from detrun.records.files import one_line, printable
from detrun.report.wrapping import Labelled, wrapped

Status = Literal["ok", "warn", "fail", "unknown"]
SCHEMA_VERSION = 1
_STYLES: dict[str, str] = {"ok": "green", "warn": "yellow", "fail": "bold red", "unknown": "magenta"}
_LABEL = 9
_LIMIT = 600


@dataclass(frozen=True)
class Check:
    """One check. measured: what was seen, in words and numbers; remedy: what to do, where it is not well.

    fail: a first run would stumble over it. warn: it may cost something later. unknown: it could not be measured.
    """

    name: str
    status: Status
    measured: str
    remedy: str = ""
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkup:
    """All checks in the order they are shown, by section. where: the machine or cluster they are about."""

    where: str
    sections: tuple[tuple[str, tuple[Check, ...]], ...]
    seconds: float
    job: str | None = None

    @property
    def checks(self) -> list[Check]:
        return [check for _, checks in self.sections for check in checks]

    @property
    def exit_code(self) -> int:
        """4 where a check failed, 3 where something could not be measured, else 0."""
        seen = {check.status for check in self.checks}
        if "fail" in seen:
            return ExitCode.INFRASTRUCTURE
        return ExitCode.NOT_VERIFIED if "unknown" in seen else ExitCode.OK

    def as_dict(self) -> dict[str, Any]:
        """The document of `--json`. figures are in the unit that their name ends with."""
        return {
            "schema_version": SCHEMA_VERSION,
            "where": self.where,
            "job": self.job,
            "seconds": round(self.seconds, 1),
            "exit_code": int(self.exit_code),
            "checks": [{"section": title, **asdict(check)} for title, checks in self.sections for check in checks],
        }


def render(checkup: Checkup, console: Console) -> None:
    """The screen. Its first line says whether a first run may start."""
    width = console.width if console.is_terminal else None
    _print(console, Text(_headline(checkup)), width)
    for title, checks in checkup.sections:
        if not checks:
            continue
        _print(console, Text(), width)
        _print(console, Text(title, style="bold"), width)
        for check in checks:
            _print(console, _line(check), width)
            if check.status != "ok" and check.remedy:
                _print(console, Labelled.of("", f"remedy: {one_line(check.remedy, _LIMIT)}", _LABEL), width)
    if job := checkup.job:
        _print(console, Text(), width)
        _print(console, Text(f"job {one_line(job)} has ended, and its files are removed"), width)


def _headline(checkup: Checkup) -> str:
    counts = {status: sum(check.status == status for check in checkup.checks) for status in _STYLES}
    well = f"{counts['ok']} of {len(checkup.checks)} checks are well"
    if counts["fail"]:
        word, verb = "NOT READY", f"{counts['fail']} would stop a first run"
    elif counts["unknown"]:
        word, verb = "NOT KNOWN", f"{counts['unknown']} could not be measured"
    else:
        word, verb = "READY", ""
    rest = [verb] if verb else []
    rest += [f"{counts['warn']} to look at"] if counts["warn"] else []
    tail = f", {', '.join(rest)}" if rest else ""
    return f"{word}  {one_line(checkup.where)}: {well}{tail} ({checkup.seconds:.0f} s)"


def _line(check: Check) -> Text:
    text = f"{check.name}: {one_line(printable(check.measured), _LIMIT)}"
    line = Labelled.of(check.status, text, _LABEL)
    line.stylize(_STYLES[check.status], 0, len(check.status))
    return line


def _print(console: Console, line: Text, width: int | None) -> None:
    rows: Sequence[Text] = wrapped(line, width)
    for number, row in enumerate(rows):
        if number == 0 and row is not line and line.spans:
            row.stylize(line.spans[0].style, line.spans[0].start, line.spans[0].end)
        console.print(row, markup=False, highlight=False, soft_wrap=True)
