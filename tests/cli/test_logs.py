"""`detrun logs` of an arm that is still running."""

from __future__ import annotations

from pathlib import Path

import pytest

from detrun.cli import main
from detrun.records.archive import Archive
from detrun.records.jobs import JobFile


def test_following_shows_logs_that_appear_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt = Archive(tmp_path).create("mine", "pair").attempt("a", 0)
    attempt.log_dir.mkdir(parents=True)
    JobFile(arm="a", state="running").write(attempt.job_file)

    def meanwhile(_seconds: float) -> None:
        attempt.log(1).write_text("step 1 loss 2.5\n")
        JobFile(arm="a", state="done").write(attempt.job_file)

    monkeypatch.setattr("detrun.cli.logs.time.sleep", meanwhile)
    assert main(["logs", "@latest", "-f", "--archive", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "step 1 loss 2.5\n"
