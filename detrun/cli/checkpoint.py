"""`detrun checkpoint show | diff | audit`: checkpoint files, read without the program that wrote them."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from detrun.errors import ExitCode, RecordError, UsageError
from detrun.records.files import one_line

if TYPE_CHECKING:
    from detrun.checkpoints.diff import Comparison, Difference
    from detrun.checkpoints.entry import Entry

app = typer.Typer(no_args_is_help=True, help="Look at checkpoint files without the program that wrote them.")

JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
_SCHEMA_VERSION = 1
_LONG = 1000
_WORDS = {
    "bytes": "differs",
    "only-in-a": "only in A",
    "only-in-b": "only in B",
}


@app.command()
def show(
    path: Annotated[Path, typer.Argument(help="A checkpoint: its folder or its file.", metavar="PATH")],
    as_json: JsonOption = False,
) -> int:
    """Lists what a checkpoint holds: names, dtypes, shapes, sizes, digests, plain values.

    Reads torch.save files, folders of torch.distributed.checkpoint, safetensors, and folders of these. Nothing that a
    file holds is run. Exit code 3 if a part of it could not be read.
    """
    from detrun.checkpoints.read import open_checkpoint

    with open_checkpoint(path) as checkpoint:
        rows = [_row(entry) for entry in checkpoint.entries()]
        format = checkpoint.format
    unread = [row for row in rows if row["problem"] is not None]
    total = sum(row["nbytes"] for row in rows)
    if as_json:
        _print_json({"path": str(path), "format": format, "nbytes": total, "entries": rows})
    else:
        console = Console()
        header = ("name", "dtype", "shape", "bytes", "digest or value")
        _print_table(console, [header, *map(_cells, rows)])
        _say(console, f"{one_line(str(path), _LONG)}: {format}, {_count(len(rows), 'entry')}, {_size(total)}")
        if unread:
            _say(console, f"{_count(len(unread), 'entry')} could not be read", "bold red")
    return ExitCode.NOT_VERIFIED if unread else ExitCode.OK


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(help="A checkpoint: its folder or its file.", metavar="A", show_default=False)],
    b: Annotated[Path, typer.Argument(help="Another one.", metavar="B", show_default=False)],
    as_json: JsonOption = False,
) -> int:
    """Compares two checkpoints tensor by tensor, bit by bit.

    Exit code 0 if they hold the same state, 1 if they differ, 3 if a part could not be read and the rest is equal. How
    a tensor was cut into shards is no part of the state, nor is the name of a single file.
    """
    from detrun.checkpoints.diff import Comparison

    with Comparison(a, b) as comparison:
        found = list(comparison.differences())
    unread = [each for each in found if each.what == "unreadable"]
    code = ExitCode.OK if not found else ExitCode.NOT_VERIFIED if len(unread) == len(found) else ExitCode.DIVERGED
    if as_json:
        _print_json(
            {
                "a": {"path": str(a), "format": comparison.a.format},
                "b": {"path": str(b), "format": comparison.b.format},
                "equal": {ExitCode.OK: True, ExitCode.DIVERGED: False}.get(code),
                "compared": comparison.compared,
                "nbytes": comparison.nbytes,
                "differences": [_difference(each) for each in found if each.what != "unreadable"],
                "unreadable": [{"name": _clean(each.name), "problem": _clean(each.problem or "")} for each in unread],
            }
        )
        return code
    console = Console()
    _print_table(console, [(_WORDS.get(each.what, each.what), each.name, _how(each)) for each in found], first="red")
    _say(console, _summary(comparison, found), "bold green" if code is ExitCode.OK else "bold red")
    return code


@app.command()
def audit(
    directory: Annotated[Path, typer.Argument(help="Where a run writes its checkpoints.", metavar="DIR")],
    pattern: Annotated[
        str | None,
        typer.Option(help="How a checkpoint's path tells its step: step-{step}. Default: the last number in its name."),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Looks for faults that checkpoints show by themselves.

    Partial or torn ones, parameters and optimizer that are an earlier checkpoint's byte for byte, a `latest` that
    points past what is on disk, random streams that ranks share. Exit code 1 if there are any.
    """
    from detrun.checkpoints.audit import audit as look_for_faults
    from detrun.checkpoints.find import find_checkpoints

    if not directory.is_dir():
        raise UsageError(f"{directory} is not a folder", hint="name the folder that holds the checkpoints")
    found = find_checkpoints(directory, pattern)
    if not found:
        raise UsageError(f"no checkpoints in {directory}", hint="--pattern 'step-{step}' says how they are named")
    faults = look_for_faults(directory, pattern)
    certain = [fault for fault in faults if fault.certain]
    code = ExitCode.DIVERGED if any(fault.kind != "unreadable" for fault in certain) else ExitCode.OK
    if code is ExitCode.OK and certain:
        code = ExitCode.NOT_VERIFIED
    if as_json:
        checkpoints = [
            {
                "path": _clean(str(each.path)),
                "step": each.step,
                "format": each.format,
                "complete": each.complete,
                "why": _clean(each.why),
            }
            for each in found
        ]
        listed = [
            {
                "kind": fault.kind,
                "path": _clean(str(fault.path)),
                "what": _clean(fault.what),
                "certain": fault.certain,
                "evidence": fault.evidence,
            }
            for fault in faults
        ]
        _print_json({"directory": str(directory), "checkpoints": checkpoints, "faults": listed})
        return code
    console = Console()
    rows = [
        (fault.kind if fault.certain else f"{fault.kind}?", _below(fault.path, directory), fault.what)
        for fault in faults
    ]
    _print_table(console, rows, first="red")
    whole = sum(each.complete for each in found)
    words = f"{_count(len(found), 'checkpoint')}, {whole} complete: {_count(len(certain), 'fault')}"
    doubtful = len(faults) - len(certain)
    _say(console, f"{words}, {doubtful} more may be meant so" if doubtful else words, "bold red" if certain else "bold")
    return code


