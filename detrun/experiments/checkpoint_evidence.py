"""What the checkpoint files themselves say: whether they hold what was live, and what is wrong with their folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from detrun.checkpoints.audit import audit
from detrun.checkpoints.index import index
from detrun.compare.resume_evidence import Boundary
from detrun.errors import DetrunError
from detrun.launch.preflight import folder_size
from detrun.records.jobs import ExperimentFile, JobFile
from detrun.records.layout import ExperimentFolder

MAX_READ_BYTES = 64 << 30
"""Checkpoints that are larger together are not read through: `detrun checkpoint audit` does it when asked."""


def note_what_was_saved(boundary: Boundary, job: JobFile | None) -> None:
    """Notes for each difference whether the checkpoint holds what the run had when it was written."""
    wanted = [difference for difference in boundary.differences if difference.saved_as]
    path = job.resumed_from.path if job is not None and job.resumed_from is not None else None
    if not wanted or path is None:
        return
    try:
        if folder_size(Path(path)) > MAX_READ_BYTES:
            return
        contents = index(Path(path))
    except (DetrunError, OSError, ValueError):
        return  # the checkpoint was pruned since, or is of a kind that cannot be read
    for difference in wanted:
        sought = difference.saved_as
        if isinstance(sought, bytes):
            # A stream may be saved in many forms: one that is not recognised says nothing.
            difference.saved = True if contents.find_random(sought) else None
        elif sought is not None:
            difference.saved = bool(contents.find(sought)) if not contents.problems else None


def audit_checkpoints(place: ExperimentFolder, experiment: ExperimentFile, arm: str) -> list[tuple[str, str]]:
    """What is wrong with an arm's checkpoint folder, each as ("warns" | "tells", in words)."""
    checkpoint: Any = experiment.recipe.get("checkpoint")
    if not isinstance(checkpoint, dict):
        return []
    directory = Path(str(checkpoint.get("directory", "")).replace("{out}", str(place.work_dir(arm))))
    pattern = checkpoint.get("pattern")
    try:
        if "{" in str(directory) or not directory.is_dir() or folder_size(directory) > MAX_READ_BYTES:
            return []
        found = audit(directory, pattern if isinstance(pattern, str) else None)
    except (DetrunError, OSError, ValueError):
        return []
    return [
        (
            "tells" if fault.kind == "partial" or not fault.certain else "warns",
            f"checkpoint {fault.path.name}: {fault.what}",
        )
        for fault in found
    ]
