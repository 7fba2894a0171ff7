"""Tells people who are not looking, through apprise: mail, Slack, Teams, a webhook.

Where to is a secret, as most such URLs hold a password or a token. It comes from the environment (DETRUN_NOTIFY_URLS,
or the file that DETRUN_NOTIFY_FILE names), is taken out of it before anything is launched, and is never written: not
into a record, a log, a crash file or an error.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import shlex
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from detrun.errors import ArchiveError, RecordError, UsageError

if TYPE_CHECKING:
    from detrun.report.night_words import Message

URLS, FILE = "DETRUN_NOTIFY_URLS", "DETRUN_NOTIFY_FILE"
VARIABLES = (URLS, FILE)

SIGN_OF_LIFE = timedelta(days=7)
"""After so long without a word, one is sent although nothing changed: silence may also be a broken cron."""

MAX_FILE = 64 * 1024
_taken: dict[str, str] = {}
_secrets: set[str] = set()


def take_from_environment() -> None:
    """Takes the variables out of this process's environment, so that nothing it starts inherits them."""
    _taken.clear()
    for name in VARIABLES:
        value = os.environ.pop(name, None)
        if value:
            _taken[name] = value
    for url in re.split(r"[\s,]+", _taken.get(URLS, "")):
        _remember(url)


def notify_file() -> str | None:
    """The path that DETRUN_NOTIFY_FILE had; what is in the file is the secret."""
    return _taken.get(FILE)


def is_configured() -> bool:
    return bool(_taken)


def without_secrets(text: str) -> str:
    """The text without the URLs that were taken, and without what is secret in them."""
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, "[hidden]")
    return text


class Notifier:
    """Whom to tell. One that was made from nothing tells nobody."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = list(urls)
        for url in self._urls:
            _remember(url)

    def __repr__(self) -> str:
        return f"Notifier({len(self._urls)} addresses)"

    @classmethod
    def from_environment(cls) -> Notifier | None:
        """Of what `take_from_environment` took; None where nobody is to be told. Raises UsageError where the file is
        missing, or others than its owner may read it."""
        if not _taken:
            return None
        parse_urls: Any = importlib.import_module("apprise.utils.parse").parse_urls
        urls = list(parse_urls(_taken[URLS])) if URLS in _taken else []
        if FILE in _taken:
            for line in _read_secret(Path(_taken[FILE]).expanduser()).splitlines():
                if line.strip() and not line.lstrip().startswith("#"):
                    urls += parse_urls(line.strip())
        if not urls:
            raise UsageError(
                f"{' and '.join(sorted(_taken))}: there is no URL in it", hint="such as mailto://… or json://…"
            )
        return cls(urls)

    def tell(self, record: Path, message: Message) -> list[str]:
        """Sends what changed, or once in a while that all goes on as before. record: a file that holds when that was
        last, and nothing else. Returns warnings, none of which says where to."""
        now = datetime.now(timezone.utc)
        last = _times(record)
        pending = last["failed"] is not None and (last["notified"] is None or last["failed"] > last["notified"])
        quiet_for = None if last["notified"] is None else now - last["notified"]
        if not (message.changes or pending or quiet_for is None or quiet_for >= SIGN_OF_LIFE):
            return []
        lines = message.changes or [f"Nothing changed{'' if quiet_for is None else ' in the last days'}."]
        body = "\n".join([*lines, "", "As it stands:", *message.state])
        warnings = self.send(message.title, body, bad=message.bad)
        reached = len(warnings) < len(self._urls)
        times = {"notified": now if reached else last["notified"], "failed": None if reached else now}
        document = {"schema_version": 1, **{key: each and each.isoformat() for key, each in times.items()}}
        try:
            from detrun.records.files import write_atomically

            write_atomically(record, f"{json.dumps(document)}\n".encode())
        except ArchiveError as error:
            warnings.append(str(error))
        return warnings

    def send(self, title: str, body: str, *, bad: bool = False) -> list[str]:
        """One message to every address. Returns a line for each that could not be reached."""
        import apprise

        asset = apprise.AppriseAsset(
            app_id="detrun",
            storage_mode=apprise.PersistentStoreMode.MEMORY,
            secure_logging=True,
        )
        kind = apprise.NotifyType.WARNING if bad else apprise.NotifyType.INFO
        warnings = []
        for number, url in enumerate(self._urls, 1):
            which = f"notification {number} of {len(self._urls)} ({_service(url)})"
            with _silence():
                try:
                    service = apprise.Apprise.instantiate(url, asset=asset, suppress_exceptions=True)
                    known = service is not None
                    sent = known and bool(_one(service, asset).notify(body=body, title=title, notify_type=kind))
                except Exception as error:  # noqa: BLE001  any plugin may raise anything, and its text may hold the URL
                    warnings.append(f"{which} was not sent: {type(error).__name__}")
                    continue
            if not known:
                warnings.append(f"{which} was not sent: apprise cannot read its URL")
            elif not sent:
                warnings.append(f"{which} was not sent: the service did not take it")
        return warnings


def _one(service: Any, asset: Any) -> Any:
    import apprise

    all_of_it = apprise.Apprise(asset=asset)
    all_of_it.add(service)
    return all_of_it


@contextmanager
def _silence() -> Iterator[None]:
    """Loggers of apprise and of what it calls write URLs; nothing of this is for anybody's terminal."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _service(url: str) -> str:
    scheme, separator, _ = url.partition("://")
    return scheme if separator and re.fullmatch(r"[A-Za-z0-9+.-]{1,20}", scheme) else "unknown service"


def _remember(url: str) -> None:
    """The URL and each part of it that could let somebody in."""
    if len(url) < 8:
        return
    _secrets.add(url)
    try:
        parts = urlsplit(url)
        found = [parts.username, parts.password, parts.netloc, *parts.path.split("/")]
        found += [value for _, value in parse_qsl(parts.query)]
    except ValueError:
        return
    for part in found:
        for form in {part or "", unquote(part or "")}:
            if len(form) >= 8:
                _secrets.add(form)


def _read_secret(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"{FILE}: it cannot be read: {error.strerror}", where=str(path)) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{FILE}: it is no plain file", where=str(path))
        if status.st_uid != os.geteuid():
            raise UsageError(f"{FILE}: it belongs to somebody else", where=str(path), hint="a file of your own")
        if status.st_mode & 0o077:
            raise UsageError(
                f"{FILE}: others may read it, and its URLs are secrets",
                where=str(path),
                hint=f"chmod 600 {shlex.quote(str(path))}",
            )
        return os.read(descriptor, MAX_FILE).decode("utf-8", "replace")
    finally:
        os.close(descriptor)


def _times(record: Path) -> dict[str, datetime | None]:
    from detrun.records.files import read_object

    try:
        document = read_object(record)
    except RecordError:
        document = {}
    times: dict[str, datetime | None] = {}
    for key in ("notified", "failed"):
        try:
            moment = datetime.fromisoformat(str(document.get(key)))
            times[key] = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
        except ValueError:
            times[key] = None
    return times
