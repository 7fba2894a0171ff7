"""The index over verdicts: what an entry says, and that its cache can neither lie nor get in the way."""

from __future__ import annotations

import json
import os
import shutil
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from detrun.records import index, index_cache
from detrun.records.archive import Archive
from detrun.records.index import Entry, read_index
from detrun.records.index_cache import CACHE
from tests.history_factory import PACKAGES, Nights
from tests.records_factory import make_experiment

OLD = 10_000_000_000
"""Nanoseconds: long enough ago for the cache to rely on."""


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    return Nights(tmp_path / "archive")


def age(nights: Nights, by: int = OLD) -> None:
    """Makes every verdict look as if it was written long ago."""
    for path in nights.root.glob("*/*.json"):
        found = path.stat()
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns - by))


def signed(body: bytes) -> bytes:
    return json.dumps({"digest": index_cache._digest(body)}).encode() + b"\n" + body


def cached(nights: Nights) -> list[str]:
    """The ids in the cache."""
    body = (nights.root / CACHE).read_bytes().partition(b"\n")[2]
    return sorted(row[0] for row in json.loads(body)["rows"])


def test_an_entry_says_what_the_verdict_does(nights: Nights) -> None:
    nights.add("2026-11-24", "hybrid-cpu", "identical")
    culprit = {"kind": "op", "name": "aten.index_put_", "rank": 0}
    bad = nights.add("2026-11-25", "hybrid-cpu", "diverged", step=7, culprit=culprit, pairs=(3, 1))
    first, second = read_index(nights.archive)
    assert (first.verdict, first.exit_code, first.step, first.culprit, first.what) == ("identical", 0, None, None, "")
    assert second.id == bad
    assert (second.experiment, second.recipe, second.verdict, second.exit_code) == ("pair", "hybrid-cpu", "diverged", 1)
    assert (second.step, second.boundary, second.what) == (7, "end", "gradients differ at step 7")
    assert second.culprit == {"kind": "op", "name": "aten.index_put_"}
    assert second.night == "2026-11-25"
    assert second.created == datetime(2026, 11, 25, 2, 31, tzinfo=timezone.utc)
    assert second.environment is not None
    assert second.environment["packages"] == PACKAGES
    assert second.pairs == (3, 1)


def test_a_night_without_a_label_is_the_utc_date(nights: Nights) -> None:
    late = datetime.fromisoformat("2026-11-24T23:30:00-05:00")
    nights.add("2026-11-24", "hybrid-cpu", "identical", labels={}, at=late)
    (entry,) = read_index(nights.archive)
    assert entry.night == "2026-11-25"
    assert entry.created.utcoffset() == timezone.utc.utcoffset(None)


def test_what_has_no_verdict_is_unfinished(nights: Nights) -> None:
    nights.add("2026-11-24", "a-recipe-pair", None, kind="resume-check")
    made = make_experiment(nights.root, id="other-pair-20261125T023000-00ff", name="its-own-name")
    made.edit_experiment(labels={"night": "the-first"}, created="2026-11-25T02:30:00Z")
    first, second = read_index(nights.archive)
    assert (first.verdict, first.state, first.exit_code) == (None, "unfinished", None)
    assert (first.recipe, first.experiment, first.night) == ("a-recipe-pair", "resume-check", "2026-11-24")
    assert (second.recipe, second.experiment, second.night) == ("its-own-name", "pair", "the-first")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{", "is not valid JSON"),
        (b"", "is not valid JSON"),
        (b"[]", "is not a JSON object"),
        (b'{"schema_version": 2, "verdict": "identical"}', "has schema version 2"),
        (b'{"schema_version": 1, "verdict": "fine"}', "is not a valid verdict"),
    ],
)
def test_a_verdict_that_cannot_be_read_is_neither_good_nor_bad(nights: Nights, content: bytes, why: str) -> None:
    id = nights.add("2026-11-24", "hybrid-cpu", "identical")
    (nights.root / id / "verdict.json").write_bytes(content)
    (entry,) = read_index(nights.archive)
    assert (entry.verdict, entry.state) == (None, "unreadable")
    assert why in entry.what


def test_links_and_foreign_folders_are_no_experiments(nights: Nights, tmp_path: Path) -> None:
    id = nights.add("2026-11-24", "hybrid-cpu", "identical")
    (nights.root / "linked-pair-20261124T023000-aaaa").symlink_to(nights.root / id)
    shutil.copytree(nights.root / id, nights.root / "copied")
    (nights.root / "copied" / ".detrun-experiment").unlink()
    assert [entry.id for entry in read_index(nights.archive)] == [id]
    assert read_index(Archive(tmp_path / "nowhere")) == []
    assert not (tmp_path / "nowhere").exists()


def test_the_second_time_reads_the_cache_alone(nights: Nights, monkeypatch: pytest.MonkeyPatch) -> None:
    for day in range(20, 28):
        nights.add(f"2026-11-{day}", "hybrid-cpu", "diverged" if day == 25 else "identical", step=7)
    nights.add("2026-11-29", "hybrid-cpu", None)
    age(nights)
    before = read_index(nights.archive)
    written = (nights.root / CACHE).stat().st_mtime_ns
    with monkeypatch.context() as patch:
        original = index._read

        def read_unfinished(root: Path, name: str, found: tuple[str, int]) -> Entry:
            assert "20261129" in name
            return original(root, name, found)

        patch.setattr(index, "_read", read_unfinished)
        assert read_index(nights.archive) == before
    assert (nights.root / CACHE).stat().st_mtime_ns == written


