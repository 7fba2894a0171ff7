"""Exports the recorder as a plain folder that goes first on PYTHONPATH. Standard library only."""

from __future__ import annotations

import shutil
from pathlib import Path

PACKAGES = ("recorder", "fingerprint", "determinism")
"""Exported whole."""

MODULES = (
    "__init__.py", "rng.py", "records/__init__.py", "records/metrics_writer.py", "records/state_row.py",
    "records/state_writer.py", "records/trace_row.py", "records/trace_writer.py", "records/kept_writer.py",
)  # fmt: skip
"""Exported of the rest: what the recorder imports."""


def exported_files() -> list[tuple[Path, str]]:
    """What is exported: each file, and its place below the folder."""
    package = Path(__file__).resolve().parents[1]
    sources = [package / name for name in MODULES]
    for name in PACKAGES:
        sources += sorted((package / name).rglob("*.py"))
    files = [(source, f"detrun/{source.relative_to(package).as_posix()}") for source in sources]
    return [*files, (package / "recorder" / "inject" / "sitecustomize.py", "sitecustomize.py")]


def export_recorder(folder: Path) -> None:
    """Write `folder/sitecustomize.py` and the part of detrun that runs inside a training process.

    The folder is made if need be; files of an earlier export are overwritten. Raises OSError.
    """
    for source, name in exported_files():
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
