"""Maps: ranks × steps of what differs first, and modules × ranks of the way a difference went on."""

from __future__ import annotations

from typing import Any

from detrun.records.files import one_line
from detrun.records.verdict import Verdict
from detrun.report.chart import Figure, label, layout, packed
from detrun.report.localize_rows import propagation
from detrun.report.localize_words import OUTSIDE_MODULES, operation
from detrun.report.series import NOT_RECORDED, NOT_RUN, Series

MAX_PLACES = 60
"""Modules of a map."""

_KNOWN = {
    "batch": "#1f6fb5",
    "RNG": "#c277b0",
    "gradients": "#e0a106",
    "parameters": "#d2540a",
    "optimizer": "#8d4bb8",
    "buffers": "#7a5c3e",
}
_METRICS = ("#17946c", "#58b9a0", "#0d6e8c", "#7fb83a", "#2c5fa8", "#4e7d2c")
_EQUAL, _MISSING, _OUTSIDE = "rgba(128,128,128,.16)", "#6b6b6b", "rgba(0,0,0,0)"


def map_data(series: Series) -> dict[str, Any] | None:
    """What the page needs to draw the map of each pair; None where nothing differs and nothing is missing.

    Names in it are plain text, which the page never takes for markup.
    """
    if not any(pair.differs or pair.incomplete for pair in series.pairs):
        return None
    plain = [name for name in series.streams if name not in _KNOWN]
    streams = [
        {"name": one_line(name, 60), "color": _KNOWN.get(name) or _METRICS[plain.index(name) % len(_METRICS)]}
        for name in series.streams
    ]
    return {
        "ranks": list(series.ranks),
        "legend": [
            {"code": 0, "name": "equal", "color": _EQUAL},
            *({"code": code, **stream} for code, stream in enumerate(streams, 1)),
            {"code": NOT_RECORDED, "name": "not recorded by both", "color": _MISSING},
            {"code": NOT_RUN, "name": "outside of the attempt", "color": _OUTSIDE},
        ],
        "pairs": [packed(pair.cells) for pair in series.pairs],
        "layout": layout("step", "rank", hovermode="closest", yaxis={"showgrid": False}, xaxis={"showgrid": False}),
    }


def spread_figure(verdict: Verdict) -> Figure | None:
    """The first event that differs of each module and phase on each rank, numbered in that rank's order; None where the
    difference did not go on."""
    rows = propagation(verdict)
    places: dict[str, dict[int, tuple[int, str]]] = {}
    counts: dict[int, int] = {}
    for each in rows:
        rank = each.get("rank")
        if not isinstance(rank, int):
            continue
        place = ", ".join(str(part) for part in (each.get("scope") or OUTSIDE_MODULES, each.get("phase")) if part)
        if rank in places.get(place, {}) or (place not in places and len(places) >= MAX_PLACES):
            continue
        counts[rank] = counts.get(rank, 0) + 1
        told = f"{operation(each.get('op'))}, step {each.get('step')}"
        places.setdefault(place, {})[rank] = (counts[rank], told)
    if len(places) < 2:
        return None
    ranks = sorted(counts)
    cells = [[on.get(rank) for rank in ranks] for on in places.values()]
    trace = {
        "type": "heatmap",
        "x": [f"rank {rank}" for rank in ranks],
        "y": [label(place) for place in places],
        "z": [[cell[0] if cell else None for cell in row] for row in cells],
        "customdata": [[label(cell[1]) if cell else "" for cell in row] for row in cells],
        "hovertemplate": "%{y}<br>%{x}: number %{z} there<br>%{customdata}<extra></extra>",
        "texttemplate": "%{z}" if len(ranks) <= 16 else "",
        "colorscale": [[0, "#c62828"], [0.5, "#e8963a"], [1, "#f3d9a4"]],
        "zmin": 1,
        "zmax": max(2, *counts.values()),
        "showscale": False,
        "xgap": 1,
        "ygap": 1,
    }
    made = layout(
        "",
        "",
        xaxis={"type": "category", "side": "top", "showgrid": False},
        yaxis={"type": "category", "autorange": "reversed", "showgrid": False},
        height=90 + 26 * len(places),
        margin={"t": 40, "b": 10},
    )
    return {"data": [trace], "layout": made}
