"""report.html: the verdict as one page that needs no network, made from verdict.json and experiment.json alone.

Everything in it is escaped by default: names, values and log lines come from programs that nobody vouches for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markupsafe import Markup

from detrun.compare.folding import hosts
from detrun.records.files import write_atomically
from detrun.records.jobs import ExperimentFile
from detrun.records.verdict import Verdict
from detrun.report import diagnose_screen, localize_rows, localize_words, resume_words, state_table, timeline, words
from detrun.report.answer import head, sentence
from detrun.report.chart import figure, plotly_script, save_script
from detrun.report.pages import environment

MAX_REASONS = 100
WIDE, NARROW = 110, 48
"""Columns of the timeline on a desk and on a phone."""


def render_html(
    verdict: Verdict, experiment: ExperimentFile, *, plotly_link: str = "", standalone: bool = False
) -> str:
    """The page. plotly_link: where the page finds plotly's script; standalone: the script is in the page."""
    chart = figure(verdict)
    source = Markup(plotly_script()[1].read_text(encoding="utf-8")) if chart and standalone else None  # noqa: S704
    resume = verdict.experiment == resume_words.EXPERIMENT
    localized = verdict.experiment in localize_words.EXPERIMENTS
    diagnosed = verdict.experiment == diagnose_screen.EXPERIMENT
    facts = [words.declared(verdict) or resume_words.declared(experiment)]
    if localized:
        facts += localize_words.context(verdict, experiment)
    else:
        facts += [*words.context(verdict, experiment), *resume_words.context(verdict, experiment)]
    facts += [words.cost(verdict), resume_words.capture_cost(verdict), words.chance(verdict)]
    return environment().get_template("report.html.j2").render(
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
        chart=chart,
        plotly_link=plotly_link,
        plotly_name=plotly_link.rpartition("/")[2],
        plotly_source=source,
        hosts=hosts,
        purposes={arm.id: arm.purpose for arm in experiment.arms if arm.purpose},
        limit=MAX_REASONS,
    )


def _fix(verdict: Verdict) -> str | None:
    if verdict.experiment == resume_words.EXPERIMENT:
        return resume_words.fix(verdict)
    if verdict.experiment in localize_words.EXPERIMENTS:
        return localize_words.fix(verdict)
    return diagnose_screen.fix(verdict) if verdict.experiment == diagnose_screen.EXPERIMENT else None


def _diagnosed(verdict: Verdict) -> dict[str, Any]:
    """What the same section shows of a diagnosis."""
    return {"rows": diagnose_screen.rows(verdict)}


def _below(verdict: Verdict, experiment: ExperimentFile) -> list[str]:
    if verdict.experiment == resume_words.EXPERIMENT:
        return resume_words.below(verdict, experiment)
    if verdict.experiment in localize_words.EXPERIMENTS:
        return []
    return words.after_the_first(verdict, experiment)


def _localized(verdict: Verdict, experiment: ExperimentFile) -> dict[str, Any]:
    """What the section of a localization shows."""
    return {
        "place": localize_words.below_the_head(verdict, experiment),
        "brackets": localize_words.brackets(verdict),
        "rows": localize_rows.rows(verdict, experiment),
        "bitmaps": localize_rows.bitmaps(verdict),
        "clean": localize_rows.clean_table(verdict),
        "guilty": localize_rows.guilty_of_table(verdict),
        "kernels": localize_rows.kernel_table(verdict),
        "spread": localize_rows.spread(verdict),
        "propagation": localize_rows.propagation(verdict),
    }


def write_report(path: Path, verdict: Verdict, experiment: ExperimentFile, *, standalone: bool = False) -> None:
    """Writes the page by rename, with plotly's script once an archive beside the experiments' folders.

    Raises ArchiveError where either cannot be written.
    """
    link = ""
    if not standalone and figure(verdict) is not None:
        link = f"../assets/{save_script(path.parent.parent)}"
    page = render_html(verdict, experiment, plotly_link=link, standalone=standalone)
    write_atomically(path, page.encode("utf-8", "backslashreplace"))
