"""A manual page in roff, from plain values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from detrun import __version__

EXIT_CODES = (
    ("0", "identical, or done"),
    ("1", "diverged"),
    ("2", "the recipe or the command line is wrong"),
    ("3", "not verified: evidence is missing or cannot be compared"),
    ("4", "infrastructure: a job could not be submitted, failed or was lost"),
    ("5", "skipped: locked, or already running"),
    ("70", "a bug of detrun"),
    ("130", "interrupted; jobs go on"),
)
ENVIRONMENT = (
    ("DETRUN_ARCHIVE", "The archive, where --archive is not given."),
    (
        "DETRUN_NOTIFY_URLS, DETRUN_NOTIFY_FILE",
        "Where nightly sends word: URLs, or a file for its owner alone.",
    ),
    ("SLURM_CONF", "Which Slurm cluster is meant."),
)


@dataclass(frozen=True)
class Described:
    """An option or argument: its forms (`--json`, `--set KEY=VALUE`) and its help."""

    forms: str
    help: str


@dataclass(frozen=True)
class CommandPage:
    """One command. usage: its words after `detrun`; text: paragraphs; parts: subcommands."""

    name: str
    summary: str
    usage: str
    text: Sequence[str]
    arguments: Sequence[Described] = ()
    options: Sequence[Described] = ()
    parts: Sequence[CommandPage] = ()


@dataclass(frozen=True)
class ManualPage:
    """name: `detrun` or `detrun-pair`; commands: those it describes, under headings of their own where `many`."""

    name: str
    summary: str
    text: Sequence[str]
    options: Sequence[Described]
    commands: Sequence[CommandPage]
    many: bool


def render(page: ManualPage) -> str:
    """The page in roff, ending with a newline. No date: a page is the same whenever it is made."""
    return "\n".join(_lines(page)) + "\n"


def _lines(page: ManualPage) -> Iterator[str]:
    yield f'.TH {page.name.upper()} 1 "" "detrun {__version__}" "User Commands"'
    yield ".nh"
    yield ".SH NAME"
    yield f"{escape(page.name)} \\- {escape(page.summary)}"
    yield ".SH SYNOPSIS"
    if page.many:
        yield '.B detrun\n.RI [ OPTIONS ] " " COMMAND " " [ ARGS ]...'
    else:
        for command in page.commands:
            yield from _usages(command)
    yield ".SH DESCRIPTION"
    yield from _paragraphs(page.text)
    if page.options:
        yield ".SH OPTIONS"
        yield from _described(page.options)
    if page.many:
        yield ".SH COMMANDS"
    for command in page.commands:
        yield from _command(command, heading=page.many)
    yield ".SH EXIT STATUS"
    yield from _described([Described(code, meaning) for code, meaning in EXIT_CODES])
    yield ".SH ENVIRONMENT"
    yield from _described([Described(name, meaning) for name, meaning in ENVIRONMENT])
    yield ".SH FILES"
    yield from _described([Described(".detrun/", "The archive where nothing else is said: a folder an experiment.")])


def _usages(command: CommandPage) -> Iterator[str]:
    for each in command.parts or [command]:
        yield f".B {escape('detrun ' + each.name)}"
        if each.usage:
            yield escape(each.usage)
        yield ".br"


def _command(command: CommandPage, heading: bool) -> Iterator[str]:
    if heading:
        yield f".SS {escape('detrun ' + command.name + ' ' + command.usage).strip()}"
        yield from _paragraphs([command.summary] if not command.text else command.text)
    for part in command.parts:
        yield from _command(part, heading=True)
    if command.arguments or command.options:
        if not heading:
            yield ".SH ARGUMENTS AND OPTIONS"
        yield from _described([*command.arguments, *command.options])


def _described(entries: Sequence[Described]) -> Iterator[str]:
    for entry in entries:
        yield ".TP"
        yield f".B {escape(entry.forms)}"
        yield escape(entry.help) if entry.help else "\\&"


def _paragraphs(texts: Sequence[str]) -> Iterator[str]:
    for number, text in enumerate(texts):
        if number:
            yield ".PP"
        yield escape(text)


# What roff, or a terminal's font, would print as another character.
_NAMED = {"'": "\\(aq", "`": "\\(ga", "^": "\\(ha", "~": "\\(ti", '"': "\\(dq"}


def escape(text: str) -> str:
    """Text as roff prints it: on one line, with nothing in it that roff would take for itself."""
    line = re.sub(r"\s+", " ", text).strip().replace("\\", "\\e").replace("-", "\\-")
    line = (
        line.replace("'", "\\(aq")
        .replace("`", "\\(ga")
        .replace("^", "\\(ha")
        .replace("~", "\\(ti")
        .replace('"', "\\(dq")
    )
    line = "".join(character if ord(character) < 128 else f"\\[u{ord(character):04X}]" for character in line)
    return f"\\&{line}" if line.startswith(".") else line
