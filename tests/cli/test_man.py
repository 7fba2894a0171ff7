"""The manual page: made from the help, and kept in docs/."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from detrun.cli import main
from detrun.cli.app import COMMANDS
from detrun.report.manpage import escape
from tests.packages import ensure_program

PAGE = Path(__file__).parents[2] / "docs" / "detrun.1"


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["man", *words]) == 0
    return capsys.readouterr().out


def test_the_page_in_docs_is_what_the_help_makes(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    page = printed(capsys)
    if request.config.getoption("--update-golden"):
        PAGE.write_text(page)
    assert page == PAGE.read_text(), "detrun man > docs/detrun.1"


def test_the_page_does_not_depend_on_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    narrow = printed(capsys, "pair")
    monkeypatch.setenv("COLUMNS", "300")
    assert printed(capsys, "pair") == narrow


def test_every_command_and_its_options_are_on_it(capsys: pytest.CaptureFixture[str]) -> None:
    page = printed(capsys)
    for name in COMMANDS:
        assert f".SS detrun {name}".replace("-", "\\-") in page
    assert "\\-\\-archive DIR" in page
    assert page.count(".B \\-\\-help") == 1


def test_the_page_of_one_command(capsys: pytest.CaptureFixture[str]) -> None:
    page = printed(capsys, "resume-check")
    assert page.startswith(".TH DETRUN-RESUME-CHECK 1")
    assert "detrun\\-resume\\-check \\- interrupt a run" in page


def test_a_word_that_is_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["man", "pear"]) == 2
    assert "pear is not a command" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "roff"),
    [
        (".TH forged", "\\&.TH forged"),
        ("'b it", "\\(aqb it"),
        ("a\n.SH b", "a .SH b"),
        ("C:\\new --set", "C:\\enew \\-\\-set"),
        ("nights × recipes", "nights \\[u00D7] recipes"),
    ],
)
def test_text_is_never_read_as_roff(text: str, roff: str) -> None:
    assert escape(text) == roff


def test_groff_warns_of_nothing() -> None:
    groff = ensure_program(["groff"], "groff-base")
    done = subprocess.run(
        [groff, "-man", "-Tutf8", "-ww", "-K", "utf8", str(PAGE)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    text = re.sub(".\b", "", done.stdout)  # bold is a character over itself
    assert "detrun pair [OPTIONS] [RECIPE]" in re.sub(" +", " ", text)


@pytest.mark.slow
def test_the_wheel_brings_the_page(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    done = subprocess.run(command, cwd=PAGE.parents[1], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/share/man/man1/detrun.1")]
        assert archive.read(name) == PAGE.read_bytes()
