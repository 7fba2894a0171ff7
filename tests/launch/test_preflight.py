import subprocess
from pathlib import Path

import pytest

from detrun.errors import ArchiveError, RecipeError, UsageError
from detrun.launch.preflight import check_command, check_node_hours, check_space, folder_size, human
from detrun.launch.snapshot import snapshot_code
from detrun.launch.submit import clean_environment


def test_a_command_that_does_not_exist_is_said_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="there is no program no-such-thing"):
        check_command(["no-such-thing"], tmp_path, "/usr/bin:/bin")
    with pytest.raises(RecipeError, match=r"there is no program \./train\.sh"):
        check_command(["./train.sh"], tmp_path, "/usr/bin:/bin")
    check_command(["sh", "x"], tmp_path, "/usr/bin:/bin")


def test_a_working_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="is not a folder"):
        check_command(["sh"], tmp_path / "none", "/bin")


def test_node_hours_above_the_limit_want_a_yes() -> None:
    assert check_node_hours(2, 16, 90, 50, False) == "2 arms × 16 nodes × 1:30 h = up to 48 node-hours"
    with pytest.raises(UsageError, match=r"above limits.node_hours \(50\)"):
        check_node_hours(2, 64, 60, 50, False)
    assert "128 node-hours" in check_node_hours(2, 64, 60, 50, True)
    assert "128 node-hours" in check_node_hours(2, 64, 60, None, False)


def test_space_is_judged_by_what_the_last_experiment_wrote(tmp_path: Path) -> None:
    check_space(tmp_path / "not" / "there" / "yet", 10)
    with pytest.raises(ArchiveError, match="the last experiment of this recipe wrote"):
        check_space(tmp_path, 10**18)


def test_folder_size_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 1000)
    (tmp_path / "loop").symlink_to(tmp_path)
    assert 1000 <= folder_size(tmp_path) < 1200
    assert human(1234567) == "1.23 MB"


def test_what_an_enclosing_job_or_launcher_left_is_scrubbed() -> None:
    left = {
        "SLURM_JOB_ID": "1",
        "RANK": "3",
        "MASTER_PORT": "1",
        "DETRUN_ARM": "a",
        "SUBMITIT_X": "",
        "TORCHELASTIC_RUN_ID": "",
    }
    kept = {"SLURM_CONF": "/c", "PATH": "/bin", "SBATCH_ACCOUNT": "me"}
    assert clean_environment(left | kept) == kept


def test_the_commit_and_what_is_not_committed_are_kept(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *arguments], cwd=tree, check=True, capture_output=True)

    git("init")
    (tree / "train.py").write_text("1\n")
    git("add", "train.py")
    git("commit", "-m", "x")
    clean = snapshot_code(tree, tmp_path / "code")
    assert clean.commit is not None and not clean.dirty and clean.diff is None
    (tree / "train.py").write_text("2\n")
    dirty = snapshot_code(tree, tmp_path / "code")
    assert (dirty.dirty, dirty.diff) == (True, "code/diff.patch")
    assert "+2" in (tmp_path / "code" / "diff.patch").read_text()


def test_a_folder_outside_any_repository_has_no_commit(tmp_path: Path) -> None:
    assert snapshot_code(tmp_path, tmp_path / "code").commit is None
