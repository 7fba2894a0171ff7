"""report.html: the verdict as one page that needs no network, made from verdict.json, experiment.json and what
`report.series` holds of the records.

Everything in it is escaped by default: names, values and log lines come from programs that nobody vouches for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from detrun.compare.folding import hosts
from detrun.records.files import write_atomically
from detrun.records.jobs import ExperimentFile
from detrun.records.verdict import Verdict
from detrun.report import diagnose_screen, localize_rows, localize_words, resume_words, state_table, timeline, words
from detrun.report.answer import head, sentence
from detrun.report.chart import plotly_script, save_script
from detrun.report.localize_card import card, descent, entry
from detrun.report.page_data import controls_of, page_data
from detrun.report.pages import environment
from detrun.report.series import Series

MAX_REASONS = 100
WIDE, NARROW = 110, 48
"""Columns of the timeline on a desk and on a phone."""

_PASSES = "passes"


@dataclass(frozen=True)
class Link:
    """To another page of the archive."""

    href: str
    text: str


@dataclass(frozen=True)
class FactRow:
    """One fact of every run; differs: among those whose surroundings are known at all."""

    name: str
    values: list[str]
    differs: bool


def render_html(
    verdict: Verdict,
    experiment: ExperimentFile,
    series: Series | None = None,
    *,
    plotly_link: str = "",
    standalone: bool = False,
    links: tuple[Link, ...] = (),
) -> str:
    """The page. series: what is drawn of the records. plotly_link: where the page finds plotly's script; standalone:
    the script is in the page. links: to other pages of the archive."""
    data = page_data(verdict, experiment, series)
    return _page(verdict, experiment, series, data, plotly_link, standalone, links)


def _page(
    verdict: Verdict,
    experiment: ExperimentFile,
    series: Series | None,
    data: dict[str, Any] | None,
    plotly_link: str,
    standalone: bool,
    links: tuple[Link, ...],
) -> str:
    source = Markup(plotly_script()[1].read_text(encoding="utf-8")) if data and standalone else None  # noqa: S704
    resume = verdict.experiment == resume_words.EXPERIMENT
    localized = verdict.experiment in localize_words.EXPERIMENTS
    diagnosed = verdict.experiment == diagnose_screen.EXPERIMENT
    facts = [words.declared(verdict) or resume_words.declared(experiment)]
    if localized:
        facts += localize_words.context(verdict, experiment)
    else:
        facts += [*words.context(verdict, experiment), *resume_words.context(verdict, experiment)]
    facts += [words.cost(verdict), resume_words.capture_cost(verdict), words.chance(verdict)]
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            verdict=verdict,
            experiment=experiment,
            head=head(verdict),
            sentence=sentence(verdict, experiment),
            below=_below(verdict, experiment),
            fix=_fix(verdict),
            localized=_localized(verdict, experiment) if localized else _diagnosed(verdict) if diagnosed else None,
            reasons=list(dict.fromkeys(verdict.not_verified)),
            rows=words.first_rows(verdict, experiment),
            facts=[fact for fact in facts if fact],
            settings=[f for f in verdict.of_kind("environment") if "setting" in f.where],
            timeline=timeline.picture(verdict, experiment, WIDE) if resume else [],
            narrow=timeline.picture(verdict, experiment, NARROW) if resume else [],
            tables=state_table.tables(verdict, experiment) if resume else [],
            data=data,
            figures=data["figures"] if data else {},
            controls=controls_of(verdict, series),
            surroundings=_surroundings(series),
            took=_took(series),
            links=links,
            plotly_link=plotly_link,
            plotly_name=plotly_link.rpartition("/")[2],
            plotly_source=source,
            hosts=hosts,
            purposes={arm.id: arm.purpose for arm in experiment.arms if arm.purpose},
            limit=MAX_REASONS,
        )
    )


def _fix(verdict: Verdict) -> str | None:
    if verdict.experiment == resume_words.EXPERIMENT:
        return resume_words.fix(verdict)
    if verdict.experiment in localize_words.EXPERIMENTS:
        return localize_words.fix(verdict)
    return diagnose_screen.fix(verdict) if verdict.experiment == diagnose_screen.EXPERIMENT else None


def _diagnosed(verdict: Verdict) -> dict[str, Any]:
    """What the same section shows of a diagnosis."""
    return {"rows": diagnose_screen.rows(verdict), "entry": entry(verdict)}


def _below(verdict: Verdict, experiment: ExperimentFile) -> list[str]:
    if verdict.experiment == resume_words.EXPERIMENT:
        return resume_words.below(verdict, experiment)
    if verdict.experiment in localize_words.EXPERIMENTS:
        return []
    return words.after_the_first(verdict, experiment)


def _localized(verdict: Verdict, experiment: ExperimentFile) -> dict[str, Any]:
    """What the section of a localization shows."""
    levels = descent(verdict, experiment)
    return {
        "place": localize_words.below_the_head(verdict, experiment),
        "brackets": localize_words.brackets(verdict),
        "card": card(verdict, experiment),
        "entry": entry(verdict),
        "descent": levels,
        # What the way down shows as a table is not told twice.
        "rows": [row for row in localize_rows.rows(verdict, experiment) if not row.label.startswith("level ")],
        "bitmaps": localize_rows.bitmaps(verdict),
        "clean": localize_rows.clean_table(verdict),
        "guilty": localize_rows.guilty_of_table(verdict),
        "kernels": localize_rows.kernel_table(verdict),
        "spread": localize_rows.spread(verdict),
        "propagation": localize_rows.propagation(verdict),
    }


def _surroundings(series: Series | None) -> dict[str, Any] | None:
    """What every run's first rank saw, by fact."""
    if series is None:
        return None
    names = dict.fromkeys(name for run in series.runs for name in run.facts)
    rows = []
    for name in names:
        known = {run.facts.get(name, "") for run in series.runs if "Python" in run.facts or name in run.facts}
        values = [run.facts.get(name, "–") for run in series.runs]
        rows.append(FactRow(name, values, name != "started" and len(known) > 1))
    return {"runs": [run.label for run in series.runs], "rows": rows} if rows else None


def _took(series: Series | None) -> dict[tuple[str, int], str]:
    """How long each attempt took, in words."""
    runs = series.runs if series else ()
    return {(run.arm, run.attempt): _in_words(run.seconds) for run in runs if run.seconds is not None}


def _in_words(seconds: float) -> str:
    """`0.8 s`, `12 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


def write_report(
    path: Path,
    verdict: Verdict,
    experiment: ExperimentFile,
    series: Series | None = None,
    *,
    standalone: bool = False,
) -> None:
    """Writes the page by rename, with plotly's script once an archive beside the experiments' folders.

    Raises ArchiveError where either cannot be written.
    """
    link = ""
    links: tuple[Link, ...] = ()
    data = page_data(verdict, experiment, series)
    if not standalone:
        up, archive = "..", path.parent.parent
        if archive.name == _PASSES:  # an experiment that another one ran
            up, archive = "../../..", archive.parent.parent
            links = (Link("../../report.html", "the experiment that ran this one"),)
        links = (Link(f"{up}/index.html", "all experiments"), *links)
        if data is not None:
            link = f"{up}/assets/{save_script(archive)}"
    page = _page(verdict, experiment, series, data, link, standalone, links)
    write_atomically(path, page.encode("utf-8", "backslashreplace"))
