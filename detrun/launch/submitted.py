"""jobs/<name>/submitted.json: that a job was submitted, and under which id."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

from detrun.errors import RecordError
from detrun.launch.cluster import SubmittedJob
from detrun.records.files import read_object, write_atomically

_ID = re.compile(r"[0-9]{1,18}")


def write_submitted(folder: Path, job: SubmittedJob) -> None:
    write_atomically(folder / "submitted.json", (json.dumps(asdict(job)) + "\n").encode())


def read_submitted(folder: Path) -> SubmittedJob | None:
    """The job, or None while it has not been submitted. A file that says anything else counts for nothing.

    The id goes on command lines, so it has to be one: `--user=root` is no job.
    """
    try:
        job = SubmittedJob(**read_object(folder / "submitted.json"))
    except (RecordError, TypeError):
        return None
    plain = isinstance(job.name, str) and isinstance(job.id, str) and _ID.fullmatch(job.id)
    return job if plain and isinstance(job.submitted, int | float) and isinstance(job.detail, dict | None) else None
