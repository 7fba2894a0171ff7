"""`detrun list`: the experiments of an archive."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from detrun.cli.common import ArchiveOption, JsonOption, open_archive


def list_experiments(
    archive: ArchiveOption = None,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="How many of the newest; 0 is all.")] = 30,
    as_json: JsonOption = False,
) -> int:
    """Lists experiments, newest last, with their verdicts."""
    from detrun.records.index import read_index
    from detrun.report.list_rows import lines, rows

    store = open_archive(archive)
    entries = read_index(store)
    found = rows(entries[-count:] if count else entries)
    if as_json:
        json.dump(found, sys.stdout, indent=1)
        sys.stdout.write("\n")
        return 0
    console = Console()
    if not found:
        console.print(f"no experiments in {store.root}", markup=False, highlight=False)
        return 0
    console.print("\n".join(lines(found)), markup=False, highlight=False, soft_wrap=True)
    return 0
