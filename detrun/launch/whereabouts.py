"""Where the ranks of an attempt are, for a sentence that says why it was given up."""

from __future__ import annotations

from detrun.launch.outcome import last_steps
from detrun.launch.spec import Segment
from detrun.records.layout import AttemptFolder


def whereabouts(folder: AttemptFolder, segment: Segment) -> str:
    """Which ranks were where: `last step 11 on every rank; rank 1 in forward, 1 other in backward`."""
    steps = last_steps(folder, segment)
    low, high = min(steps.values()), max(steps.values())
    if not segment.recorder:
        text = f"last step {low}, by what it wrote"
    elif low == high:
        text = f"last step {low} on every rank"
    else:
        behind = [rank for rank, step in steps.items() if step == low]
        text = f"last step {low} on rank {_few(behind)}, up to {high} elsewhere"
    phases: dict[str, list[int]] = {}
    for rank in steps:
        try:
            words = folder.progress(rank).read_text(encoding="utf-8", errors="replace").split()
        except OSError:
            continue
        if len(words) >= 2:
            phases.setdefault(words[1], []).append(rank)
    if phases:
        text += "; now " + ", ".join(
            f"rank {_few(ranks)} in {phase}" for phase, ranks in sorted(phases.items(), key=lambda item: len(item[1]))
        )
    return text


def _few(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:6]))
    return shown if len(ranks) <= 6 else f"{shown} and {len(ranks) - 6} more"
