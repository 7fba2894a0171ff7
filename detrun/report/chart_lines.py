"""Charts over steps: every metric of all runs, and how far two runs are apart in ULP.

`x: "axis"` stands for the steps of all columns, and `from` for the first of them that a line has: the page puts
them in, so that they travel once.
"""

from __future__ import annotations

import math
from typing import Any

from detrun.records.metrics_line import stem_of
from detrun.records.verdict import Verdict
from detrun.report.chart import COLORS, DASHES, SYMBOLS, Figure, label, layout, packed
from detrun.report.series import Apart, Series, Values

MAX_LINES = 12
_FEW = 120
"""So many points still are seen one by one."""

_UNIFIED = {"hovermode": "x unified", "showlegend": True}
_RUG = {
    "overlaying": "y",
    "side": "right",
    "range": [0, 1],
    "visible": False,
    "fixedrange": True,
}


def values_figure(series: Series) -> Figure:
    """Each metric of each run: a line of one rank, and a band from the lowest to the highest rank."""
    data = []
    for values in series.values:
        data += _of_run(series, values)
    made = layout("step", "", yaxis2=_RUG, **_UNIFIED)
    return {"data": data, "layout": made}


def _of_run(series: Series, values: Values) -> list[dict[str, Any]]:
    run = series.runs[values.run]
    color = COLORS[values.run % len(COLORS)]
    name = f"arm {run.label}" + (f", rank {values.rank}" if values.low is not None else "")
    common = {
        "type": "scatter",
        "x": "axis",
        "meta": {"metric": series.metrics.index(values.metric), "run": values.run},
        "legendgroup": run.label,
    }
    found = []
    if values.low is not None and values.high is not None:
        edge = {**common, "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
        found.append({**edge, "y": packed(values.low), "showlegend": False})
        band = {"fill": "tonexty", "fillcolor": _clear(color, 0.18), "name": f"arm {run.label}, all ranks"}
        found.append({**edge, "y": packed(values.high), **band})
    few = len(series.columns) <= _FEW
    found.append(
        {
            **common,
            "mode": "lines+markers" if few else "lines",
            "name": label(name),
            "y": packed(values.shown),
            # Arms that are equal lie upon each other: the first is a broad line below the others' thin ones.
            "line": {"color": color, "width": 5 if values.run == 0 else 2, "dash": _dash(values.run)},
            "marker": {"color": color, "size": 5, "symbol": SYMBOLS[values.run % len(SYMBOLS)]},
            "opacity": 0.45 if values.run == 0 else 1,
            "hovertemplate": "%{y:.9g}",
        }
    )
    if values.bad:
        columns = [int(series.columns[at]) for at in values.bad]
        found.append({**common, **_rug(columns, color, values.run), "name": f"arm {label(run.label)}: NaN or infinite"})
    return found


def distance_figure(series: Series) -> Figure | None:
    """How far each metric of two runs is apart, the worst rank of each step; None where no metric differs."""
    import numpy as np

    data = []
    for number, pair in enumerate(series.pairs):
        for apart in pair.apart[:MAX_LINES]:
            data += _of_metric(series, number, apart)
    if not data:
        return None
    most = max(float(apart.ulp[~np.isnan(apart.ulp)].max(initial=1)) for p in series.pairs for apart in p.apart)
    return {"data": data, "layout": layout("step", "ULP", yaxis=_ulp_axis(most), yaxis2=_RUG, **_UNIFIED)}


def _ulp_axis(most: float) -> dict[str, Any]:
    """A log axis from 1 on; tens alone have labels, a few where there are many."""
    tens = math.log10(max(most, 1)) + 0.3
    return {
        "type": "log",
        "exponentformat": "power",
        "dtick": max(1, round(tens / 6)),
        "range": [-0.3, max(1.0, tens)],
        "minor": {"showgrid": False},
    }


def _of_metric(series: Series, pair: int, apart: Apart) -> list[dict[str, Any]]:
    import numpy as np

    metric = series.metrics.index(apart.metric)
    color = COLORS[metric % len(COLORS)]
    there = np.flatnonzero(~np.isnan(apart.ulp))
    first = int(there[0]) if len(there) else len(apart.ulp)
    common = {"type": "scatter", "meta": {"pair": pair, "metric": metric}, "legendgroup": str(metric)}
    # What was computed from another metric, often in a wider dtype, waits in the legend.
    hidden = {} if stem_of(apart.metric) == apart.metric else {"visible": "legendonly"}
    found = [
        {
            **common,
            **hidden,
            "x": "axis",
            "from": first,
            "y": packed(apart.ulp[first:]),
            "mode": "lines+markers" if len(there) <= _FEW else "lines",
            "name": label(apart.metric),
            "line": {"color": color, "dash": DASHES[metric % len(DASHES)], "width": 1.5},
            "marker": {
                "color": color,
                "symbol": SYMBOLS[metric % len(SYMBOLS)],
                "size": 6 if len(there) <= _FEW else 3,
            },
            "hovertemplate": "%{y:,} ULP",
        }
    ]
    if apart.unmeasured:
        columns = [int(series.columns[at]) for at in apart.unmeasured]
        found.append(
            {
                **common,
                **hidden,
                **_rug(columns, color, metric),
                "name": f"{label(apart.metric)}: differs, no ULP (NaN)",
            }
        )
    return found


def from_verdict(verdict: Verdict) -> Figure | None:
    """The distances that verdict.json itself holds, of the pair that parts first: where the records are gone."""
    first = verdict.first_divergence
    found = [
        finding
        for finding in verdict.of_kind("metric")
        if first is not None and finding.where.get("arms") == first.arms and finding.evidence.get("ulp_by_step")
    ]
    if not found:
        return None
    data = []
    for number, finding in enumerate(found[:MAX_LINES]):
        points = finding.evidence["ulp_by_step"]
        metric = str(finding.where.get("metric"))
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": label(metric),
                "visible": True if stem_of(metric) == metric else "legendonly",
                "x": [point[0] for point in points],
                # Far apart, ULPs exceed what a script's numbers hold exactly; for the eye a float will do.
                "y": [float(point[1]) for point in points],
                "marker": {"size": 6, "symbol": SYMBOLS[number % len(SYMBOLS)], "color": COLORS[number % len(COLORS)]},
                "line": {"dash": DASHES[number % len(DASHES)], "color": COLORS[number % len(COLORS)]},
                "hovertemplate": "%{y:,} ULP",
            }
        )
    most = max(float(point[1]) for finding in found for point in finding.evidence["ulp_by_step"])
    return {"data": data, "layout": layout("step", "ULP", yaxis=_ulp_axis(most), **_UNIFIED)}


def _rug(columns: list[int], color: str, number: int) -> dict[str, Any]:
    """Marks along the foot of a chart: there is no height at which they could stand."""
    return {
        "x": columns,
        "y": [0.03] * len(columns),
        "yaxis": "y2",
        "mode": "markers",
        "marker": {
            "color": color,
            "symbol": "x-thin" if number % 2 == 0 else "cross-thin",
            "size": 8,
            "line": _mark(color),
        },
        "hoverinfo": "x+name",
        "hovertemplate": "not finite",
    }


def _mark(color: str) -> dict[str, Any]:
    return {"width": 2, "color": color}


def _dash(run: int) -> str:
    return "solid" if run == 0 else DASHES[(run - 1) % len(DASHES)]


def _clear(color: str, alpha: float) -> str:
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"
