"""report.html: everything escaped, no network, the same from the archive alone."""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from detrun.errors import ArchiveError
from detrun.experiments.judge import judge
from detrun.report.chart_lines import from_verdict
from detrun.report.html import render_html, write_report
from tests.records_factory import MadeExperiment, flip_metric, flip_state, make_experiment

EVIL = "<script>alert(1)</script>"


class Tags(HTMLParser):
    """Counts tags and keeps the text outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.links: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag in ("script", "style"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if not self.open:
            self.text += data


def data_of(page: str) -> dict[str, Any]:
    """What the page's script draws."""
    found = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', page, re.S)
    assert found
    document = json.loads(found[1])
    assert isinstance(document, dict)
    return document


@pytest.fixture
def made(tmp_path: Path) -> MadeExperiment:
    made = make_experiment(tmp_path, metrics=("loss", EVIL), required=())
    made.edit_every("b", 0, flip_metric(EVIL), range(3, 7))
    made.edit_every("b", 0, flip_state("gradients"), range(2, 7))
    return made


def test_the_page_says_what_the_screen_says_and_loads_nothing_from_elsewhere(made: MadeExperiment) -> None:
    judge(made.folder)
    page = made.folder.report_file.read_text(encoding="utf-8")
    tags = Tags(page)
    assert "DIVERGED at step 2, rank 0, first seen in the gradients; in a metric at step 3" in tags.text
    index, script = tags.links
    assert index == "../index.html"
    assert re.fullmatch(r"\.\./assets/plotly-[0-9.]+\.min\.js", script)
    assert (made.folder.path / script).resolve().is_file()
    assert "http" not in page.replace("http-equiv", "")
    assert 'name="viewport"' in page


def test_names_are_text_wherever_they_stand(made: MadeExperiment) -> None:
    judge(made.folder)
    page = made.folder.report_file.read_text(encoding="utf-8")
    assert EVIL not in page
    assert html.escape(EVIL) in page
    assert Tags(page).tags["script"] == 3


def test_every_foreign_text_is_escaped(made: MadeExperiment) -> None:
    made.edit_job("b", state="failed", exit_code=1, reason=EVIL, log=EVIL, log_tail=[EVIL, "</pre>"], nodes=[EVIL])
    made.edit_environment("b", 0, lambda d: d["torch"].__setitem__(EVIL, EVIL))
    made.drop("b", 0, 6)
    made.edit_experiment(command_line=[EVIL], seed=None)
    verdict = judge(made.folder)
    page = render_html(verdict, made.file, plotly_link="x.js")
    assert EVIL not in page
    assert Tags(page).tags["pre"] == 1


def test_figures_hold_no_markup_of_the_program(made: MadeExperiment) -> None:
    judge(made.folder)
    data = data_of(made.folder.report_file.read_text(encoding="utf-8"))
    names = [trace["name"] for part in ("values", "distance") for trace in data[part]["data"] if "name" in trace]
    assert html.escape(EVIL) in names
    assert not any("<" in name for name in [*names, *data["metrics"]])


def test_plotly_is_saved_once_an_archive(tmp_path: Path) -> None:
    for _ in range(2):
        made = make_experiment(tmp_path)
        made.edit("b", 0, 3, flip_metric("loss"))
        judge(made.folder)
    assert len(list((tmp_path / "assets").iterdir())) == 1
    assert made.folder.report_file.stat().st_size < 100_000


def test_a_page_without_a_chart_needs_no_script(tmp_path: Path) -> None:
    made = make_experiment(tmp_path)
    for arm in "ab":
        for rank in range(made.file.ranks):
            made.metrics_path(arm, rank).unlink()
    judge(made.folder)
    page = made.folder.report_file.read_text(encoding="utf-8")
    assert "<script" not in page
    assert "NOT VERIFIED" in page
    assert not (tmp_path / "assets").exists()


def test_an_identical_pair_shows_its_metrics_and_no_distances(tmp_path: Path) -> None:
    made = make_experiment(tmp_path)
    judge(made.folder)
    page = made.folder.report_file.read_text(encoding="utf-8")
    assert "IDENTICAL" in page
    assert "No metric differs in any bit." in page
    data = data_of(page)
    assert data["metrics"] == ["loss", "lm_loss", "load_balancing_loss", "mtp_loss", "grad_norm"]
    assert len(data["values"]["data"]) == 2 * 5
    assert data["distance"] is None
    assert data["map"] is None


def test_an_experiment_that_another_one_ran_finds_the_archive_and_its_parent(made: MadeExperiment) -> None:
    place = made.folder.path / "passes" / "1-pair" / "report.html"
    write_report(place, judge(made.folder, write=False), made.file)
    index, parent, script = Tags(place.read_text(encoding="utf-8")).links
    assert (place.parent / index).resolve() == made.folder.path.parent.resolve() / "index.html"
    assert (place.parent / parent).resolve() == made.folder.report_file.resolve()
    assert (place.parent / script).resolve().is_file()
    assert (made.folder.path.parent / "assets").is_dir()


def test_a_standalone_page_carries_its_script(made: MadeExperiment, tmp_path: Path) -> None:
    verdict = judge(made.folder, write=False)
    write_report(tmp_path / "copy.html", verdict, made.file, standalone=True)
    page = (tmp_path / "copy.html").read_text(encoding="utf-8")
    assert len(page) > 1_000_000
    assert Tags(page).links == []


def test_without_records_the_verdict_still_gives_the_worst_ulp_of_each_step(made: MadeExperiment) -> None:
    verdict = judge(made.folder, write=False)
    assert "Metrics over steps" not in render_html(verdict, made.file, plotly_link="x.js")
    chart = from_verdict(verdict)
    assert chart is not None
    assert [trace["x"] for trace in chart["data"]] == [[3, 4, 5, 6]]
    assert chart["data"][0]["y"] == [1.0] * 4
    assert "<" not in json.dumps(chart["data"])


def test_a_report_that_cannot_be_written_does_not_cost_the_verdict(made: MadeExperiment) -> None:
    made.folder.report_file.mkdir()
    (made.folder.report_file / "x").touch()
    verdict = judge(made.folder)
    assert verdict.verdict == "diverged"
    assert verdict.of_kind("report")[0].severity == "warning"
    assert made.folder.verdict_file.is_file()


def test_a_verdict_that_cannot_be_written_is_an_error(made: MadeExperiment) -> None:
    made.folder.verdict_file.mkdir()
    (made.folder.verdict_file / "x").touch()
    with pytest.raises(ArchiveError):
        judge(made.folder)


def test_what_turns_or_hides_text_is_shown_escaped(tmp_path: Path) -> None:
    made = make_experiment(tmp_path)
    hidden = "\x1b[31m\u202eevil\x9b"
    made.edit_experiment(recipe={**made.file.recipe, "name": hidden}, command_line=["detrun", hidden])
    verdict = judge(made.folder, report=False)
    page = render_html(verdict, made.file)
    for text in (page, verdict.to_json()):
        assert not set(text) & set(hidden) - set("[31mevil")
    assert json.loads(verdict.to_json())["recipe"] == hidden
    assert r"\x1b[31m\u202eevil\x9b" in page
