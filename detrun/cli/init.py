"""`detrun init`: a commented recipe to start from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from detrun.errors import ExitCode, UsageError


def init(
    path: Annotated[Path, typer.Argument(help="Where to write it: a file or a folder.", metavar="PATH")] = Path(
        "detrun.yaml"
    ),
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")] = False,
    name: Annotated[
        str | None, typer.Option("--name", help="The recipe's name.", show_default="the folder's name")
    ] = None,
) -> int:
    """Writes a commented recipe, with every key explained, that runs as it is."""
    from detrun.recipe import plain_name, template

    if path.is_dir():
        path = path / "detrun.yaml"
    chosen = name if name is not None else plain_name(path.absolute().parent.name)
    if chosen != plain_name(chosen):
        raise UsageError(
            f"--name {chosen!r} is not letters, digits, dots, _ and -, beginning with a letter or digit",
            hint=f"for example --name {plain_name(chosen)}",
        )
    _write(path, template(chosen), force)
    sys.stdout.write(f"wrote {path}\n")
    typer.echo(f"detrun pair {path} --dry-run shows what it would launch.", err=True)
    return ExitCode.OK


def _write(path: Path, text: str, force: bool) -> None:
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} is there already", hint="--force overwrites it.") from None
    except FileNotFoundError:
        raise UsageError(f"the folder {path.parent} does not exist", hint=f"mkdir -p {path.parent}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
