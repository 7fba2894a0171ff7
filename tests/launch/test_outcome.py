import os
from pathlib import Path

import pytest

from detrun.launch.outcome import ended_by, last_step, outcome_of, tail
from detrun.launch.spec import Segment
from detrun.records.jobs import TaskMarker
from detrun.records.layout import AttemptFolder, ExperimentFolder

SEGMENT = Segment("a", 0, ["python", "t.py"], {}, [], "/", "torchrun", 2, 2, 5)

TORCHRUN_SUMMARY = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
/e/jobs/rank.sh FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-29_14:27:50
  host      : node2
  rank      : 3 (local_rank: 1)
  exitcode  : -9 (pid: 4711)
  error_file: <N/A>
"""


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptFolder:
    folder = ExperimentFolder(tmp_path).attempt("a", 0)
    folder.log_dir.mkdir(parents=True)
    return folder


def mark(attempt: AttemptFolder, task: int, code: int, ended: str = "1") -> None:
    TaskMarker(task=task, exit_code=code, ended=ended).write(attempt.marker(task))


def test_done_is_every_task_saying_so(attempt: AttemptFolder, tmp_path: Path) -> None:
    mark(attempt, 0, 0)
    mark(attempt, 1, 0)
    assert outcome_of(attempt, SEGMENT, 0, tmp_path).state == "done"


def test_a_task_without_a_marker_is_never_done(attempt: AttemptFolder, tmp_path: Path) -> None:
    mark(attempt, 0, 0)
    outcome = outcome_of(attempt, SEGMENT, 0, tmp_path)
    assert outcome.state == "failed"
    assert outcome.reason is not None and "task 1 left no marker" in outcome.reason


def test_the_rank_that_failed_first_is_named_with_its_log(attempt: AttemptFolder, tmp_path: Path) -> None:
    mark(attempt, 0, 143, ended="2")
    mark(attempt, 1, 1, ended="1")
    (attempt.log_dir / "task00001.log").write_text(TORCHRUN_SUMMARY)
    (attempt.log_dir / "rank00003.log").write_text("step 4\nstep 5\n\n")
    outcome = outcome_of(attempt, SEGMENT, 1, tmp_path)
    assert (outcome.failed_rank, outcome.exit_code) == (3, 137)
    assert outcome.reason == "rank 3 was killed by SIGKILL"
    assert outcome.log == "arms/a/attempt-0/log/rank00003.log"
    assert outcome.log_tail == ("step 4", "step 5")


def test_a_rank_that_printed_nothing_leaves_the_launchers_words(attempt: AttemptFolder, tmp_path: Path) -> None:
    mark(attempt, 0, 0)
    mark(attempt, 1, 1)
    (attempt.log_dir / "task00001.log").write_text(TORCHRUN_SUMMARY)
    outcome = outcome_of(attempt, SEGMENT, 1, tmp_path)
    assert outcome.log == "arms/a/attempt-0/log/task00001.log"


def test_nothing_ever_started(attempt: AttemptFolder, tmp_path: Path) -> None:
    (attempt.log_dir / "launch.log").write_text("srun: error: Unable to create step\n")
    outcome = outcome_of(attempt, SEGMENT, 1, tmp_path)
    assert outcome.reason == "the launcher exited with code 1 before any task had started"
    assert outcome.log_tail == ("srun: error: Unable to create step",)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-9, "was killed by SIGKILL"),
        (134, "was killed by SIGABRT"),
        (3, "exited with code 3"),
        (255, "exited with code 255"),
    ],
)
def test_exit_codes_in_words(code: int, words: str) -> None:
    assert ended_by(code) == words


def test_the_last_step_is_that_of_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "rank00000.jsonl"
    assert last_step(path) == 0
    path.write_bytes(b'{"v":1,"step":1}\n{"v":1,"step":2}\n{"v":1,"st')
    assert last_step(path) == 2
    path.write_bytes(b"\xff\xfe\n[1]\nnull\n")
    assert last_step(path) == 0


def test_a_tail_survives_any_bytes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 100_000 + b"\n\xff\n\nlast\n")
    assert tail(path, 1) == ["last"]
    assert tail(tmp_path / "none") == []


def test_a_rank_that_lost_its_peer_is_not_the_one_that_failed_first(attempt: AttemptFolder, tmp_path: Path) -> None:
    mark(attempt, 0, 1, ended="1")
    mark(attempt, 1, 1, ended="2")
    other = TORCHRUN_SUMMARY.replace("rank      : 3 (local_rank: 1)", "rank      : 1 (local_rank: 1)")
    (attempt.log_dir / "task00000.log").write_text(other.replace("-9 (pid", "1 (pid"))
    (attempt.log_dir / "task00001.log").write_text(TORCHRUN_SUMMARY.replace("-9 (pid", "1 (pid"))
    lost = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711\n"
    (attempt.log_dir / "rank00001.log").write_text(lost)
    (attempt.log_dir / "rank00003.log").write_text("ValueError: the loss went through the roof\n")
    os.utime(attempt.log_dir / "rank00001.log", (1, 1))  # the cause went on writing on its way out
    outcome = outcome_of(attempt, SEGMENT, 1, tmp_path)
    assert outcome.failed_rank == 3
    assert outcome.log_tail == ("ValueError: the loss went through the roof",)
