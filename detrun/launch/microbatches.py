"""Whether a recipe counts micro-batches as its steps, as seen in an arm that ran to its end."""

from __future__ import annotations

from itertools import accumulate

from detrun.errors import RecordError
from detrun.records.jobs import JobFile
from detrun.records.layout import AttemptFolder
from detrun.records.metrics_reader import read_rank_metrics


def microbatches_by_step(finished: AttemptFolder, ranks: int, steps: int) -> list[int] | None:
    """Micro-batches that are done after each optimizer step (index 0: none yet), or None where steps are steps.

    A recipe counts micro-batches if every rank recorded the same optimizer steps without a hole, fewer than the
    `steps` asked for, and their micro-batches add up to exactly `steps`.
    """
    try:
        job = JobFile.read(finished.job_file)
    except RecordError:
        return None
    if job.state != "done" or job.exit_code != 0:
        return None
    counts: list[int] | None = None
    for rank in range(ranks):
        records = read_rank_metrics(finished.metrics(rank)).steps
        if sorted(records) != list(range(1, len(records) + 1)):
            return None
        own = [records[step].microbatches for step in sorted(records)]
        if counts is not None and own != counts:
            return None
        counts = own
    if not counts or len(counts) >= steps or sum(counts) != steps:
        return None
    return [0, *accumulate(counts)]
