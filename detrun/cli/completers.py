"""What a shell is offered while a command line is typed: recipes, experiment ids.

An argument or option is known by its name in the help: RECIPE stands for a recipe's file, ID for an experiment. So a
command that uses these names is completed without a word more. Nothing here may be slow or raise.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

from detrun.errors import DetrunError

VARIABLE = "_DETRUN_COMPLETE"
"""Set by the scripts that `detrun completion` prints: the question a shell asks."""

SHOWN = 100
# The answer is read by a shell: a name with a character that could mean something there is not offered.
_PLAIN = re.compile(r"[\w.,+@/=~-]+")
_RECIPE_ENDINGS = (".yaml", ".yml")

Completer = Callable[[Any, str], Iterator[str]]


def completing() -> bool:
    """Whether this process was started by a shell to complete a line."""
    return VARIABLE in os.environ


def equip(command: Any, item: Callable[[str], Any]) -> None:
    """Gives the parameters of a command, and of its subcommands, what completes them. item: makes typer's type."""
    for parameter in command.params:
        if completer := completer_of(parameter):
            parameter.shell_complete = _answer(completer, item)
    for each in getattr(command, "commands", {}).values():
        equip(each, item)


def completer_of(parameter: Any) -> Completer | None:
    """What completes a parameter, by its name in the help."""
    words = re.findall(r"[A-Z]+", str(parameter.metavar or (parameter.name or "").upper()))
    fitting: list[Completer] = [experiment_ids] if "ID" in words else []
    if any(word.startswith("RECIPE") for word in words):
        fitting.append(recipes)
    return (lambda ctx, incomplete: chain(*(each(ctx, incomplete) for each in fitting))) if fitting else None


def _answer(completer: Completer, item: Callable[[str], Any]) -> Callable[[Any, str], list[Any]]:
    def complete(ctx: Any, incomplete: str) -> list[Any]:
        with suppress(DetrunError, OSError, ValueError):
            plain = (value for value in completer(ctx, incomplete) if _PLAIN.fullmatch(value))
            return [item(value) for value in islice(plain, SHOWN)]
        return []

    return complete


def experiment_ids(ctx: Any, incomplete: str) -> Iterator[str]:
    """Ids of the archive in force, newest first, that begin so or whose last part does; `@latest` before them.

    By the names alone, and looking only into folders that are offered: an archive may hold ten thousand.
    """
    from detrun.records.archive import LATEST, Archive
    from detrun.records.layout import MARKER

    if LATEST.startswith(incomplete):
        yield LATEST
    root = Archive.find(ctx.params.get("archive")).root
    fitting = []
    for name in os.listdir(root):  # noqa: PTH208  (a Path each costs more than the listing)
        stem, _, last = name.rpartition("-")
        if name.startswith(incomplete) or (len(incomplete) > 1 and last.startswith(incomplete)):
            fitting.append((stem.rpartition("-")[2], name))
    for _, name in sorted(fitting, reverse=True):
        if (root / name / MARKER).exists():
            yield name


def recipes(_ctx: Any, incomplete: str) -> Iterator[str]:
    """YAML files and folders that begin so, as a path is typed."""
    typed, _, beginning = incomplete.rpartition("/")
    head = f"{typed}/" if "/" in incomplete else ""
    slash = "" if os.environ.get(VARIABLE) == "complete_bash" else "/"  # bash adds its own
    with os.scandir(Path(head or ".").expanduser()) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if not entry.name.startswith(beginning) or (entry.name.startswith(".") and not beginning):
                continue
            if entry.is_dir():
                yield f"{head}{entry.name}{slash}"
            elif entry.name.endswith(_RECIPE_ENDINGS):
                yield f"{head}{entry.name}"
