"""The archive: ids, finding them again, and what an id may not do."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from pathlib import Path

import pytest

from detrun.errors import (
    AmbiguousExperimentError,
    ArchiveError,
    ExitCode,
    UnknownExperimentError,
    UsageError,
)
from detrun.records.archive import Archive
from detrun.records.layout import MARKER, ExperimentFolder

NOON = datetime(2026, 11, 29, 12, 0, 0, tzinfo=timezone.utc)


def made(archive: Archive, *ids: str) -> None:
    for id in ids:
        (archive.root / id).mkdir(parents=True)
        (archive.root / id / MARKER).touch()


def test_an_id_tells_recipe_experiment_and_time(tmp_path: Path) -> None:
    folder = Archive(tmp_path / "new").create("hybrid-cpu", "pair", NOON)
    assert re.fullmatch(r"hybrid-cpu-pair-20261129T120000-[0-9a-f]{4}", folder.id)
    assert (folder.path / MARKER).is_file()


def test_a_recipe_name_cannot_leave_the_archive(tmp_path: Path) -> None:
    folder = Archive(tmp_path).create("../../etc/passwd x", "pair", NOON)
    assert folder.path.parent == tmp_path
    assert folder.id.startswith("etc-passwd-x-pair-")


def test_a_new_archive_keeps_out_of_version_control(tmp_path: Path) -> None:
    Archive(tmp_path / "new").create("r", "pair")
    assert (tmp_path / "new" / ".gitignore").read_text() == "*\n"
    Archive(tmp_path).create("r", "pair")
    assert not (tmp_path / ".gitignore").exists()


def test_prefix_last_part_and_latest_find_an_experiment(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    made(archive, "moe-pair-20261129T100000-aaaa", "hybrid-pair-20261129T090000-bbbb", "z-pair-20250101T000000-cccc")
    assert archive.resolve("moe").id == "moe-pair-20261129T100000-aaaa"
    assert archive.resolve("bbbb").id == "hybrid-pair-20261129T090000-bbbb"
    assert archive.resolve("20261129T090000-bbbb").id == "hybrid-pair-20261129T090000-bbbb"
    assert archive.resolve("@latest").id == "moe-pair-20261129T100000-aaaa"
    assert [folder.id[:3] for folder in archive.list()] == ["z-p", "hyb", "moe"]


def test_an_ambiguous_id_lists_the_candidates(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    made(archive, "moe-pair-20261129T100000-aaaa", "moe-pair-20261129T100001-bbbb")
    with pytest.raises(AmbiguousExperimentError) as caught:
        archive.resolve("moe-pair")
    assert caught.value.candidates == ("moe-pair-20261129T100000-aaaa", "moe-pair-20261129T100001-bbbb")
    assert "moe-pair-20261129T100001-bbbb" in caught.value.render()
    assert caught.value.exit_code == ExitCode.USER


def test_a_full_id_wins_over_longer_ones(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    made(archive, "a-pair", "a-pair-20261129T100000-aaaa")
    assert archive.resolve("a-pair").id == "a-pair"


@pytest.mark.parametrize("text", ["", ".", "..", "../x", "/etc", "a/b", "a\\b", "a\0b", "a\nb", "x" * 9 + "/"])
def test_an_id_is_never_a_path(tmp_path: Path, text: str) -> None:
    archive = Archive(tmp_path)
    made(archive, "a-pair-20261129T100000-aaaa")
    with pytest.raises(UsageError):
        archive.resolve(text)


def test_unknown_ids_and_empty_archives_say_what_to_do(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    with pytest.raises(UnknownExperimentError, match="holds no experiment"):
        archive.resolve("@latest")
    made(archive, "hybrid-pair-20261129T100000-aaaa")
    with pytest.raises(UnknownExperimentError) as caught:
        archive.resolve("hybird-pair-20261129T100000-aaaa")
    assert caught.value.hint == "did you mean hybrid-pair-20261129T100000-aaaa?"


def test_folders_of_others_and_links_are_no_experiments(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "archive")
    made(archive, "a-pair-20261129T100000-aaaa")
    (archive.root / "notes").mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / MARKER).touch()
    (archive.root / "link").symlink_to(outside)
    assert [folder.id for folder in archive.list()] == ["a-pair-20261129T100000-aaaa"]


def test_an_archive_that_cannot_be_written_is_an_infrastructure_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArchiveError) as caught:
        Archive(tmp_path / "file" / "archive").create("r", "pair")
    assert caught.value.exit_code == ExitCode.INFRASTRUCTURE
    assert "--archive" in (caught.value.hint or "")


def test_option_environment_recipe_and_default_in_that_order(tmp_path: Path) -> None:
    environ = {"DETRUN_ARCHIVE": "/from/environment"}
    assert Archive.find("/option", "recipe", environ, tmp_path).root == Path("/option")
    assert Archive.find(None, "recipe", environ, tmp_path).root == Path("/from/environment")
    assert Archive.find(None, "recipe", {}, tmp_path).root == tmp_path / "recipe"
    assert Archive.find(None, None, {}, tmp_path).root == tmp_path / ".detrun"


def test_attempts_are_listed_by_number(tmp_path: Path) -> None:
    folder = ExperimentFolder(tmp_path)
    for name in ("attempt-10", "attempt-2", "attempt-02", "attempt-x", "work"):
        (folder.arm_dir("a") / name).mkdir(parents=True)
    assert [attempt.number for attempt in folder.attempts("a")] == [2, 10]
    assert folder.attempts("b") == []


def test_a_folder_whose_name_create_would_never_give_is_not_ours(tmp_path: Path) -> None:
    ours = Archive(tmp_path).create("x", "pair")
    foreign = tmp_path / "\x1b[31mx-pair-20991231T000000-0000"
    foreign.mkdir()
    (foreign / MARKER).touch()
    assert [folder.id for folder in Archive(tmp_path).list()] == [ours.id]


def test_a_home_that_is_nobodys_is_said() -> None:
    with pytest.raises(UsageError, match="no such user"):
        Archive.find("~nobody-of-that-name/x", environ={})
