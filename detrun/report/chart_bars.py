"""Charts of attempts and checkpoints on a scale of steps, and of how long steps took."""

from __future__ import annotations

import math
from typing import Any

from detrun.records.jobs import ExperimentFile
from detrun.records.verdict import Verdict
from detrun.report.chart import COLORS, Figure, label, layout
from detrun.report.series import Series
from detrun.report.timeline import timeline

MAX_SAMPLES = 5000
"""Step times of an arm in a chart; of more, evenly spread ones."""


def attempts_figure(verdict: Verdict, experiment: ExperimentFile, series: Series | None) -> Figure | None:
    """A bar an attempt, with its checkpoints and where it was ended; None where there is no second attempt."""
    lines = timeline(verdict, experiment)
    if len(lines) < 2:
        return None
    names = [label(line.label.strip() if at else line.label) for at, line in enumerate(lines)]
    names = [f"{name} ({at})" if names.count(name) > 1 else name for at, name in enumerate(names)]
    bars = {
        "type": "bar",
        "orientation": "h",
        "y": names,
        "base": [line.first - 1 for line in lines],
        "x": [line.last - line.first + 1 for line in lines],
        "marker": {"color": [COLORS[0] if not at else COLORS[1] for at in range(len(lines))], "opacity": 0.55},
        "hovertemplate": "%{y}: steps %{customdata[0]} to %{customdata[1]}<extra></extra>",
        "customdata": [[line.first, line.last] for line in lines],
        "width": 0.45,
        "showlegend": False,
    }
    data: list[dict[str, Any]] = [bars]
    saves = _saves(series, names)
    saves |= {(name, line.saved) for name, line in zip(names, lines, strict=True) if line.saved is not None}
    if saves:
        told = sorted(saves, key=lambda each: (names.index(each[0]), each[1]))
        used = {line.saved for line in lines}
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "checkpoint (filled: the one that was resumed from)",
                "y": [name for name, _ in told],
                "x": [step for _, step in told],
                "marker": {
                    "symbol": ["diamond" if step in used else "diamond-open" for _, step in told],
                    "size": 11,
                    "color": COLORS[2],
                },
                "hovertemplate": "checkpoint at the end of step %{x}<extra></extra>",
            }
        )
    ended = [(name, line) for name, line in zip(names, lines, strict=True) if line.mark]
    if ended:
        data.append(
            {
                "type": "scatter",
                "mode": "markers+text",
                "name": "ended from outside",
                "y": [name for name, _ in ended],
                "x": [line.last for _, line in ended],
                "text": [label(line.mark.removeprefix("✕ ")) for _, line in ended],
                "textposition": "top center",
                "marker": {"symbol": "x", "size": 11, "color": "#c62828"},
                "hovertemplate": "after step %{x}: %{text}<extra></extra>",
                "cliponaxis": False,
            }
        )
    made = layout(
        "step",
        "",
        yaxis={"type": "category", "autorange": "reversed", "showgrid": False},
        xaxis={"range": [0, experiment.steps * 1.02]},
        height=150 + 46 * len(lines),
        hovermode="closest",
    )
    return {"data": data, "layout": made}


def _saves(series: Series | None, names: list[str]) -> set[tuple[str, int]]:
    """The checkpoints that the recorder saw finished, by the attempt that wrote them. Lines follow the runs' order."""
    if series is None or len(series.runs) != len(names):
        return set()
    return {(name, step) for name, run in zip(names, series.runs, strict=True) for step in run.saves}


def times_figure(verdict: Verdict) -> Figure | None:
    """How long the steps of each arm took, of findings `step-times` ({seconds: […], label}); None without such."""
    data = []
    for number, finding in enumerate(verdict.of_kind("step-times")):
        found = finding.evidence.get("seconds")
        seconds = [float(each) for each in found if _is_time(each)] if isinstance(found, list) else []
        if not seconds:
            continue
        seconds = seconds[:: -(-len(seconds) // MAX_SAMPLES)]
        name = finding.evidence.get("label") or f"arm {finding.where.get('arm')}"
        color = COLORS[number % len(COLORS)]
        data.append(
            {
                "type": "box",
                "name": label(name),
                "y": seconds,
                "boxpoints": "outliers",
                "marker": {"color": color},
                "hovertemplate": "%{y:.4g} s",
            }
        )
    if not data:
        return None
    return {"data": data, "layout": layout("", "seconds a step", yaxis={"rangemode": "tozero"}, showlegend=False)}


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