def test_a_verdict_that_changes_is_read_again(nights: Nights) -> None:
    id = nights.add("2026-11-24", "hybrid-cpu", "identical")
    age(nights)
    read_index(nights.archive)
    path = nights.root / id / "verdict.json"
    path.write_text(path.read_text().replace('"identical"', '"diverged"').replace('"exit_code": 0', '"exit_code": 1'))
    (entry,) = read_index(nights.archive)
    assert (entry.verdict, entry.exit_code) == ("diverged", 1)
    shutil.rmtree(nights.root / id)
    assert read_index(nights.archive) == []
    assert cached(nights) == []


def test_a_verdict_of_the_same_moment_and_size_is_not_taken_for_the_old_one(nights: Nights) -> None:
    id = nights.add("2026-11-24", "hybrid-cpu", "diverged", step=3)
    path = nights.root / id / "verdict.json"
    read_index(nights.archive)
    moment = path.stat().st_mtime_ns
    path.write_text(path.read_text().replace('"step": 3', '"step": 4'))
    os.utime(path, ns=(moment, moment))  # as on a file system with coarse times
    assert [entry.step for entry in read_index(nights.archive)] == [4]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda raw: raw[: len(raw) // 2],
        lambda raw: b"",
        lambda raw: b"null",
        lambda raw: b'{"version":1,"shared":[],"rows":[["x"]]}',
        lambda raw: raw.replace(b'"version":1', b'"version":2'),
        lambda raw: raw.replace(b'"identical"', b'"splendid"'),
        lambda raw: raw.replace(b"+00:00", b""),
        lambda raw: raw.replace(b'"shared":[', b'"shared":[7,'),
        lambda raw: b"\xff" * 100,
    ],
)
def test_a_spoilt_cache_is_rebuilt(nights: Nights, spoil: Any) -> None:
    nights.add("2026-11-24", "hybrid-cpu", "identical")
    nights.add("2026-11-25", "hybrid-cpu", "diverged")
    age(nights)
    expected = read_index(nights.archive)
    cache = nights.root / CACHE
    whole = cache.read_bytes()
    cache.write_bytes(spoil(whole))
    assert read_index(nights.archive) == expected
    assert cached(nights) == sorted(entry.id for entry in expected)


@pytest.mark.parametrize(
    "body", [b"null", b"[]", b'{"version":2}', b'{"version":1,"shared":[],"rows":[["x"]]}', b"1e999"]
)
def test_a_cache_of_another_making_is_rebuilt(nights: Nights, body: bytes) -> None:
    id = nights.add("2026-11-24", "hybrid-cpu", "identical")
    age(nights)
    (nights.root / CACHE).write_bytes(signed(body))
    assert [entry.verdict for entry in read_index(nights.archive)] == ["identical"]
    assert cached(nights) == [id]


def test_a_cache_that_others_may_write_is_not_believed(nights: Nights) -> None:
    nights.add("2026-11-24", "hybrid-cpu", "diverged")
    age(nights)
    read_index(nights.archive)
    cache = nights.root / CACHE
    body = cache.read_bytes().partition(b"\n")[2]
    cache.write_bytes(signed(body.replace(b'"diverged"', b'"identical"')))
    cache.chmod(0o666)
    assert [entry.verdict for entry in read_index(nights.archive)] == ["diverged"]
    elsewhere = nights.root.parent / "elsewhere.json"
    elsewhere.write_bytes(signed(body.replace(b'"diverged"', b'"identical"')))
    cache.unlink()
    cache.symlink_to(elsewhere)
    assert [entry.verdict for entry in read_index(nights.archive)] == ["diverged"]
    assert b'"identical"' in elsewhere.read_bytes()  # replaced, not written through


def test_an_archive_that_cannot_be_written_is_read(nights: Nights, monkeypatch: pytest.MonkeyPatch) -> None:
    nights.add("2026-11-24", "hybrid-cpu", "identical")
    from detrun.errors import ArchiveError

    def refuse(*_: Any) -> None:
        raise ArchiveError("cannot be written: Read-only file system")

    monkeypatch.setattr(index_cache, "write_atomically", refuse)
    assert [entry.verdict for entry in read_index(nights.archive)] == ["identical"]
    assert not (nights.root / CACHE).exists()


def test_ten_thousand_experiments_are_listed_in_two_seconds(nights: Nights) -> None:
    """On CPU seconds, as CI's two cores are shared; a tenth of the number, at a tenth of the time."""
    first = nights.add("2026-11-24", "hybrid-cpu", "identical", packages={f"package-{i}": "1.0" for i in range(150)})
    text = (nights.root / first / "verdict.json").read_text()
    for number in range(999):
        folder = nights.root / f"hybrid-cpu-pair-2026{1 + number // 280:02}{1 + number % 28:02}T023000-{number:04x}"
        folder.mkdir()
        (folder / ".detrun-experiment").touch()
        (folder / "verdict.json").write_text(text)
    age(nights)
    began = time.process_time()
    assert len(read_index(nights.archive)) == 1000
    cold = time.process_time() - began
    began = time.process_time()
    assert len(read_index(nights.archive)) == 1000
    warm = time.process_time() - began
    assert cold < 0.4  # half again as slow as it has to be is no failure of this machine's
    assert warm < 0.1
