"""The options that say how another machine is reached; apart, since `detrun --help` shows them too."""

from __future__ import annotations

from typing import Annotated

import typer

WAYS = ("paramiko", "openssh")

HostOption = Annotated[
    str | None,
    typer.Option(
        "--host",
        help="Run the command there, over SSH: [user@]host[:port] or an alias of ssh's.",
        metavar="HOST",
        show_default=False,
    ),
]
SshOption = Annotated[
    str | None,
    typer.Option(
        "--ssh", help="Who connects: paramiko, or openssh for the system's ssh.", metavar="WAY", show_default="paramiko"
    ),
]
ProgramOption = Annotated[
    str | None,
    typer.Option(
        "--remote-python",
        help="A Python there that has detrun, where it is not on PATH.",
        metavar="PATH",
        show_default="DETRUN_REMOTE, else detrun",
    ),
]
PasswordOption = Annotated[bool, typer.Option("--ask-password", help="Ask for a password first.")]
