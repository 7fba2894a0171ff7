"""Exports the recorder as a plain folder that goes first on PYTHONPATH. Standard library only."""

from __future__ import annotations

import shutil
from pathlib import Path

PACKAGES = ("recorder", "fingerprint", "determinism")
"""Exported whole."""

MODULES = ("__init__.py", "records/__init__.py", "records/metrics_writer.py")
"""Exported of the rest: what the recorder imports."""


def export_recorder(folder: Path) -> None:
    """Write `folder/sitecustomize.py` and the part of detrun that runs inside a training process.

    The folder is made if need be; files of an earlier export are overwritten. Raises OSError.
    """
    package = Path(__file__).resolve().parents[1]
    target = folder / "detrun"
    sources = [package / name for name in MODULES]
    for name in PACKAGES:
        sources += sorted((package / name).rglob("*.py"))
    for source in sources:
        copy = target / source.relative_to(package)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    shutil.copyfile(package / "recorder" / "inject" / "sitecustomize.py", folder / "sitecustomize.py")
