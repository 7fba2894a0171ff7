"""`detrun doctor`: what a first run would trip over, and what to do about it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from detrun.cli.common import ArchiveOption, SetOption, open_archive, say


def doctor(
    recipe: Annotated[
        Path | None,
        typer.Argument(help="The recipe whose first run is meant; without one, this site as such.", metavar="RECIPE"),
    ] = None,
    overrides: SetOption = None,
    archive: ArchiveOption = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out who gets which signal, and requeueing (Slurm only).")
    ] = False,
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes",
            min=1,
            max=64,
            metavar="N",
            help="Nodes of the job; without it two, if there are two.",
            show_default=False,
        ),
    ] = None,
    wait: Annotated[
        float, typer.Option("--wait", min=0, metavar="MINUTES", help="How long the job may wait in the queue.")
    ] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="The checks as one JSON document on stdout.")] = False,
) -> int:
    """Checks what a first run would trip over, on Slurm by a small job of its own, each line with its remedy.

    The job asks for at most 5 minutes and is gone afterwards, as are its files. Exit code 0: ready. 3: something could
    not be measured. 4: something failed that would stop a first run.
    """  # fmt: skip
    from detrun.experiments.doctor import DoctorOptions, examine
    from detrun.recipe import load_recipe
    from detrun.report.doctor_screen import render

    loaded = load_recipe(recipe, overrides or ()) if recipe else None
    store = open_archive(archive, loaded.archive if loaded else None)
    checkup = examine(loaded, store, DoctorOptions(quick, nodes, wait), say)
    if as_json:
        json.dump(checkup.as_dict(), sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        render(checkup, Console())
    return checkup.exit_code
