"""night.json, and which nights there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from detrun.errors import RecordError, UsageError
from detrun.records.archive import Archive
from detrun.records.nights import Item, Night, check_name, night_file, read_night, read_nights


def write_night(archive: Archive, name: str, created: str, **fields: object) -> Night:
    night = Night.model_validate({"night": name, "created": created, **fields})
    night.write(night_file(archive, name))
    return night


def test_nights_come_in_the_order_in_which_they_were_begun(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    assert read_nights(archive) == []
    write_night(archive, "b", "2026-11-28T02:30:00+00:00")
    write_night(archive, "a", "2026-11-29T02:30:00+00:00")
    (tmp_path / "nights" / "lock").write_text("{}")
    (tmp_path / "nights" / "torn").mkdir()
    (tmp_path / "nights" / "torn" / "night.json").write_text('{"night": "torn", ')
    (tmp_path / "nights" / "moved").mkdir()
    (tmp_path / "nights" / "moved" / "night.json").write_bytes(night_file(archive, "a").read_bytes())
    assert [night.night for night in read_nights(archive)] == ["b", "a"]
    assert archive.list() == []


def test_a_night_is_done_once_all_that_was_asked_is_answered() -> None:
    night = Night(night="n", created="2026-11-28T02:30:00+00:00", wanted={"/a.yaml": ["pair"]})
    night.items.append(Item(recipe="a", path="/a.yaml", kind="pair"))
    assert not night.is_done("/a.yaml", ["pair"])
    night.items[0].state = "error"
    assert night.is_done("/a.yaml", ["pair"])
    assert not night.is_done("/a.yaml", ["pair", "resume-check"])
    assert not night.is_done("/b.yaml", ["pair"])


@pytest.mark.parametrize("name", ["../up", "", "a/b", ".hidden", "lock", "x" * 80, "a\nb"])
def test_a_name_never_leaves_the_archive(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        check_name(name)
    with pytest.raises(UsageError):
        night_file(Archive(tmp_path), name)


def test_a_torn_night_is_told_and_not_begun_anew(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    assert read_night(archive, "n") is None
    night_file(archive, "n").parent.mkdir(parents=True)
    night_file(archive, "n").write_text("{")
    with pytest.raises(RecordError):
        read_night(archive, "n")
