"""The attempts of a resume check drawn on a scale of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from detrun.compare.folding import ranks_in_words
from detrun.records.jobs import ExperimentFile
from detrun.records.verdict import ArmSummary, AttemptSummary, Verdict

WIDTH = 60
"""Columns of the timeline's scale."""

LABEL = 17
"""Columns of the timeline's labels."""

_KINDS = {
    "kill": "SIGKILL",
    "kill-during-save": "SIGKILL during a save",
    "stop": "stopped",
    "signal": "signal",
    "requeue": "requeued",
    "node-failure": "a node failed",
    "timeout": "time limit",
}


def mark_of(interruption: dict[str, Any], experiment: ExperimentFile) -> str:
    """`SIGKILL`, `SIGTERM on rank 1`."""
    kind = str(interruption.get("kind"))
    text = _KINDS.get(kind, kind)
    if kind == "signal":
        asked = [each.get("signal") for each in experiment.interrupts if each.get("kind") == "signal"]
        text = f"SIG{asked[0]}" if asked and asked[0] else "signal"
    on = interruption.get("ranks") or []
    if kind in ("kill", "signal", "stop", "kill-during-save") and 0 < len(on) < experiment.ranks:
        text += f" on {ranks_in_words(on, experiment.ranks)}"
    return text


@dataclass(frozen=True)
class Line:
    """One line of the timeline: a label, and where on the scale of WIDTH columns it begins and ends."""

    label: str
    first: int
    last: int
    mark: str = ""
    saved: int | None = None


def timeline(verdict: Verdict, experiment: ExperimentFile) -> list[Line]:
    """The reference, then every attempt of the interrupted arm."""
    lines: list[Line] = []
    for arm in verdict.arms:
        if arm.role == "reference":
            last = max((a.last_step or 0 for a in arm.attempts), default=0) or experiment.steps
            lines.append(Line(f"{arm.id} uninterrupted", 1, last))
        elif arm.role == "interrupted":
            lines += _attempts(arm, verdict, experiment)
    return lines


def _attempts(arm: ArmSummary, verdict: Verdict, experiment: ExperimentFile) -> list[Line]:
    lines = []
    elsewhere = {
        finding.where.get("attempt"): finding.evidence["came_from"]
        for finding in verdict.of_kind("resumed-elsewhere")
        if "came_from" in finding.evidence
    }
    for place, attempt in enumerate(arm.attempts):
        following = arm.attempts[place + 1] if place + 1 < len(arm.attempts) else None
        saved = int(following.resumed_from["step"]) if following and following.resumed_from else None
        interruption = attempt.interruption or {}
        last = interruption.get("step") or attempt.last_step
        failed = not interruption and bool(attempt.exit_code)
        if last is None and not failed:
            continue
        told = int(attempt.resumed_from["step"]) if attempt.resumed_from else 0
        first = int(elsewhere.get(attempt.n, told)) + 1
        mark = f"✕ {mark_of(interruption, experiment)}" if interruption and not ran_on(attempt, experiment) else ""
        mark = f"✕ exit code {attempt.exit_code}" if failed else mark
        label = "    came back" if attempt.n in elsewhere else "    resumed"
        # An attempt that was interrupted at once has taken no step of its own.
        last = max(int(last or 0), first)
        lines.append(Line(label if place else f"{arm.id} interrupted", first, last, mark, saved))
    return lines


def ran_on(attempt: AttemptSummary, experiment: ExperimentFile) -> bool:
    """Whether an attempt took all steps in spite of its interruption."""
    at = (attempt.interruption or {}).get("step") or 0
    return attempt.exit_code == 0 and (attempt.last_step or 0) >= experiment.steps > at


def picture(verdict: Verdict, experiment: ExperimentFile, width: int) -> list[str]:
    """The timeline as lines of text of at most `width` columns; where its steps have no room there, to no scale."""
    lines = timeline(verdict, experiment)
    for scale in range(width - LABEL - 1, 0, -1):
        at = columns(lines, experiment.steps, scale)
        if at is None:
            break
        rows = [f"{line.label:<{LABEL}}{drawn(line, at)}" for line in lines]
        if max(map(len, rows), default=0) <= width:
            return rows
    return [f"{line.label:<{LABEL}}{_unscaled(line)}" for line in lines]


def _unscaled(line: Line) -> str:
    saved = f"{line.saved} save ─ " if line.saved is not None and line.first <= line.saved < line.last else ""
    steps = f"{line.first} ─ {saved}{line.last}" if line.last > line.first else str(line.first)
    return f"{'└─ ' if line.first > 1 else ''}{steps} {line.mark}".rstrip()


def columns(lines: Sequence[Line], steps: int, width: int = WIDTH) -> dict[int, int] | None:
    """Where on the scale each step that is named stands: in proportion, but never so close that labels collide. None if
    they have no room. A step after one that has a place has none of its own as a resume's first: it stands by its save.
    """
    placed = {
        1,
        steps,
        *(line.last for line in lines if line.last > line.first),
        *(line.saved for line in lines if line.saved is not None),
    }
    placed |= {line.first for line in lines if line.first - 1 not in placed}
    named = sorted(placed)
    gaps = [_right_of(s, lines) + _left_of(t, lines) for s, t in pairwise(named)]
    if sum(gaps) >= width:
        return None
    places = [round((step - 1) / max(1, named[-1] - 1) * (width - 1)) for step in named]
    for index in range(1, len(places)):
        places[index] = max(places[index], places[index - 1] + gaps[index - 1])
    places[-1] = min(places[-1], width - 1)
    for index in range(len(places) - 2, -1, -1):
        places[index] = min(places[index], places[index + 1] - gaps[index])
    return dict(zip(named, places, strict=True))


def _right_of(step: int, lines: Sequence[Line]) -> int:
    """Columns from a step's place on that what is written there takes: `10 save `, or the number of a first step."""
    saves = any(line.saved == step for line in lines)
    begins = any(step in (line.first, line.first - 1) for line in lines)
    return max(1, saves * len(f"{step} save "), begins * len(f"   {step + 1} "))


def _left_of(step: int, lines: Sequence[Line]) -> int:
    """Columns before a step's place that what is written there takes: a last step's number ends at its place."""
    return len(f" {step} ") if any(line.last == step for line in lines) else len("└─ ")


def drawn(line: Line, at: Mapping[int, int]) -> str:
    """A line of the timeline as text. at: `columns` of all lines."""
    resumed = line.first > 1
    start = at[line.first - 1] + 3 if resumed and line.first - 1 in at else at[line.first]
    end = start if line.first == line.last else at[line.last]
    canvas = [" "] * (end + 2)
    canvas[start : end + 1] = "─" * (end + 1 - start)
    head, tail = str(line.first), str(line.last)
    if resumed and start >= 3:
        canvas[start - 3 : start] = "└─ "
    if line.first == line.last:
        text = f"{''.join(canvas[:start])}{head}"
        return f"{text}{' save' if line.saved == line.last else ''} {line.mark}".rstrip()
    _write(canvas, start, f"{head} save " if line.saved == line.first else f"{head} ")
    if line.saved is not None and line.first < line.saved < line.last and line.saved in at:
        _write(canvas, at[line.saved] - 1, f" {line.saved} save ")
    _write(canvas, end - len(tail), f" {tail}")
    saved_last = " save" if line.saved == line.last else ""
    return f"{''.join(canvas).rstrip()}{saved_last} {line.mark}".rstrip()


def _write(canvas: list[str], at: int, text: str) -> None:
    for place, character in enumerate(text):
        if 0 <= at + place < len(canvas):
            canvas[at + place] = character
