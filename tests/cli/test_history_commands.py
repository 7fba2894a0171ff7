"""`detrun history`, `detrun list` and `detrun prune` as a person calls them."""

from __future__ import annotations

import json
import webbrowser
from datetime import datetime, timezone
from pathlib import Path

import pytest

from detrun.cli import main
from detrun.errors import UsageError
from detrun.experiments.against import hold_against
from detrun.experiments.history import moment_of
from detrun.experiments.judge import judge
from detrun.records.archive import Archive
from detrun.records.nights import Item, Night, night_file
from tests.history_factory import Nights, seven_nights
from tests.records_factory import flip_metric, make_experiment

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def week(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nights:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DETRUN_ARCHIVE", str(tmp_path / "archive"))
    return seven_nights(tmp_path / "archive")


def test_history_prints_a_table_and_writes_the_pages(week: Nights, capsys: Captured) -> None:
    assert main(["history"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("of 2 recipes 1 diverges, 1 is flaky: 7 nights, 25 experiments\n")
    assert "numpy 2.4.6 → 2.5.0" in shown.out
    assert shown.err == f"page: {week.root / 'history.html'}\n"
    assert (week.root / "index.html").is_file()


def test_history_of_a_recipe_that_never_started(week: Nights, capsys: Captured) -> None:
    item = Item(recipe="big-gpu", path="/r.yaml", kind="pair", state="error", exit_code=4, what="sbatch: no account")
    night = Night(night="2026-11-29", created="2026-11-29T02:30:00+00:00", items=[item])
    night.write(night_file(week.archive, "2026-11-29"))
    assert main(["history", "--recipe", "big-gpu"]) == 0
    assert "big-gpu  no night tells: not started (sbatch: no account)" in capsys.readouterr().out


def test_history_as_a_document_of_one_recipe_since_a_day(week: Nights, capsys: Captured) -> None:
    assert main(["history", "--recipe", "hybrid-cpu", "--since", "2026-11-28", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["nights"] == ["2026-11-28", "2026-11-29"]
    assert list(found["recipes"]) == ["hybrid-cpu"]
    assert found["recipes"]["hybrid-cpu"]["first_bad_night"] == "2026-11-26"


@pytest.mark.parametrize(
    ("options", "what", "hint"),
    [
        (["--recipe", "hybrid"], "no experiment is of a recipe 'hybrid'", "did you mean hybrid-cpu?"),
        (["--since", "yesterday"], "--since 'yesterday' is no time", "a date, 2026-11-01, or 7d or 2w"),
    ],
)
def test_history_says_what_it_does_not_know(
    week: Nights, capsys: Captured, options: list[str], what: str, hint: str
) -> None:
    assert main(["history", *options]) == 2
    said = capsys.readouterr().err
    assert what in said
    assert hint in said


def test_times_are_dates_or_days_and_weeks_ago() -> None:
    now = datetime(2026, 11, 30, 14, 5, tzinfo=timezone.utc)
    assert moment_of("7d", now) == datetime(2026, 11, 23, tzinfo=timezone.utc)
    assert moment_of("2w", now) == datetime(2026, 11, 16, tzinfo=timezone.utc)
    assert moment_of("2026-11-01", now) == datetime(2026, 11, 1, tzinfo=timezone.utc)
    assert moment_of("2026-11-01T02:30:00Z", now) == datetime(2026, 11, 1, 2, 30, tzinfo=timezone.utc)
    with pytest.raises(UsageError):
        moment_of("99999d9", now)


def test_history_without_experiments(tmp_path: Path, capsys: Captured) -> None:
    assert main(["history", "--archive", str(tmp_path / "none")]) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "no experiments" in shown.err
    assert not (tmp_path / "none").exists()


def test_history_opens_its_page(week: Nights, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: bool(asked.append(url)))
    assert main(["history", "--open"]) == 0
    assert asked == [(week.root / "history.html").as_uri()]
    assert "no browser could be opened here" in capsys.readouterr().err


def test_an_archive_that_cannot_be_written_still_tells_its_history(week: Nights, capsys: Captured) -> None:
    (week.root / "history.html" / "x").mkdir(parents=True)
    assert main(["history"]) == 0
    shown = capsys.readouterr()
    assert "hybrid-cpu" in shown.out
    assert "no page was written" in shown.err


def test_list_shows_the_newest_last(week: Nights, capsys: Captured) -> None:
    unfinished = week.add("2026-11-29", "moe", None)
    assert main(["list", "-n", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0].rsplit("-", 1)[1] for line in lines] == ["0017", "0018", "0019"]
    assert lines[0].endswith("diverged        step 7  aten.index_put_")
    assert lines[-1] == f"{unfinished:<{len(lines[0].split()[0])}}  no verdict yet"
    assert main(["list", "--count", "0", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 26


def test_prune_is_a_dry_run_until_it_is_told(tmp_path: Path, capsys: Captured) -> None:
    root = tmp_path / "archive"
    for day in (1, 2):
        made = make_experiment(root, id=f"hybrid-cpu-pair-202001{day:02}T023000-{day:04x}")
        made.edit_experiment(created=f"2020-01-{day:02}T02:30:00Z")
        judge(made.folder, report=False)
        (made.folder.work_dir("a") / "model.pt").write_bytes(b"x" * 100_000)
        made.attempt("a").log(0).write_text("hello")
    work = root / "hybrid-cpu-pair-20200101T023000-0001" / "arms" / "a" / "work"
    options = ["prune", "--archive", str(root), "--keep", "0"]
    assert main(options) == 0
    shown = capsys.readouterr().out
    assert "would remove" in shown
    assert f"this was a dry run: detrun prune --yes --archive {root} removes it" in shown
    assert work.exists()
    assert main([*options, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["dry_run"] is True
    assert [each["path"] for each in planned["experiments"][0]["would_remove"]] == [
        "arms/a/work",
        "arms/a/attempt-0/log",
    ]
    assert main([*options, "--yes"]) == 0
    assert "removed 10" in capsys.readouterr().out
    assert not work.exists()
    assert main(options) == 0
    assert capsys.readouterr().out.startswith("nothing to remove\n")
    assert main(["report", "0001", "--archive", str(root)]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("IDENTICAL")
    assert "were pruned" in shown.err


def test_what_was_held_against_a_baseline_is_reported_like_any_other(tmp_path: Path, capsys: Captured) -> None:
    archive = Archive(tmp_path / "archive")
    for day in (1, 2):
        made = make_experiment(archive.root, id=f"hybrid-cpu-pair-202611{day:02}T023000-{day:04x}")
        for arm in "ab":
            for rank in (0, 1) if day == 2 else ():
                made.edit(arm, rank, 4, flip_metric("loss"))
                made.edit_environment(arm, rank, lambda document: document["packages"].update(numpy="2.5.0"))
        judge(made.folder, report=False)
    verdict = hold_against(archive, made.folder)
    assert main(["report", verdict.id, "--archive", str(archive.root)]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("DIVERGED at step 4, every rank, first seen in loss")
    assert "changed since the baseline: numpy 2.4.6 → 2.5.0" in shown
    assert f"hint: if the change was meant, --against {made.folder.id} makes that run the next one's baseline" in shown
    assert main(["report", verdict.id, "--archive", str(archive.root), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["candidate"]["experiment"] == made.folder.id


@pytest.mark.parametrize("others", [["--detach"], ["--dry-run"], ["--resume"]])
def test_against_waits_for_the_pair(tmp_path: Path, capsys: Captured, others: list[str]) -> None:
    recipe = tmp_path / "detrun.yaml"
    text = "launch: {launcher: none, command: [python, -c, pass]}\nsteps: 3\n"
    text += 'checkpoint: {directory: "{out}", save_every: 1, resume_args: ["{checkpoint}"]}\n'
    text += "interrupt: {kind: kill, at_step: 2}\n"
    recipe.write_text(text)
    assert main(["pair", str(recipe), "--archive", str(tmp_path), "--against", "last-good", *others]) == 2
    assert "--against waits for the pair's verdict" in capsys.readouterr().err


def test_against_an_unknown_baseline_starts_nothing(tmp_path: Path, capsys: Captured) -> None:
    recipe = tmp_path / "detrun.yaml"
    recipe.write_text("launch: {launcher: none, command: [python, -c, pass]}\nsteps: 3\n")
    assert main(["pair", str(recipe), "--archive", str(tmp_path / "archive"), "--against", "3f9a"]) == 2
    assert "holds no experiment" in capsys.readouterr().err
    assert not (tmp_path / "archive").exists()
