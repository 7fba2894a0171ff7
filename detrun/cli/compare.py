"""`detrun compare`: two recorded traces held against each other, offline."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from detrun.cli.common import ArchiveOption, open_archive
from detrun.errors import UsageError
from detrun.records.files import one_line

if TYPE_CHECKING:
    from detrun.records.layout import AttemptFolder

_ARM_HELP = "A folder of an attempt or of an arm, or ID:ARM for an arm of an experiment."


def compare(
    a: Annotated[str, typer.Argument(help=_ARM_HELP, metavar="A", show_default=False)],
    b: Annotated[str, typer.Argument(help="Another one.", metavar="B", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    recompute: Annotated[
        bool,
        typer.Option("--recompute", help="Look for recomputations unlike their forward in equal steps too."),
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Read every event, also where the digests of a step agree.")
    ] = False,
    archive: ArchiveOption = None,
) -> int:
    """Compares two recorded traces and names the first event that differs by itself.

    Exit code 0 if nothing differs and both traces are complete, 1 if they differ, 3 if they cannot be compared or a
    part of them is missing.
    """
    from detrun.experiments.compare_traces import compare_traces
    from detrun.report.trace_text import answer, details, exit_code
    from detrun.report.wrapping import Labelled

    left, right = _attempt(a, archive), _attempt(b, archive)
    comparison = compare_traces(left, right, recompute=recompute, skip_equal=not full)
    code = exit_code(comparison)
    if as_json:
        document = {"a": str(left.path), "b": str(right.path), "answer": answer(comparison), **comparison.as_dict()}
        text = json.dumps({"schema_version": 1, "exit_code": int(code), **document}, indent=1, ensure_ascii=True)
        sys.stdout.write(f"{text}\n")
        return code
    console = Console()
    style = {0: "bold green", 1: "bold red"}.get(int(code), "bold yellow")
    _line(console, Text(answer(comparison), style=style))
    lines = [("A", one_line(str(left.path), 1000)), ("B", one_line(str(right.path), 1000)), *details(comparison)]
    width = max(len(label) for label, _ in lines)
    for label, text in lines:
        _line(console, Labelled.of(f"  {label}", text, width + 4))
    return code


def _line(console: Console, text: Text) -> None:
    from detrun.report.wrapping import wrapped

    for piece in wrapped(text, console.width if console.is_terminal else None):
        console.print(piece, highlight=False, markup=False, emoji=False, soft_wrap=True)


def _attempt(name: str, archive: Path | None) -> AttemptFolder:
    """The attempt that an argument names; UsageError where there is none with a trace."""
    from detrun.records.layout import AttemptFolder, attempts_in

    path = Path(name)
    try:
        is_folder = path.is_dir()
    except (OSError, ValueError):
        is_folder = False
    if is_folder:
        if path.name == "trace" and not (path / "trace").is_dir():
            path = path.resolve().parent
        if (path / "trace").is_dir():
            return AttemptFolder(path, path.parent.name, 0)
        attempts = [each for each in attempts_in(path.resolve()) if each.trace_dir.is_dir()]
        if attempts:
            return attempts[-1]
        arms = path / "arms"
        hint = f"name an arm of it: {arms}/a" if arms.is_dir() else "detrun trace records one"
        raise UsageError(f"{one_line(name, 1000)} holds no trace", hint=hint)
    id, colon, arm = name.rpartition(":")
    if not colon or not id or not arm:
        raise UsageError(
            f"{one_line(name, 1000)} is not a folder", hint="name a folder, or an experiment's arm as ID:ARM"
        )
    folder = open_archive(archive).resolve(id)
    attempts = [each for each in folder.attempts(arm) if each.trace_dir.is_dir()]
    if not attempts:
        traced = [
            each.path for place in folder.passes().values() for each in place.attempts(arm) if each.trace_dir.is_dir()
        ]
        hint = f"its last pass has one: {traced[-1]}" if traced else f"its arms are in {folder.path}/arms"
        raise UsageError(f"arm {one_line(arm, 80)} of {folder.id} holds no trace", hint=hint)
    return attempts[-1]
