"""`detrun completion`: the script that lets a shell complete commands, options, recipes and experiment ids."""

from __future__ import annotations

import importlib
import sys
from enum import Enum
from typing import Annotated

import typer

from detrun.cli.completers import VARIABLE


class Shell(str, Enum):
    """Shells that have a script."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def completion(shell: Annotated[Shell, typer.Argument(help="bash, zsh or fish.", show_default=False)]) -> int:
    """Prints a script that completes commands, options, recipes and experiment ids in a shell.

    In bash (4.4 or newer) put eval "$(detrun completion bash)" into ~/.bashrc; in zsh the same with zsh into ~/.zshrc,
    after compinit; in fish put the script into ~/.config/fish/completions/detrun.fish.
    """
    machinery = importlib.import_module("typer.completion")  # which exports nothing by its types
    script = machinery.get_completion_script(prog_name="detrun", complete_var=VARIABLE, shell=shell.value)
    # Newest experiments first, as they come; and no blank after a folder's name.
    script = script.replace("complete -o default", "complete -o nosort -o filenames -o default")
    script = script.replace("complete --command", "complete --keep-order --command")
    sys.stdout.write(f"{script}\n")
    return 0
