"""Whom a night tells, when, and that nothing says where to."""

from __future__ import annotations

import http.server
import json
import logging
import os
import stat
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from detrun.errors import UsageError
from detrun.report import notify
from detrun.report.night_words import Message
from detrun.report.notify import FILE, URLS, Notifier, take_from_environment, without_secrets

SECRET = "s3cr3t-of-the-hook"
QUIET = Message("IDENTICAL  night n: 1 recipe", [], ["a: identical"])
NEWS = Message("DIVERGED  night n: 1 recipe", ["a: diverged, was identical the night before"], ["a: diverged"], True)


class Hook(http.server.BaseHTTPRequestHandler):
    """Notes what it is sent."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server: Any = self.server
        server.got.append((self.path, json.loads(body)))
        self.send_response(server.answer)
        self.end_headers()

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[Any]:
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    server.got, server.answer = [], 200
    server.url = f"json://user:{SECRET}@127.0.0.1:{server.server_port}/path-{SECRET}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()


@pytest.fixture(autouse=True)
def nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (URLS, FILE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(notify, "_secrets", set())
    monkeypatch.setattr(notify, "_taken", {})
    yield


def at(record: Path, **ago: timedelta) -> None:
    now = datetime.now(timezone.utc)
    record.write_text(json.dumps({"schema_version": 1, **{key: (now - each).isoformat() for key, each in ago.items()}}))


def test_a_change_is_told_at_once_and_silence_only_after_a_week(hook: Any, tmp_path: Path) -> None:
    record, notifier = tmp_path / "last-notified.json", Notifier([hook.url])
    assert notifier.tell(record, QUIET) == [] and len(hook.got) == 1  # the first time, so that one sees that it works
    assert notifier.tell(record, QUIET) == [] and len(hook.got) == 1
    assert notifier.tell(record, NEWS) == [] and len(hook.got) == 2
    _, sent = hook.got[-1]
    assert sent["title"] == NEWS.title and sent["type"] == "warning"
    assert "a: diverged, was identical the night before" in sent["message"]
    at(record, notified=timedelta(days=6))
    assert notifier.tell(record, QUIET) == [] and len(hook.got) == 2
    at(record, notified=timedelta(days=8))
    assert notifier.tell(record, QUIET) == [] and len(hook.got) == 3
    assert "Nothing changed" in hook.got[-1][1]["message"] and hook.got[-1][1]["type"] == "info"


def test_the_record_holds_times_only(hook: Any, tmp_path: Path) -> None:
    Notifier([hook.url]).tell(tmp_path / "last", NEWS)
    text = (tmp_path / "last").read_text()
    assert set(json.loads(text)) == {"schema_version", "notified", "failed"}
    assert SECRET not in text and "127.0.0.1" not in text


def test_one_that_was_not_reached_is_a_warning_and_is_told_the_next_night(
    hook: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    record, notifier = tmp_path / "last", Notifier([hook.url])
    hook.answer = 500
    with caplog.at_level(logging.DEBUG):
        warnings = notifier.tell(record, NEWS)
    assert warnings == ["notification 1 of 1 (json) was not sent: the service did not take it"]
    assert SECRET not in caplog.text + "".join(capsys.readouterr())
    hook.answer = 200
    assert notifier.tell(record, QUIET) == []
    assert len(hook.got) == 2
    assert notifier.tell(record, QUIET) == [] and len(hook.got) == 2


@pytest.mark.parametrize(
    ("url", "why"),
    [
        (f"json://user:{SECRET}@127.0.0.1:1/x", "the service did not take it"),
        (f"nonsense://{SECRET}", "apprise cannot read its URL"),
        (f"slack://{SECRET}", "apprise cannot read its URL"),
        (SECRET, "apprise cannot read its URL"),
    ],
)
def test_a_warning_never_says_where_to(url: str, why: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        warnings = Notifier([url]).send("title", "body")
    assert len(warnings) == 1 and warnings[0].endswith(why)
    assert SECRET not in caplog.text + warnings[0] + repr(Notifier([url]))


def test_a_service_that_raises_is_a_warning_without_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    import apprise

    def fail(url: str, **_more: object) -> None:
        raise ValueError(f"cannot reach {url}")

    monkeypatch.setattr(apprise.Apprise, "instantiate", staticmethod(fail))
    assert Notifier([f"json://{SECRET}"]).send("t", "b") == ["notification 1 of 1 (json) was not sent: ValueError"]


def test_the_environment_is_free_of_them_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(URLS, f"json://user:{SECRET}@host.example, mailto://me:{SECRET}@example.org")
    take_from_environment()
    assert URLS not in os.environ
    notifier = Notifier.from_environment()
    assert repr(notifier) == "Notifier(2 addresses)"
    assert SECRET not in without_secrets(f"Traceback … json://user:{SECRET}@host.example … password {SECRET}")


def test_without_variables_nobody_is_told() -> None:
    take_from_environment()
    assert Notifier.from_environment() is None


def test_a_file_that_only_its_owner_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "where to"
    path.write_text(f"# the team\njson://user:{SECRET}@host.example\n\nmailto://me:{SECRET}@example.org\n")
    path.chmod(0o600)
    monkeypatch.setenv(FILE, str(path))
    take_from_environment()
    assert FILE not in os.environ and notify.notify_file() == str(path)
    assert repr(Notifier.from_environment()) == "Notifier(2 addresses)"
    assert SECRET not in without_secrets(f"… {SECRET}")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_a_file_that_others_may_read_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: int
) -> None:
    path = tmp_path / "where to"
    path.write_text(f"json://{SECRET}")
    path.chmod(mode)
    monkeypatch.setenv(FILE, str(path))
    take_from_environment()
    with pytest.raises(UsageError) as caught:
        Notifier.from_environment()
    assert caught.value.hint == f"chmod 600 '{path}'" and SECRET not in caught.value.render()


def test_a_file_of_somebody_else_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "urls"
    path.write_text("json://x")
    path.chmod(0o600)
    monkeypatch.setenv(FILE, str(path))
    take_from_environment()
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(UsageError, match="belongs to somebody else"):
        Notifier.from_environment()


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "empty"])
def test_what_is_no_such_file_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "urls"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "empty":
        path.touch(0o600)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    monkeypatch.setenv(FILE, str(path))
    take_from_environment()
    with pytest.raises(UsageError):
        Notifier.from_environment()
