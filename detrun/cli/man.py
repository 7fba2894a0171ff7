"""`detrun man`: the manual page, made from the help of the commands."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def man(
    command: Annotated[
        str | None, typer.Argument(help="One command's page; without it detrun's, which holds all.", metavar="COMMAND")
    ] = None,
) -> int:
    """Prints a manual page as man reads it: detrun man | man -l -."""
    from detrun.cli.pages import page_of_all, page_of_one
    from detrun.report.manpage import render

    sys.stdout.write(render(page_of_one(command) if command else page_of_all()))
    return 0
