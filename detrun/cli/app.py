"""The commands by name. A command's module is imported when it is called, so that `detrun --help` answers at once.

To add a command, add a line to COMMANDS: the module, and in it either a function, whose parameters typer reads and
which returns an exit code (None is 0), or a `typer.Typer` of subcommands.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperGroup

from detrun import __version__
from detrun.cli.completers import completing, equip
from detrun.cli.ssh_options import HostOption, PasswordOption, ProgramOption, SshOption
from detrun.errors import ExitCode, UsageError


@dataclass(frozen=True)
class Entry:
    """One command: `module:function` (or `module:app`) that holds it, and its line in `detrun --help`."""

    target: str
    help: str


COMMANDS: dict[str, Entry] = {
    "init": Entry("detrun.cli.init:init", "Write a commented recipe."),
    "validate": Entry("detrun.cli.validate:validate", "Check a recipe; nothing is launched."),
    "pair": Entry("detrun.cli.pair:pair", "Launch the same training twice and compare every bit."),
    "resume-check": Entry("detrun.cli.resume_check:resume_check", "Interrupt a run, resume it, compare every bit."),
    "localize": Entry("detrun.cli.localize:localize", "Name the first operation that differs, and its bytes."),
    "diagnose": Entry("detrun.cli.diagnose:diagnose", "Change one thing at a time and see what makes the arms agree."),
    "trace": Entry("detrun.cli.trace:trace", "Record what the ranks compute, operation by operation."),
    "compare": Entry("detrun.cli.compare:compare", "Compare two recorded traces and name where they part."),
    "attach": Entry("detrun.cli.attach:attach", "Take up an experiment and wait for its verdict."),
    "status": Entry("detrun.cli.status:status", "Look at an experiment once."),
    "logs": Entry("detrun.cli.logs:logs", "Print what an arm's ranks printed."),
    "cancel": Entry("detrun.cli.cancel:cancel", "End an experiment's jobs."),
    "report": Entry("detrun.cli.report:report", "Judge an experiment's records again and write its report."),
    "list": Entry("detrun.cli.list:list_experiments", "List the experiments of an archive."),
    "history": Entry("detrun.cli.history:history", "Nights × recipes: since when one diverges, and what changed."),
    "nightly": Entry("detrun.cli.nightly:nightly", "Every recipe, once a night: check, localize, summarize."),
    "prune": Entry("detrun.cli.prune:prune", "Remove old logs, traces and checkpoints; fingerprints stay."),
    "fetch": Entry("detrun.cli.fetch:fetch", "Bring a verdict and its report from the machine it ran on."),
    "doctor": Entry("detrun.cli.doctor:doctor", "Check what a first run would trip over."),
    "checkpoint": Entry("detrun.cli.checkpoint:app", "Show, compare and audit checkpoint files."),
    "recorder": Entry("detrun.cli.recorder:app", "Export the recorder, for a container's bind mount."),
    "schema": Entry("detrun.cli.schema:schema", "Print the JSON Schema of a recipe or a verdict."),
    "completion": Entry("detrun.cli.completion:completion", "Print the script that completes lines in a shell."),
    "man": Entry("detrun.cli.man:man", "Print the manual page."),
}

# What detrun runs on other machines, and no person calls.
INTERNAL: dict[str, Entry] = {"far": Entry("detrun.cli.remote:far", "The far end of detrun --host.")}

# What typer raises for a wrong command line. It exports no such class, and brings a click of its own or the real one.
_CLICK_ERROR: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


class Commands(TyperGroup):
    """The group that looks commands up in COMMANDS."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002  click's signature
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        entry = COMMANDS.get(cmd_name) or INTERNAL.get(cmd_name)
        return None if entry is None else _load(cmd_name, entry)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = ctx.resilient_parsing or not args or args[0] in {**COMMANDS, **INTERNAL}
        if not known and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean detrun {near[0]}?" if near else "detrun --help lists the commands."
            raise UsageError(f"{args[0]} is not a command", hint=hint)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        words = [*ctx._protected_args, *ctx.args]
        given = {name: ctx.params.get(name) for name in ("host", "ssh", "remote_python", "ask_password")}
        if not words or not any(given.values()):
            return super().invoke(ctx)
        from detrun.cli.remote import make_login, run_remotely

        login = make_login(**given)
        name, command, rest = self.resolve_command(ctx, words)
        if name == "fetch":
            options = [f"--host={login.address}", f"--ssh={login.way}"]
            options += [f"--remote-python={login.program}"] if login.program else []
            ctx._protected_args, ctx.args = [name], [*options, *(["--ask-password"] * login.ask_password), *rest]
            ctx.params = {}
            return super().invoke(ctx)
        return run_remotely(login, name, command, rest, ctx)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """The table's commands, of which none is imported for it, and detrun's own options."""
        item = _completion_item()
        found = [item(name, help=entry.help) for name, entry in COMMANDS.items() if name.startswith(incomplete)]
        rest = super(TyperGroup, self).shell_complete(ctx, incomplete)
        return [*found, *(each for each in rest if each.value not in COMMANDS)]

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in COMMANDS.items()])


def _load(name: str, entry: Entry) -> Any:
    module, _, attribute = entry.target.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    if isinstance(found, typer.Typer):
        found.rich_markup_mode = None  # plain text, as everywhere
        found._add_completion = False
        command = typer.main.get_command(found)
    else:
        app = typer.Typer(**_LOOKS)
        app.command(name)(found)
        command = typer.main.get_command(app)
    command.name = name
    if completing():
        equip(command, _completion_item())
    return command


def _completion_item() -> Any:
    """typer's type of one answer to a shell; like its errors it is not exported."""
    package = _CLICK_ERROR.__module__.rpartition(".")[0]
    return importlib.import_module(f"{package}.shell_completion").CompletionItem


_LOOKS: dict[str, Any] = {
    "rich_markup_mode": None,
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
_app = typer.Typer(cls=Commands, **_LOOKS)


@_app.callback(invoke_without_command=True)
def detrun(
    ctx: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    host: HostOption = None,  # noqa: ARG001  these four are for Commands.invoke
    ssh: SshOption = None,  # noqa: ARG001
    remote_python: ProgramOption = None,  # noqa: ARG001
    ask_password: PasswordOption = False,  # noqa: ARG001
) -> None:
    """Tests whether a training run is bitwise deterministic, and whether it goes on exactly after an interruption."""
    if version:
        typer.echo(f"detrun {__version__}")
        raise typer.Exit(ExitCode.OK)
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help(), err=True)
        raise typer.Exit(ExitCode.USER)


def root() -> Any:
    """The command line as typer's object, for those who describe it."""
    return typer.main.get_command(_app)


def command_named(name: str) -> Any:
    """One command of the table as typer's object. Raises KeyError."""
    return _load(name, COMMANDS[name])


def run(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run its command; raises detrun's errors for all that is wrong with it."""
    command = root()
    if completing():
        importlib.import_module("typer.completion").completion_init()
    try:
        result = command.main(args=None if argv is None else list(argv), prog_name="detrun", standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except _CLICK_ERROR as error:
        raise _usage_error(error) from None
    return int(result or ExitCode.OK)


def _usage_error(error: Any) -> UsageError:
    what = error.format_message().replace("Value error, ", "").strip().rstrip(".")
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "detrun"
    if type(error).__name__ == "NoArgsIsHelpError":
        what = f"{path} wants a command"
    return UsageError(what[:1].lower() + what[1:], hint=f"{path} --help")
