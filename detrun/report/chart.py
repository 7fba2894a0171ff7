"""The chart of a report: each metric's distance in ULP over the steps, as a figure of plotly's JSON form.

The figure is plain data and plotly's script is copied as a file: plotly's Python side is not imported, which would
cost more than the whole comparison.
"""

from __future__ import annotations

import html
import importlib.util
import re
from pathlib import Path
from typing import Any

from detrun.errors import ArchiveError
from detrun.records.files import write_atomically
from detrun.records.metrics_line import stem_of
from detrun.records.verdict import Verdict

MAX_LINES = 12
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross")
DASHES = ("solid", "dash", "dot")


def figure(verdict: Verdict) -> dict[str, Any] | None:
    """`{"data": …, "layout": …}` of the pair that parts first; None where no metric differs by a distance."""
    first = verdict.first_divergence
    if first is None:
        return None
    found = [
        finding
        for finding in verdict.of_kind("metric")
        if finding.where.get("arms") == first.arms and finding.evidence.get("ulp_by_step")
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
                # plotly reads markup in names; a metric may be called anything.
                "name": html.escape(metric[:60]),
                # What was computed from another metric, often in a wider dtype, waits in the legend.
                "visible": True if stem_of(metric) == metric else "legendonly",
                "x": [point[0] for point in points],
                # Far apart, ULPs exceed what a script's numbers hold exactly; for the eye a float will do.
                "y": [float(point[1]) for point in points],
                # Told apart by more than color.
                "marker": {"size": 6, "symbol": SYMBOLS[number % len(SYMBOLS)]},
                "line": {"dash": DASHES[number % len(DASHES)]},
            }
        )
    axis = {"gridcolor": "rgba(128,128,128,.25)", "zeroline": False}
    layout = {
        "margin": {"l": 60, "r": 10, "t": 10, "b": 40},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": "#888"},
        "legend": {"orientation": "h", "y": -0.2},
        "xaxis": {**axis, "title": {"text": "step"}, "rangemode": "tozero"},
        "yaxis": {**axis, "title": {"text": "ULP"}, "type": "log", "exponentformat": "power"},
    }
    return {"data": data, "layout": layout}


def plotly_script() -> tuple[str, Path]:
    """A name for plotly's script that tells its version, and where the installed package keeps it."""
    spec = importlib.util.find_spec("plotly")
    places = list(spec.submodule_search_locations or ()) if spec else []
    path = Path(places[0]) / "package_data" / "plotly.min.js" if places else Path("plotly.min.js")
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            version = re.search(r"v([0-9][0-9.]*)", file.read(400))
    except OSError:
        raise ArchiveError(
            "plotly's script is missing from this installation",
            where=str(path),
            hint="pip install --force-reinstall plotly",
        ) from None
    return (f"plotly-{version[1].rstrip('.') if version else 'unknown'}.min.js", path)


def save_script(archive: Path) -> str:
    """Copies plotly's script into the archive's `assets` folder unless it is there; returns its file name."""
    name, source = plotly_script()
    target = archive / "assets" / name
    if not target.is_file():
        write_atomically(target, source.read_bytes())
    return name
