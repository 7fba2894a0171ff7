"""jobs/<name>/submitted.json: that a job was submitted, and under which id."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from detrun.launch.cluster import SubmittedJob
from detrun.records.files import write_atomically


def write_submitted(folder: Path, job: SubmittedJob) -> None:
    write_atomically(folder / "submitted.json", (json.dumps(asdict(job)) + "\n").encode())


def read_submitted(folder: Path) -> SubmittedJob | None:
    """The job, or None while it has not been submitted."""
    try:
        return SubmittedJob(**json.loads((folder / "submitted.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
