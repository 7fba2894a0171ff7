"""The entries for cron and scrontab: what is in them, and what never is."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from detrun.errors import UsageError
from detrun.experiments.nightly.entry import cron_entry, entry_environment
from detrun.experiments.nightly.run import NightlyOptions
from detrun.records.archive import Archive
from detrun.report import notify
from tests.running import write_recipe


@pytest.fixture(autouse=True)
def nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "_taken", {})


def test_every_path_is_absolute_and_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "a place; touch x"
    place.mkdir()
    write_recipe(place, "plain")
    monkeypatch.chdir(place)
    options = NightlyOptions(only=("pair",), localize_budget=0.5, against="last-good", at_once=3, agreed=True)
    entry = cron_entry([Path("plain.yaml")], Archive("archive"), options, "02:30", environ={"PATH": "/bin"})
    line = entry.text.splitlines()[-1]
    assert line.startswith("30 2 * * * cd ")
    words = shlex.split(line.split(" ", 5)[5])
    assert words[:3] == ["cd", str(place), "&&"]
    assert words[7:] == [
        *("nightly", str(place / "plain.yaml"), "--archive", str(place / "archive"), "--quiet", "--only", "pair"),
        *("--localize-budget", "0.5", "--against", "last-good", "--at-once", "3", "--yes"),
    ]
    assert words[3] == "exec" and Path(words[4]).is_absolute() and words[5:7] == ["-m", "detrun"]


def test_the_environment_is_whole_and_without_secrets() -> None:
    environ = {
        "PATH": "/opt/x:/bin",
        "HOME": "/home/me",
        "LANG": "C.UTF-8",
        "SLURM_CONF": "/etc/slurm/slurm.conf",
        "SLURM_JOB_ID": "17",
        "DETRUN_PYTHON": "/opt/python",
        "DETRUN_ARCHIVE": "/elsewhere",
        "DETRUN_ARM": "a",
        "DETRUN_API_TOKEN": "s3cr3t",
        "DETRUN_NOTIFY_URLS": "json://s3cr3t",
        "WANDB_API_KEY": "s3cr3t",
    }
    found, warnings = entry_environment(environ)
    assert found == {
        "PATH": "/opt/x:/bin",
        "HOME": "/home/me",
        "SHELL": "/bin/sh",
        "LANG": "C.UTF-8",
        "SLURM_CONF": "/etc/slurm/slurm.conf",
        "DETRUN_PYTHON": "/opt/python",
    }
    assert any("DETRUN_API_TOKEN" in warning for warning in warnings)
    assert any("nobody will be notified" in warning for warning in warnings)
    assert not any("s3cr3t" in warning for warning in warnings)


def test_where_the_secrets_lie_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DETRUN_NOTIFY_FILE", str(tmp_path / "urls"))
    notify.take_from_environment()
    found, warnings = entry_environment(os.environ)
    assert found["DETRUN_NOTIFY_FILE"] == str(tmp_path / "urls")
    assert not any("nobody" in warning for warning in warnings)


def test_scrontab_gets_its_variables_in_the_command(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, "plain")
    environ = {"PATH": "/a b:/bin"}
    entry = cron_entry([path], Archive(tmp_path / "archive"), NightlyOptions(), "3:05", slurm=True, environ=environ)
    lines = entry.text.splitlines()
    assert lines[1].startswith("#SCRON --job-name=") and not [line for line in lines if line.startswith("PATH")]
    assert lines[-1].startswith("5 3 * * * cd ") and " PATH='/a b:/bin' SHELL=/bin/sh exec " in lines[-1]


def test_a_percent_sign_would_end_a_cron_line(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, "plain")
    entry = cron_entry([path], Archive(tmp_path / "100%"), NightlyOptions(), "02:30", environ={"PATH": "/a%b"})
    assert r"100\%" in entry.text and "PATH=/a%b\n" in entry.text


@pytest.mark.parametrize("at", ["24:00", "2.30", "", "02:60", "* *", "02:30\n* * * * * rm"])
def test_what_is_no_time_of_day(tmp_path: Path, at: str) -> None:
    path = write_recipe(tmp_path, "plain")
    with pytest.raises(UsageError, match="no time of day"):
        cron_entry([path], Archive(tmp_path), NightlyOptions(), at, environ={})


def test_what_fits_into_no_table(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, "plain")
    with pytest.raises(UsageError, match="line end"):
        cron_entry([path], Archive(tmp_path), NightlyOptions(), "02:30", environ={"PATH": "/a\n* * * * * rm"})
    with pytest.raises(UsageError, match="does not exist"):
        cron_entry([tmp_path / "gone.yaml"], Archive(tmp_path), NightlyOptions(), "02:30", environ={})
