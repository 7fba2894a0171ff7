"""Pages in a real browser, without a network: they open without a complaint, and their controls do what they say."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from detrun.experiments.judge import judge
from detrun.report.html import write_report
from tests.records_factory import MadeExperiment, flip_metric, flip_state, make_experiment
from tests.report import localize_scenes, resume_scenes

pytestmark = pytest.mark.slow

EVIL = "<script>document.title='owned'</script>"
WORSE = "</script><img src=x onerror=\"document.title='owned'\"> %{x} <b>bold</b>"


@contextlib.contextmanager
def opened(browser: Browser, path: Path, width: int = 1280, scheme: str = "light") -> Iterator[Page]:
    """A page whose charts are drawn. Whatever the console says, or a request that fails or leaves the disk, fails."""
    said: list[str] = []
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if scheme == "dark" else "light",
        has_touch=width < 500,
        offline=True,
    )
    page = context.new_page()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("requestfailed", lambda request: said.append(f"failed: {request.url}"))
    page.on("request", lambda request: None if request.url.startswith("file:") else said.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_function("document.documentElement.dataset.drawn === 'true'")
    yield page
    context.close()
    assert said == []


@pytest.fixture(scope="module")
def diverged(tmp_path_factory: pytest.TempPathFactory) -> MadeExperiment:
    """Three arms; b is equal to a, c differs on rank 2. Two metrics have hostile names."""
    made = make_experiment(
        tmp_path_factory.mktemp("archive"),
        arms=("a", "b", "c"),
        ranks=4,
        steps=12,
        metrics=("loss", EVIL, WORSE),
        required=(),
    )
    made.edit_every("c", 2, flip_state("gradients"), range(4, 13))
    made.edit_every("c", 2, flip_metric("loss", 8), range(5, 13))
    made.edit_every("c", 2, flip_metric(WORSE), range(6, 13))
    judge(made.folder)
    return made


def traces(page: Page, id: str) -> list[dict[str, object]]:
    found = page.evaluate(f"document.getElementById('{id}').data.map(t => ({{name: t.name, first: Number(t.x[0])}}))")
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_it_opens_without_a_complaint_and_fits(
    browser: Browser, diverged: MadeExperiment, width: int, scheme: str
) -> None:
    with opened(browser, diverged.folder.report_file, width, scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for id in ("values", "distance", "map"):
            box = page.locator(f"#{id} .main-svg").first.bounding_box()
            assert box is not None
            assert box["width"] <= width
            assert box["height"] > 100
        text = page.evaluate("getComputedStyle(document.querySelector('#values .xtick text')).fill")
        assert text == page.evaluate("getComputedStyle(document.body).color")


def test_hostile_names_are_text(browser: Browser, diverged: MadeExperiment) -> None:
    with opened(browser, diverged.folder.report_file) as page:
        assert page.title().startswith("DIVERGED")
        assert page.locator("img").count() == 0
        page.select_option("#metric", label=EVIL)
        assert page.locator("#values .ytitle").text_content() == EVIL
        page.select_option("#metric", index=2)
        box = page.locator("#values .nsewdrag").bounding_box()
        assert box is not None
        at = page.evaluate("document.getElementById('values')._fullLayout.xaxis.d2p(7)")
        page.mouse.move(box["x"] + at, box["y"] + box["height"] / 2)
        page.wait_for_selector("#values .hoverlayer .legend")
        assert "arm c" in str(page.locator("#values .hoverlayer").text_content())
        assert page.title().startswith("DIVERGED")
        assert page.locator("img").count() == 0
        assert page.locator("#values b").count() == 0


def test_metric_arms_and_axes_can_be_chosen(browser: Browser, diverged: MadeExperiment) -> None:
    with opened(browser, diverged.folder.report_file) as page:
        assert page.locator("#metric").input_value() == "0"  # the first that differs
        assert len(traces(page, "values")) == 5  # three arms, and c's band
        # Of all arms, those are held against each other that differ.
        assert page.locator(".pair-name").first.text_content() == "a and c"
        assert {trace["first"] for trace in traces(page, "distance")} == {5, 6}
        assert page.evaluate("document.getElementById('distance').layout.yaxis.type") == "log"
        page.select_option("#scale", "linear")
        assert page.evaluate("document.getElementById('distance').layout.yaxis.type") == "linear"
        page.check("#log")
        assert page.evaluate("document.getElementById('values').layout.yaxis.type") == "log"
        page.select_option("#pair", label="a and b")
        assert [trace["name"] for trace in traces(page, "values")] == ["arm a", "arm b"]
        assert page.locator("#no-distance").is_visible()
        assert not page.locator("#distance").is_visible()


def test_equal_ranks_can_be_hidden_and_a_cell_says_what_it_is(browser: Browser, diverged: MadeExperiment) -> None:
    with opened(browser, diverged.folder.report_file) as page:
        assert page.evaluate("document.getElementById('map').data[0].z.length") == 4
        page.check("#differing")
        assert page.evaluate("document.getElementById('map').data[0].z.length") == 1
        assert page.locator("#map-count").text_content() == "1 of 4 ranks"
        assert page.locator("#map-legend li").all_text_contents() == ["equal", "gradients"]
        box = page.locator("#map .nsewdrag").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.5)
        page.wait_for_function("document.getElementById('map-note').textContent.startsWith('rank 2, step')")
        assert "gradients differs first" in str(page.locator("#map-note").text_content())
        page.select_option("#pair", label="a and b")
        assert page.locator("#no-rank").is_visible()


def test_without_its_script_the_page_says_what_is_missing(
    browser: Browser, diverged: MadeExperiment, tmp_path: Path
) -> None:
    copy = tmp_path / "alone" / "report.html"
    copy.parent.mkdir()
    shutil.copy(diverged.folder.report_file, copy)
    page = browser.new_page()
    page.goto(copy.as_uri())
    assert page.locator("#no-chart").is_visible()
    assert "--standalone" in str(page.locator("#no-chart").text_content())
    assert not page.locator("#values").is_visible()
    assert page.locator("h1").is_visible()
    page.close()


def test_a_copied_page_carries_everything(browser: Browser, diverged: MadeExperiment, tmp_path: Path) -> None:
    verdict = judge(diverged.folder, write=False, standalone=True)
    write_report(tmp_path / "report.html", verdict, diverged.file, standalone=True)
    with opened(browser, tmp_path / "report.html"):
        pass


@pytest.mark.parametrize("width", [1280, 390])
def test_a_localization_shows_how_the_difference_went_on(browser: Browser, tmp_path: Path, width: int) -> None:
    write_report(tmp_path / "x" / "report.html", *localize_scenes.many_origins())
    with opened(browser, tmp_path / "x" / "report.html", width) as page:
        assert page.evaluate("document.getElementById('spread').data[0].z.length") == 6
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_resume_check_shows_its_attempts_and_checkpoints(browser: Browser, tmp_path: Path) -> None:
    write_report(tmp_path / "x" / "report.html", *resume_scenes.lost_moments())
    with opened(browser, tmp_path / "x" / "report.html") as page:
        found = page.evaluate("document.getElementById('attempts-chart').data.map(t => [t.type, t.name, t.y.length])")
        assert found == [
            ["bar", None, 3],
            ["scatter", "checkpoint (filled: the one that was resumed from)", 1],
            ["scatter", "ended from outside", 1],
        ]
