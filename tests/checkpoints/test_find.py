"""Which checkpoints a directory holds, and which of them are whole."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
import torch

from detrun.checkpoints.find import Found, find_checkpoints, newest_complete
from detrun.checkpoints.read import open_checkpoint
from detrun.errors import UsageError
from tests.checkpoints.making import cut, save_dcp, training_state


def ranks(folder: Path, *numbers: int, size: int = 3) -> Path:
    """A folder with a torch.save file a rank."""
    folder.mkdir(parents=True)
    for rank in numbers:
        torch.save({"x": torch.full((size,), float(rank))}, folder / f"rank{rank}.pt")
    return folder


def steps(found: list[Found]) -> list[tuple[int | None, bool]]:
    return [(each.step, each.complete) for each in found]


def test_the_last_number_in_a_name_is_the_step_oldest_first(tmp_path: Path) -> None:
    for name in ("v2-step-9", "v2-step-10", "v2-step-100"):
        ranks(tmp_path / name, 0)
    (tmp_path / "metrics-1.jsonl").write_text("{}")
    (tmp_path / "empty-7").mkdir()
    assert steps(find_checkpoints(tmp_path)) == [(9, True), (10, True), (100, True)]
    assert [each.format for each in find_checkpoints(tmp_path)] == ["torch.save"] * 3


def test_files_are_checkpoints_too(tmp_path: Path) -> None:
    for name in ("epoch=1-step=20.ckpt", "epoch=0-step=10.ckpt"):
        torch.save(training_state(), tmp_path / name)
    assert steps(find_checkpoints(tmp_path)) == [(10, True), (20, True)]


@pytest.mark.parametrize(
    ("pattern", "made"),
    [
        ("step-{step}", "step-{}"),
        ("global_step{step}/model", "global_step{}/model"),
        ("runs/{step}/state", "runs/{}/state"),
        ("{{x}}-{step}", "{{x}}-{}"),
    ],
)
def test_a_pattern_tells_the_step(pattern: str, made: str, tmp_path: Path) -> None:
    for step in (5, 10):
        ranks(tmp_path / made.format(step), 0)
    ranks(tmp_path / "other-99", 0)
    found = find_checkpoints(tmp_path, pattern)
    assert steps(found) == [(5, True), (10, True)]
    assert found[1].path == tmp_path / made.format(10)


@pytest.mark.parametrize("pattern", ["step", "{step}/{step}", "../{step}", "/tmp/{step}"])
def test_a_pattern_that_tells_no_step_is_refused(pattern: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        find_checkpoints(tmp_path, pattern)


@pytest.mark.parametrize("name", [".saving-30", "step-30.tmp", "__tmp-30", "step-30-incomplete", "tmp-checkpoint-30"])
@pytest.mark.parametrize("pattern", [None, "step-{step}"])
def test_a_save_under_way_is_listed_as_partial(name: str, pattern: str | None, tmp_path: Path) -> None:
    ranks(tmp_path / "step-20", 0)
    ranks(tmp_path / name, 0)
    chosen, rejected = newest_complete(tmp_path, pattern)
    assert chosen is not None and chosen.step == 20
    assert [(each.step, each.why) for each in rejected] == [(30, "has the name of a save under way")]


def test_a_torn_file_makes_a_checkpoint_partial(tmp_path: Path) -> None:
    ranks(tmp_path / "step-10", 0, 1)
    ranks(tmp_path / "step-20", 0, 1)
    cut(tmp_path / "step-20" / "rank1.pt")
    chosen, rejected = newest_complete(tmp_path)
    assert chosen is not None and chosen.step == 10
    assert "rank1.pt" in rejected[0].why and "cut short" in rejected[0].why


def test_an_empty_file_makes_a_checkpoint_partial(tmp_path: Path) -> None:
    ranks(tmp_path / "step-10", 0)
    (tmp_path / "step-10" / "optimizer.pt").write_bytes(b"")
    assert find_checkpoints(tmp_path)[0].why == "optimizer.pt is empty"


def test_a_rank_that_the_others_have_is_missed(tmp_path: Path) -> None:
    ranks(tmp_path / "step-10", 0, 1)
    ranks(tmp_path / "step-20", 0)
    assert find_checkpoints(tmp_path)[1].why == "rank1.pt is missing, which step-10 has"


def test_a_gap_in_the_ranks_of_the_only_one_is_missed(tmp_path: Path) -> None:
    ranks(tmp_path / "step-10", 0, 2)
    assert find_checkpoints(tmp_path)[0].why == "rank1.pt is missing"


def test_a_file_more_at_the_end_does_not_make_the_others_partial(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        ranks(tmp_path / f"step-{step}", 0)
    torch.save({}, tmp_path / "step-30" / "export.pt")
    assert steps(find_checkpoints(tmp_path)) == [(10, True), (20, True), (30, True)]


def test_a_file_that_every_other_one_has_is_missed(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        folder = ranks(tmp_path / f"step-{step}", 0)
        torch.save({}, folder / f"model-{step}.pt")
    (tmp_path / "step-30" / "model-30.pt").unlink()
    assert "model-{step}.pt is missing" in find_checkpoints(tmp_path)[2].why


def test_a_folder_of_shards_is_whole_with_all_its_bytes(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save_dcp({"w": torch.randn(1000)}, tmp_path / f"step-{step}")
    (tmp_path / "step-20" / ".metadata").unlink()
    cut(tmp_path / "step-30" / "__0_0.distcp")
    (tmp_path / "step-40" / "__0_0.distcp").unlink()
    whys = [each.why for each in find_checkpoints(tmp_path)]
    assert whys[0] == ""
    assert ".metadata, which is written last" in whys[1]
    assert "__0_0.distcp is cut short" in whys[2]
    assert whys[3] == "__0_0.distcp is missing"


def test_the_tracker_file_says_which_iteration_ended(tmp_path: Path) -> None:
    for step in (10, 20):
        folder = save_dcp({"w": torch.ones(1)}, tmp_path / f"iter_{step:07}")
        (folder / "metadata.json").write_text("{}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10\n")
    found = find_checkpoints(tmp_path)
    assert steps(found) == [(10, True), (20, False)]
    assert "latest_checkpointed_iteration.txt says 10" in found[1].why
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    (tmp_path / "iter_0000020" / "metadata.json").unlink()
    assert "metadata.json" in find_checkpoints(tmp_path)[1].why


def test_a_link_to_a_checkpoint_is_none_itself(tmp_path: Path) -> None:
    ranks(tmp_path / "step-10", 0)
    (tmp_path / "best-99").symlink_to("step-10")
    (tmp_path / "latest").symlink_to("step-10")
    assert steps(find_checkpoints(tmp_path)) == [(10, True)]


def test_nothing_is_there(tmp_path: Path) -> None:
    assert newest_complete(tmp_path / "nowhere") == (None, [])


def test_a_pipe_in_a_checkpoint_holds_nobody_up(tmp_path: Path) -> None:
    folder = ranks(tmp_path / "step-10", 0)
    os.mkfifo(folder / "rank1.pt")
    assert "not a plain file" in find_checkpoints(tmp_path)[0].why


def test_a_format_of_the_program_s_own_is_found_where_there_is_no_other(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model-6.keep", "w") as archive:
        archive.writestr("weights.h5", b"w" * 100)
        archive.writestr("settings.json", "{}", zipfile.ZIP_DEFLATED)
    (tmp_path / "events.out.tfevents.7").write_bytes(b"x")
    (tmp_path / "metrics-9.json").write_text("{}")
    (found,) = find_checkpoints(tmp_path)
    assert (found.path.name, found.step, found.complete, found.format) == ("model-6.keep", 6, True, "archive")
    with open_checkpoint(found.path) as checkpoint:
        assert [(entry.name, entry.nbytes) for entry in checkpoint.entries()] == [
            ("settings.json", 2),
            ("weights.h5", 100),
        ]
    whole = found.path.read_bytes()
    found.path.write_bytes(whole[: len(whole) // 2])
    assert not find_checkpoints(tmp_path)[0].complete
    torch.save({"w": torch.zeros(2)}, tmp_path / "step-3.pt")
    assert [each.path.name for each in find_checkpoints(tmp_path)] == ["step-3.pt"]
