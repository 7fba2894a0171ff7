"""`detrun recorder export`: the recorder as a plain folder, for a container's bind mount."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from detrun.errors import InfrastructureError, UsageError

app = typer.Typer(no_args_is_help=True, help="The part of detrun that runs inside the training process.")


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="Where to put it; made if it is not there.", metavar="DIR")],
) -> int:
    """Writes the recorder as a folder of plain Python files that PYTHONPATH can name."""
    from detrun.recorder.export import export_recorder

    strangers = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if strangers and not (folder / "detrun" / "recorder" / "inject").is_dir():
        raise UsageError(
            f"{folder} holds something else: {', '.join(strangers[:3])}{' …' if len(strangers) > 3 else ''}",
            hint="name a new folder, or one that an earlier export made",
        )
    try:
        export_recorder(folder)
    except OSError as error:
        raise InfrastructureError(
            f"could not write the recorder: {error.strerror}", where=str(error.filename or folder)
        ) from None
    print(folder)
    return 0


@app.command()
def version() -> int:
    """Prints the version of the recorder."""
    import detrun

    print(detrun.__version__)
    return 0
