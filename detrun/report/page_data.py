"""What a report's script draws: one JSON document in the page, and the choices that its controls offer."""

from __future__ import annotations

from typing import Any

from detrun.records.files import one_line
from detrun.records.jobs import ExperimentFile
from detrun.records.verdict import Verdict
from detrun.report import localize_words, resume_words
from detrun.report.chart import label, packed
from detrun.report.chart_bars import attempts_figure, times_figure
from detrun.report.chart_lines import distance_figure, from_verdict, values_figure
from detrun.report.chart_map import map_data, spread_figure
from detrun.report.series import Pair, Series

MAX_NAME = 60


def page_data(verdict: Verdict, experiment: ExperimentFile, series: Series | None) -> dict[str, Any] | None:
    """All figures of the page; None where there is none."""
    found: dict[str, Any] = {"values": None, "distance": None, "map": None, "first": None, "axis": None}
    if series is not None and len(series.columns):
        found |= {
            "values": values_figure(series) if series.values else None,
            "distance": distance_figure(series),
            "map": map_data(series),
            "axis": packed(_steps(series)),
            "width": series.width,
            "metrics": [label(name) for name in series.metrics],
            "pairs": [{"a": pair.a, "b": pair.b, "name": _named(series, pair)} for pair in series.pairs],
            "pair": next((at for at, pair in enumerate(series.pairs) if pair.differs), 0),
            "first": _first(verdict, series),
        }
    else:
        found["distance"] = from_verdict(verdict)
    figures: dict[str, Any] = {}
    if verdict.experiment == resume_words.EXPERIMENT:
        figures["attempts"] = attempts_figure(verdict, experiment, series)
    if verdict.experiment in localize_words.EXPERIMENTS:
        figures["spread"] = spread_figure(verdict)
    figures["times"] = times_figure(verdict)
    found["figures"] = {name: figure for name, figure in figures.items() if figure is not None}
    drawn = any(found[key] for key in ("values", "distance", "map", "figures"))
    return found if drawn else None


def _steps(series: Series) -> Any:
    import numpy as np

    small = not len(series.columns) or int(series.columns[-1]) < 1 << 31
    return series.columns.astype(np.int32 if small else np.float64)


def _named(series: Series, pair: Pair) -> str:
    return f"{series.runs[pair.a].label} and {series.runs[pair.b].label}"


def _first(verdict: Verdict, series: Series) -> int | None:
    """The step of the first divergence, where it is on the axis."""
    first = verdict.first_divergence
    last = int(series.columns[-1]) + series.width - 1
    return first.step if first is not None and int(series.columns[0]) <= first.step <= last else None


def controls_of(verdict: Verdict, series: Series | None) -> dict[str, Any]:
    """What can be chosen: metrics by name, the one that is shown at first, pairs of runs; and what is not shown."""
    if series is None:
        return {"metrics": [], "chosen": 0, "pairs": [], "notes": []}
    first = verdict.first_divergence
    parted = sorted(first.metrics, key=lambda name: first.metrics[name].step) if first else []
    shown = next((name for name in parted if name in series.metrics), None)
    return {
        "metrics": [one_line(name, MAX_NAME) for name in series.metrics],
        "chosen": series.metrics.index(shown) if shown else 0,
        "pairs": [_named(series, pair) for pair in series.pairs],
        "notes": list(series.notes),
    }
