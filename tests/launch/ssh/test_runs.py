"""Commands that run detached: started once, followed from anywhere, lost and forgotten. Both ends in this process."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from detrun import __version__
from detrun.errors import UsageError
from detrun.launch.ssh import far_runs
from detrun.launch.ssh.far_runs import new_run
from detrun.launch.ssh.wire import Wire


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DETRUN_ARCHIVE", raising=False)
    (tmp_path / "home").mkdir()
    return tmp_path / "cache" / "detrun" / "remote" / "runs"


def start(run: str, *words: str, **more: Any) -> dict[str, Any]:
    answers: list[bytes] = []
    far_runs.start(Wire(lambda _: b"", answers.append), {"run": run, "words": list(words), **more})
    answer: dict[str, Any] = json.loads(answers[-1])
    return answer


def follow(run: str, err: int = 0, out: int = 0, forget: bool = False) -> tuple[str, str, dict[str, Any]]:
    """What the run printed on both streams, and how it ended."""
    sent: Queue[bytes] = Queue()
    heard = iter([json.dumps({"forget": forget}).encode() + b"\n", b""])
    far = Wire(lambda _: next(heard), sent.put)
    thread = threading.Thread(target=far_runs.follow, args=(far, {"run": run, "err": err, "out": out}))
    thread.start()
    near = Wire(lambda _: sent.get(timeout=60), lambda _: None)
    printed = {"out": b"", "err": b""}
    while True:
        message, data = near.read()
        if "stream" in message:
            printed[message["stream"]] += data
        elif "exit" in message or "lost" in message:
            thread.join(10)
            return printed["out"].decode(), printed["err"].decode(), message


def code(tmp_path: Path) -> dict[str, Any]:
    folder = tmp_path / "cache" / "detrun" / "remote" / "code" / ("0" * 32)
    (folder / "sub").mkdir(parents=True)
    for name in ("json.py", "detrun.py", "typing.py"):
        (folder / "sub" / name).write_text("raise SystemExit('the program stood in for a module of ours')\n")
    return {"snapshot": "0" * 32, "at": "sub"}


def test_a_command_runs_once_however_often_it_is_asked_for(tmp_path: Path, runs: Path) -> None:
    run, where = new_run(), code(tmp_path)
    assert start(run, "--version", **where) == {"archive": str(tmp_path / "home" / ".detrun")}
    assert start(run, "--version", **where) == {"archive": str(tmp_path / "home" / ".detrun")}
    assert follow(run) == (f"detrun {__version__}\n", "", {"exit": 0})
    # After a cut it goes on where it was.
    assert follow(run, out=7)[0] == f"{__version__}\n"
    assert (runs / run).exists()
    follow(run, forget=True)
    assert not (runs / run).exists()
    with pytest.raises(UsageError, match="not known"):
        far_runs.run_folder(run)


def test_the_exit_code_and_both_streams(tmp_path: Path) -> None:
    run = new_run()
    start(run, "no-such-command")
    out, err, ended = follow(run)
    assert (out, ended) == ("", {"exit": 2}) and "no-such-command is not a command" in err


@pytest.mark.parametrize(
    ("request_", "variable", "expected"),
    [
        ({}, None, "~/.detrun"),
        ({"recipe_archive": "/scratch/a"}, None, "/scratch/a"),
        ({"recipe_archive": "/scratch/a"}, "/site", "/site"),
        ({"archive_option": "/mine", "recipe_archive": "/scratch/a"}, "/site", "/mine"),
        ({"archive_option": "below"}, None, "{cwd}/below"),
    ],
)
def test_which_archive(
    request_: dict[str, Any], variable: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv("DETRUN_ARCHIVE", variable)
    found = far_runs.find_archive(request_, tmp_path)
    assert str(found.root) == str(Path(expected.format(cwd=tmp_path)).expanduser())


def test_a_run_that_nobody_waits_for_any_more_is_lost(runs: Path) -> None:
    run = new_run()
    (runs / run).mkdir(parents=True)
    (runs / run / "run.json").write_text("{}")
    (runs / run / "out").write_text("half a li")
    (runs / run / "alive").touch()
    assert not far_runs.is_lost(runs / run)
    before = time.time() - 1000
    os.utime(runs / run / "alive", (before, before))
    assert follow(run)[2] == {"lost": True}


@pytest.mark.parametrize("run", ["", "..", "a/b", "20261129T101502-3f9a", "../code"])
def test_only_runs_are_runs(run: str, runs: Path) -> None:
    runs.mkdir(parents=True)
    with pytest.raises(UsageError):
        far_runs.run_folder(run)
    with pytest.raises(UsageError):
        start(run, "--version")
