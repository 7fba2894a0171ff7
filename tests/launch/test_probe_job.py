"""Doctor's job seen from where it is submitted, with commands that stand for Slurm's."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from detrun.errors import ArchiveError, SubmissionError
from detrun.launch.probe_job import FORSAKEN, PREFIX, Probe, ProbeJob, probe_folder


def stand_in(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in front of PATH, with Slurm commands that do nothing."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("squeue", "sacct", "scancel"):
        stand_in(folder, name, f'echo "$0" "$@" >>{tmp_path}/called; exit 0')
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def job_in(tmp_path: Path, **keys: object) -> ProbeJob:
    folder = tmp_path / f"{PREFIX}abcd"
    folder.mkdir(exist_ok=True)
    return ProbeJob(folder, Probe(**keys), os.environ)  # type: ignore[arg-type]


def test_nothing_is_left_of_its_folder_nor_of_what_was_made_for_it(tmp_path: Path) -> None:
    archive = tmp_path / "deep" / "archive"
    with pytest.raises(KeyboardInterrupt), probe_folder(archive) as folder:
        assert (folder / "probe.py").is_file()
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_an_archive_that_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    with probe_folder(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_what_a_killed_doctor_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    old, young, other = (tmp_path / f"{PREFIX}{name}" for name in ("old", "young", "other"))
    for folder in (old, young):
        folder.mkdir()
        (folder / "probe.py").touch()
    other.mkdir()  # not ours, whatever it is called
    long_ago = time.time() - FORSAKEN - 60
    for folder in (old, other):
        os.utime(folder, (long_ago, long_ago))
    with probe_folder(tmp_path):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, young.name]


def test_an_archive_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArchiveError, match="cannot be written"), probe_folder(tmp_path / "file" / "archive"):
        pass


def test_sbatch_gets_the_recipes_options_and_nothing_of_another_job(
    tmp_path: Path, bin_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("DETRUN_NOTIFY_URLS", "slack://secret")
    stand_in(bin_folder, "sbatch", f'echo "$@" >{tmp_path}/argv; env >{tmp_path}/env; echo "4182;cluster"')
    job = job_in(tmp_path, nodes=2, tasks_per_node=8, options={"partition": "gpu", "time": "10:00:00", "qos": None})
    job.submit()
    argv = (tmp_path / "argv").read_text().split()
    assert job.id == "4182"
    assert {"--parsable", "--partition=gpu", "--nodes=2", "--ntasks-per-node=8", "--time=5", "--requeue"} <= set(argv)
    env = (tmp_path / "env").read_text()
    assert "SLURM_JOB_ID" not in env and "secret" not in env
    assert not any("secret" in path.read_text() for path in job.folder.iterdir())


def test_what_sbatch_refuses_is_told_in_its_words(tmp_path: Path, bin_folder: Path) -> None:
    stand_in(bin_folder, "sbatch", "echo 'sbatch: error: Invalid account' >&2; exit 1")
    with pytest.raises(SubmissionError, match="sbatch refused the job: Invalid account"):
        job_in(tmp_path).submit()


def test_a_job_whose_id_was_never_learnt_is_cancelled_by_its_name(tmp_path: Path, bin_folder: Path) -> None:
    job = job_in(tmp_path)
    job.end()
    assert f"scancel --name={job.name}" in (tmp_path / "called").read_text()


def test_a_quick_job_may_not_be_started_again(tmp_path: Path, bin_folder: Path) -> None:
    stand_in(bin_folder, "sbatch", f'echo "$@" >{tmp_path}/argv; echo 1')
    job_in(tmp_path, signals=False).submit()
    assert "--no-requeue" in (tmp_path / "argv").read_text().split()
