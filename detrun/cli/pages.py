"""The commands as values for the manual page, read from what typer knows of them."""

from __future__ import annotations

import inspect
from typing import Any

from detrun.cli.app import COMMANDS, command_named, root
from detrun.errors import UsageError
from detrun.report.manpage import CommandPage, Described, ManualPage


def page_of_all() -> ManualPage:
    """detrun's page, with every command."""
    top = root()
    commands = [_command(name, command_named(name), entry.help) for name, entry in COMMANDS.items()]
    text = [*_paragraphs(top.help), "What can be given to it is below, command by command."]
    summary = "tests whether a training run is bitwise deterministic"
    return ManualPage("detrun", summary, text, _described(top, "option", with_help=True), commands, many=True)


def page_of_one(name: str) -> ManualPage:
    """One command's page. Raises UsageError for a word that is no command."""
    if name not in COMMANDS:
        raise UsageError(f"{name} is not a command", hint="detrun --help lists the commands.")
    command = _command(name, command_named(name), COMMANDS[name].help)
    summary = COMMANDS[name].help.rstrip(".")
    return ManualPage(f"detrun-{name}", summary[:1].lower() + summary[1:], command.text, (), [command], many=False)


def _command(name: str, command: Any, summary: str) -> CommandPage:
    parts = [
        _command(f"{name} {each}", part, _paragraphs(part.help)[0] if part.help else "")
        for each, part in getattr(command, "commands", {}).items()
    ]
    context = _context(command, name)
    usage = " ".join(piece for piece in command.collect_usage_pieces(context) if piece)
    arguments, options = _described(command, "argument"), _described(command, "option")
    return CommandPage(name, summary, usage, _paragraphs(command.help), arguments, options, parts)


def _described(command: Any, kind: str, with_help: bool = False) -> list[Described]:
    """Its arguments or options; --help, which each command has, with `with_help` alone."""
    context = _context(command, command.name or "detrun")
    return [
        Described(*record)
        for parameter in command.get_params(context)
        if parameter.param_type_name == kind
        and (record := parameter.get_help_record(context))
        and (parameter.name != "help" or with_help)
    ]


def _context(command: Any, name: str) -> Any:
    # Wide enough that no help is cut.
    return command.context_class(command, info_name=name, max_content_width=1000, terminal_width=1000)


def _paragraphs(text: str | None) -> list[str]:
    return [part for part in inspect.cleandoc(text or "").split("\n\n") if part.strip()]
