"""`detrun list`: the experiments of an archive."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from detrun.cli.common import ArchiveOption, JsonOption, open_archive, read_verdict


def list_experiments(
    archive: ArchiveOption = None,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="How many of the newest; 0 is all.")] = 30,
    as_json: JsonOption = False,
) -> int:
    """Lists experiments, newest last, with their verdicts."""
    from detrun.errors import RecordError
    from detrun.records.files import one_line
    from detrun.records.jobs import ExperimentFile
    from detrun.report.answer import word

    store = open_archive(archive)
    rows: list[dict[str, str | None]] = []
    folders = store.list()
    for folder in folders[-count:] if count else folders:
        row: dict[str, str | None] = {
            "id": folder.id,
            "recipe": None,
            "verdict": "no verdict yet",
            "first": None,
            "culprit": None,
        }
        try:
            row["recipe"] = ExperimentFile.read(folder.experiment_file).recipe_name
        except RecordError as error:
            row["verdict"] = str(error)
        if verdict := read_verdict(folder):
            row["verdict"] = word(verdict)
            if verdict.first_divergence is not None:
                begin = verdict.first_divergence.boundary == "begin"
                row["first"] = "before the first step" if begin else f"step {verdict.first_divergence.step}"
            if verdict.culprit is not None:
                # Of what it is may be many names long.
                name = str(verdict.culprit.get("name") or "").partition(" of ")[0]
                row["culprit"] = name.removesuffix(".default") or None
        rows.append(row)
    if as_json:
        json.dump(rows, sys.stdout, indent=1)
        sys.stdout.write("\n")
        return 0
    console = Console()
    if not rows:
        console.print(f"no experiments in {store.root}", markup=False, highlight=False)
        return 0
    cells = [[one_line(row[key] or "", 1000) for key in ("id", "verdict", "first", "culprit")] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for each in cells:
        text = "  ".join(cell.ljust(width) for cell, width in zip(each, widths, strict=True))
        console.print(text.rstrip(), markup=False, highlight=False, soft_wrap=True)
    return 0