def _row(entry: Entry) -> dict[str, Any]:
    problem, digest = entry.problem, None
    if problem is None:
        try:
            digest = entry.digest()
        except RecordError as error:
            problem = str(error)
    return {
        "name": _clean(entry.name),
        "dtype": _clean(entry.dtype),
        "shape": list(entry.shape),
        "nbytes": entry.nbytes if problem is None else 0,
        "digest": digest,
        "value": None if entry.value is None else _clean(entry.value),
        "problem": None if problem is None else _clean(problem),
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    plain = row["value"] is not None
    shape = "" if plain or row["problem"] else f"[{', '.join(map(str, row['shape']))}]"
    if row["problem"]:
        last = f"cannot be read: {row['problem']}"
    elif row["dtype"] == "float":
        last = repr(float.fromhex(row["value"]))
    else:
        last = row["value"] if plain else row["digest"]
    return (row["name"], row["dtype"], shape, "" if plain else f"{row['nbytes']:,}", last)


def _difference(each: Difference) -> dict[str, Any]:
    row: dict[str, Any] = {"name": _clean(each.name), "what": each.what, "a": each.a, "b": each.b}
    if each.what == "bytes":
        row.update(
            dtype=each.dtype,
            elements=each.elements,
            differing_elements=each.differing_elements,
            ulp=each.max_ulp,
            first=each.first,
            nan=each.nan,
        )
    return {key: _clean(value) if isinstance(value, str) else value for key, value in row.items()}


def _how(each: Difference) -> str:
    if each.what == "unreadable":
        return each.problem or ""
    if each.what != "bytes":
        return " / ".join(side for side in (each.a, each.b) if side is not None)
    apart = "" if each.max_ulp is None else f", up to {each.max_ulp:,} ULP"
    nan = f", {each.nan:,} with NaN" if each.nan else ""
    where = f", the first at {each.first:,}" if each.elements > 1 else ""
    return f"{each.a}: {each.differing_elements:,} of {_count(each.elements, 'element')}{apart}{nan}{where}"


def _summary(comparison: Comparison, found: Sequence[Difference]) -> str:
    counts = Counter(each.what for each in found)
    unread = counts.pop("unreadable", 0)
    rest = f"; {_count(unread, 'entry')} could not be read" if unread else ""
    held = f"{_count(comparison.compared, 'entry')}, {_size(comparison.nbytes)} of tensors"
    if not counts:
        equal = "not verified, what could be read is equal" if comparison.compared else "not verified"
        return f"{equal if unread else 'equal'}: {held}{rest}"
    kinds = ", ".join(
        f"{number} {_WORDS.get(what, what).replace('differs', 'in their bits')}" for what, number in counts.items()
    )
    ulp = max((each.max_ulp for each in found if each.max_ulp is not None), default=None)
    apart = "" if ulp is None else f", up to {ulp:,} ULP"
    return f"different: {_count(sum(counts.values()), 'entry')} ({kinds}{apart}); compared {held}{rest}"


def _print_table(console: Console, rows: Sequence[Sequence[str]], first: str = "") -> None:
    """Columns side by side, the last as it is. Nothing is cut, except names where a terminal is too narrow for them."""
    if not rows:
        return
    shown = [[one_line(cell, _LONG) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in list(zip(*shown, strict=True))[:-1]]
    name = 0 if not first else 1
    if console.is_terminal:
        last = min(max(len(row[-1]) for row in shown), 42)
        room = console.width - last - sum(widths) - 2 * len(widths) + widths[name]
        widths[name] = min(widths[name], max(room, 24))
    for row in shown:
        cells = [
            _middle(cell, width) if index == name else cell
            for index, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        line = Text("  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)))
        if first:
            line.stylize(first, 0, len(cells[0]))
        line.append(f"  {row[-1]}")
        line.rstrip()
        console.print(line, highlight=False, soft_wrap=True)


def _say(console: Console, text: str, style: str = "bold") -> None:
    console.print(Text(text, style), highlight=False, soft_wrap=True)


def _print_json(document: dict[str, Any]) -> None:
    json.dump({"schema_version": _SCHEMA_VERSION, **document}, sys.stdout, indent=1, default=str)
    sys.stdout.write("\n")


def _middle(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def _clean(text: str) -> str:
    """Foreign text for a JSON document: lone surrogates written as escapes, nothing cut."""
    return text.encode("utf-8", "backslashreplace").decode()


def _below(path: Path, directory: Path) -> str:
    return str(path.relative_to(directory)) if path.is_relative_to(directory) else str(path)


def _count(number: int, noun: str) -> str:
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{nbytes:,} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
