"""`detrun report --open` shows the page, and says where it lies where nothing can show it."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import pytest

from detrun.cli import main
from tests.records_factory import MadeExperiment, flip_metric, make_experiment

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeExperiment:
    monkeypatch.setenv("DETRUN_ARCHIVE", str(tmp_path))
    made = make_experiment(tmp_path)
    made.edit("b", 0, 3, flip_metric("loss"))
    return made


@pytest.mark.parametrize("there", [True, False])
def test_it_opens_the_page_and_the_exit_code_stays_the_verdicts(
    made: MadeExperiment, monkeypatch: pytest.MonkeyPatch, capsys: Captured, there: bool
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: asked.append(url) or there)
    assert main(["report", made.folder.id, "--open"]) == 1
    assert asked == [made.folder.report_file.resolve().as_uri()]
    said = capsys.readouterr().err
    assert ("no browser could be opened here" in said) is not there
    assert str(made.folder.report_file) in said


def test_without_a_page_it_says_so(made: MadeExperiment, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda url: pytest.fail(url))
    made.folder.report_file.mkdir()
    (made.folder.report_file / "x").touch()
    assert main(["report", made.folder.id, "--open"]) == 1
    assert "there is no page" in capsys.readouterr().err
