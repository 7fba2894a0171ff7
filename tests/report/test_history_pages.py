"""The history and the list of experiments, on a terminal and as pages."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page
from rich.console import Console

from detrun.compare.history import History, Lost, history
from detrun.experiments.history import history_of, write_pages
from detrun.records.archive import Archive
from detrun.records.files import write_atomically
from detrun.records.index import read_index
from detrun.report import index_page
from detrun.report.history_page import render_history
from detrun.report.history_screen import document, lines, render
from detrun.report.index_page import render_index, update_index_page
from tests.history_factory import Nights, seven_nights

EVIL = "</script><img src=x onerror=document.title='owned'>"
GOLDEN = Path(__file__).parent / "golden"
MOMENT = datetime(2026, 11, 29, 2, 30, tzinfo=timezone.utc)


@pytest.fixture
def week(tmp_path: Path) -> History:
    nights = seven_nights(tmp_path / "archive")
    lost = [
        Lost(f"2026-11-{day}", "big-gpu", "sbatch: error: Invalid account", MOMENT.replace(day=day))
        for day in range(23, 30)
    ]
    return history(read_index(nights.archive), lost)


def test_a_week_on_a_terminal(week: History) -> None:
    shown = "".join(f"{line.plain}\n" for line in lines(week))
    assert shown == (GOLDEN / "history.txt").read_text(encoding="utf-8")
    assert max(map(len, shown.splitlines()[:10])) <= 80


def test_many_recipes_stand_below_each_other_in_80_columns(tmp_path: Path) -> None:
    nights = Nights(tmp_path)
    for number in range(11):
        nights.add("2026-11-24", f"recipe-with-a-rather-long-name-{number}", "diverged", step=1000)
    table = [line.plain for line in lines(history(read_index(nights.archive)))]
    assert max(map(len, table[: table.index("", 20)])) <= 80
    assert sum(line.count("✗ DIVERGED @1000") for line in table) == 11


def test_in_a_pipe_nothing_is_colored_or_cut(week: History, capsys: pytest.CaptureFixture[str]) -> None:
    render(week, Console(width=40))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "of 3 recipes 1 diverges, 1 is flaky, 1 not verified: 7 nights, 25 experiments" in shown


def test_the_document_has_all_of_it(week: History) -> None:
    found = document(week)["recipes"]
    assert found["hybrid-cpu"]["first_bad_night"] == "2026-11-26"
    assert found["hybrid-cpu"]["breaks"][0]["changes"] == [{"what": "numpy", "before": "2.4.6", "after": "2.5.0"}]
    assert found["hybrid-cpu"]["rates"]["pair"]["interval"] == pytest.approx([0.1841, 0.9010], abs=1e-3)
    assert found["moe"]["flaky"] == "same-nodes"
    assert found["big-gpu"]["nights"]["2026-11-23"]["state"] == "not-started"


def test_the_page_says_it_at_a_glance(week: History) -> None:
    page = render_history(week)
    for text in (
        "of 3 recipes 1 diverges, 1 is flaky, 1 not verified",
        "DIVERGED since 2026-11-26 (night 4 of 7)",
        "numpy 2.4.6 → 2.5.0",
        "last good night: 2026-11-25",
        "flaky: both identical and diverged in the same environment, on the same nodes",
        "sbatch: error: Invalid account",
        "4 of 7 pairs diverged: 57% (95% interval 18% to 90%)",
    ):
        assert text in page
    assert page.count("DIVERGED at step 7") == 4


def test_only_reports_that_are_there_are_linked_to(tmp_path: Path) -> None:
    nights = Nights(tmp_path)
    there = nights.add("2026-11-24", "hybrid-cpu", "diverged", report=True)
    missing = nights.add("2026-11-25", "hybrid-cpu", "diverged")
    write_pages(nights.archive, *history_of(nights.archive))
    for name in ("history.html", "index.html"):
        page = (tmp_path / name).read_text()
        assert f'href="{there}/report.html"' in page
        assert f"{missing}/report.html" not in page
        assert missing in page or name == "history.html"


def test_an_empty_archive_has_pages_too(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    write_pages(archive, *history_of(archive))
    assert "no experiment yet" in (tmp_path / "history.html").read_text()
    assert "0 experiments" in (tmp_path / "index.html").read_text()


def test_the_list_is_bounded_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nights = Nights(tmp_path)
    ids = [nights.add(f"2026-11-{day}", "hybrid-cpu", "identical") for day in range(10, 20)]
    monkeypatch.setattr(index_page, "MAX_ROWS", 4)
    page = render_index(read_index(nights.archive))
    assert [id for id in ids if id in page] == ids[-4:]
    assert page.index(ids[-1]) < page.index(ids[-2])
    assert "6 older ones are left out" in page


def test_an_archive_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    nights = Nights(tmp_path)
    nights.add("2026-11-24", "hybrid-cpu", "identical")
    assert update_index_page(nights.archive) == tmp_path / "index.html"
    (tmp_path / "index.html").unlink()
    (tmp_path / "index.html").mkdir()
    (tmp_path / "index.html" / "x").touch()
    assert update_index_page(nights.archive) is None


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    said: list[str] = []
    context = browser.new_context(offline=True, viewport={"width": 390, "height": 844}, color_scheme="dark")
    page = context.new_page()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("requestfailed", lambda request: said.append(f"failed: {request.url}"))
    yield page
    context.close()
    assert said == []


@pytest.mark.slow
def test_pages_of_hostile_names_in_a_browser(tmp_path: Path, page: Page) -> None:
    nights = Nights(tmp_path)
    nights.add("2026-11-23", "hybrid-cpu", "identical", packages={EVIL: "1"})
    id = nights.add("2026-11-24", "hybrid-cpu", "diverged", what=EVIL, culprit={"kind": EVIL, "name": EVIL})
    verdict = nights.root / id / "verdict.json"
    hostile = EVIL.replace('"', "")
    write_atomically(
        verdict, verdict.read_bytes().replace(b'"recipe": "hybrid-cpu"', f'"recipe": "{hostile}"'.encode())
    )
    nights.add("2026-11-25", "hybrid-cpu", "diverged", labels={"night": EVIL}, packages={"numpy": EVIL})
    write_pages(nights.archive, *history_of(nights.archive))
    for name in ("history.html", "index.html"):
        page.goto((tmp_path / name).as_uri())
        assert page.locator("img").count() == 0
        assert "owned" not in page.title()
        assert EVIL[:20] in page.inner_text("body")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.slow
def test_the_list_filters_and_leads_to_reports(tmp_path: Path, page: Page) -> None:
    nights = seven_nights(tmp_path)
    write_pages(nights.archive, *history_of(nights.archive))
    page.goto((tmp_path / "index.html").as_uri())
    rows = page.locator("#rows tr:visible")
    assert rows.count() == 25
    page.fill("#filter", "moe diverged")
    assert rows.count() == 2
    assert page.inner_text("#shown") == "2 of 25"
    page.fill("#filter", "aten.index_put_")
    assert rows.count() == 4
    page.fill("#filter", "")
    assert rows.count() == 25
    page.click("text=night by night")
    assert page.title().startswith("of 2 recipes 1 diverges")
    page.click("td.diverged a >> nth=0")
    assert page.title() == "report"
