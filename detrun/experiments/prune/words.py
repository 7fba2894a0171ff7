"""What `detrun prune` would remove, or has removed, in lines and as a document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from detrun.experiments.prune import ExperimentPlan, PrunePlan
from detrun.records.files import one_line
from detrun.report.words import plural

MAX_LINES = 40
MAX_LEFT = 20
_UNITS = ("B", "kB", "MB", "GB", "TB")


def lines(plan: PrunePlan, options: str = "") -> Iterator[str]:
    """The plan for a person. options: what a later command needs to find the archive from here."""
    shown = sorted(plan.experiments, key=lambda each: -each.bytes)[:MAX_LINES]
    width = max((len(each.id) for each in shown), default=0)
    for each in shown:
        yield f"{each.id:<{width}}  {size(each.bytes):>8}  {_parts(each)}"
    rest = len(plan.experiments) - len(shown)
    if rest:
        yield f"and {plural(rest, 'smaller one', 'smaller ones')}; --json has them all"
    for text in plan.left[:MAX_LEFT]:
        yield f"left alone: {one_line(text, 400)}"
    if len(plan.left) > MAX_LEFT:
        yield f"and {len(plan.left) - MAX_LEFT} more are left alone"
    many = sum(bool(each.candidates) for each in plan.experiments)
    if not many:
        yield "nothing to remove" if not plan.done else "nothing was removed"
    else:
        verb = "removed" if plan.done else "would remove"
        yield f"{verb} {size(plan.bytes)} of {plural(many, 'experiment')}: {_by_kind(plan)}"
    if kept := _kept(plan):
        yield kept
    if many and not plan.done:
        yield f"this was a dry run: detrun prune --yes{f' {options}' if options else ''} removes it"


def _parts(each: ExperimentPlan) -> str:
    sizes: dict[str, int] = {}
    for item in each.candidates:
        sizes[item.kind] = sizes.get(item.kind, 0) + item.size.bytes
    return ", ".join(f"{kind} {size(count)}" for kind, count in sizes.items())


def _by_kind(plan: PrunePlan) -> str:
    sizes: dict[str, int] = {}
    for each in plan.experiments:
        for item in each.candidates:
            sizes[item.kind] = sizes.get(item.kind, 0) + item.size.bytes
    return ", ".join(f"{kind} {size(count)}" for kind, count in sizes.items())


_KEPT = {
    "newest": "the newest of their recipe",
    "not identical": "not identical",
    "baseline": "a baseline or marked to be kept",
    "running": "still running",
    "without a verdict": "without a verdict",
}


def _kept(plan: PrunePlan) -> str:
    told = [f"{plan.kept[key]:,} {words}" for key, words in _KEPT.items() if plan.kept.get(key)]
    return f"stay as they are, but for old logs of the first two kinds: {'; '.join(told)}" if told else ""


def size(count: int) -> str:
    """`3.4 GB`, in powers of 1,000."""
    value = float(count)
    for unit in _UNITS:
        if value < 1000 or unit == _UNITS[-1]:
            break
        value /= 1000
    return f"{count} B" if unit == "B" else f"{value:.3g} {unit}"


def document(plan: PrunePlan) -> dict[str, Any]:
    """The plan as `--json` prints it."""
    return {
        "schema_version": 1,
        "dry_run": not plan.done,
        "archive": str(plan.archive),
        "bytes": plan.bytes,
        "experiments": [
            {
                "id": each.id,
                "removed" if plan.done else "would_remove": [
                    {"path": item.path, "kind": item.kind, "files": item.size.files, "bytes": item.size.bytes}
                    for item in each.candidates
                ],
            }
            for each in plan.experiments
            if each.candidates
        ],
        "kept": plan.kept,
        "left_alone": plan.left,
        "failed": plan.failed,
    }
