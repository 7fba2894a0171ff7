"""The lock that holds on a file system which many machines share."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from detrun.errors import ArchiveError
from detrun.records.lock import STALE, Lock, read_holder
from detrun.records.processes import boot_id, describe_process, pid_namespace

OLD = STALE + 60

WORKER = """
import os, sys, time
from pathlib import Path
from detrun.records.lock import Lock
folder = Path(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
won = 0
for _ in range(int(sys.argv[2])):
    lock = Lock(folder / "lock")
    if lock.acquire() is None:
        os.close(os.open(folder / "inside", os.O_CREAT | os.O_EXCL))  # fails where two are inside
        won += 1
        time.sleep(0.002)
        (folder / "inside").unlink()
        if len(sys.argv) < 4:
            lock.release()
print(won)
"""


def write_holder(path: Path, **fields: Any) -> None:
    document = {"schema_version": 1, "token": "a" * 32, "host": "elsewhere", "pid": 1, "boot": "x", "namespace": "y"}
    path.write_text(json.dumps({**document, "since": "2026-11-30T02:30:00+00:00", "note": {"night": "n"}, **fields}))


def make_old(path: Path, seconds: float = OLD) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def ended_process() -> dict[str, Any]:
    """What a lock says of a process of this machine that has ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        return {"pid": process.pid, "namespace": pid_namespace(), **describe_process(process.pid)}


def race(folder: Path, rounds: int, *more: str, workers: int = 4) -> list[int]:
    """How often each of several processes got the lock."""
    command = [sys.executable, "-c", WORKER, str(folder), str(rounds), *more]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(workers)
    ]
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    told = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [0] * workers
    return [int(text) for text in told]


def test_one_holds_it_and_the_other_is_told_who(tmp_path: Path) -> None:
    with Lock(tmp_path / "nights" / "lock", {"night": "2026-11-30"}) as lock:
        assert lock.acquire() is None and lock.held()
        holder = Lock(tmp_path / "nights" / "lock").acquire()
        assert holder is not None and holder.pid == os.getpid() and holder.note == {"night": "2026-11-30"}
        assert f"process {os.getpid()} on {os.uname().nodename}, since 20" in holder.words
    assert not [*(tmp_path / "nights").iterdir()]
    with Lock(tmp_path / "nights" / "lock") as other:
        assert other.acquire() is None


def test_no_two_processes_are_ever_inside(tmp_path: Path) -> None:
    assert sum(race(tmp_path, 25)) > 0


def test_of_many_that_find_it_stale_one_gets_it(tmp_path: Path) -> None:
    for attempt in range(2):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        write_holder(folder / "lock")
        make_old(folder / "lock")
        # A holder that ends without giving back is of this machine and gone: none may find that within its one try.
        assert sum(race(folder, 1, "keep")) >= 1
        assert not list(folder.glob("*.breaking"))


def test_threads_that_find_it_stale_at_once_break_it_once(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    write_holder(path)
    make_old(path)
    locks = [Lock(path) for _ in range(12)]
    results: list[Any] = []
    threads = [threading.Thread(target=lambda lock=lock: results.append(lock.acquire())) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results.count(None) == 1
    assert sum(lock.held() for lock in locks) == 1
    for lock in locks:
        lock.release()
    assert not [*tmp_path.iterdir()]


def test_a_live_heartbeat_is_never_broken_however_old_the_lock(tmp_path: Path) -> None:
    write_holder(tmp_path / "lock", since="2020-01-01T00:00:00+00:00")
    make_old(tmp_path / "lock", STALE - 30)
    holder = Lock(tmp_path / "lock").acquire()
    assert holder is not None and holder.host == "elsewhere" and 80 < holder.age < STALE


def test_the_file_systems_clock_counts_and_not_this_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_holder(tmp_path / "lock")
    ahead = time.time() + 7200
    monkeypatch.setattr(time, "time", lambda: ahead)
    assert Lock(tmp_path / "lock").acquire() is not None


def test_a_dead_process_of_this_machine_holds_nothing(tmp_path: Path) -> None:
    write_holder(tmp_path / "lock", **ended_process())
    with Lock(tmp_path / "lock") as lock:
        assert lock.acquire() is None


def test_a_number_that_is_another_process_by_now_holds_nothing(tmp_path: Path) -> None:
    write_holder(
        tmp_path / "lock",
        **{**describe_process(os.getpid()), "pid": os.getpid(), "namespace": pid_namespace(), "start": "1"},
    )
    with Lock(tmp_path / "lock") as lock:
        assert lock.acquire() is None


@pytest.mark.parametrize("where", [{"namespace": "pid:[1]"}, {"boot": "another"}, {"boot": ""}])
def test_a_number_means_nothing_elsewhere(tmp_path: Path, where: dict[str, str]) -> None:
    write_holder(tmp_path / "lock", **{**ended_process(), **where})
    assert Lock(tmp_path / "lock").acquire() is not None


def test_the_heartbeat_beats(tmp_path: Path) -> None:
    with Lock(tmp_path / "lock", beat=0.02) as lock:
        assert lock.acquire() is None
        make_old(tmp_path / "lock")
        deadline = time.monotonic() + 10
        while time.time() - (tmp_path / "lock").stat().st_mtime > 30:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_holder_that_was_taken_for_dead_notices_and_removes_nothing(tmp_path: Path) -> None:
    with Lock(tmp_path / "lock", beat=1000) as slept, Lock(tmp_path / "lock") as other:
        assert slept.acquire() is None
        make_old(tmp_path / "lock")
        assert other.acquire() is None
        assert other.held() and not slept.held()
        slept.release()
        assert other.held()


def test_a_lock_that_was_removed_is_lost(tmp_path: Path) -> None:
    with Lock(tmp_path / "lock") as lock:
        assert lock.acquire() is None
        (tmp_path / "lock").unlink()
        assert not lock.held()


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP])
def test_without_hard_links_it_is_one_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_arguments: object, **_more: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    with Lock(tmp_path / "lock") as lock:
        assert lock.acquire() is None and lock.held()
        assert Lock(tmp_path / "lock").acquire() is not None


def test_a_servers_lost_answer_is_not_taken_for_somebody_elses_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def made_and_refused(source: Any, target: Any) -> None:
        link(source, target)
        raise FileExistsError

    monkeypatch.setattr(os, "link", made_and_refused)
    with Lock(tmp_path / "lock") as lock:
        assert lock.acquire() is None and lock.held()


@pytest.mark.parametrize("content", [b"", b"\x00\xff{", b'{"pid": "x", "note": 3}', b"[]"])
def test_a_file_that_says_nothing_is_broken_by_its_age_alone(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "lock").write_bytes(content)
    assert Lock(tmp_path / "lock").acquire() is not None
    make_old(tmp_path / "lock")
    with Lock(tmp_path / "lock") as lock:
        assert lock.acquire() is None


def test_a_breaker_that_died_over_it_is_got_over(tmp_path: Path) -> None:
    for name in ("lock", "lock.breaking"):
        write_holder(tmp_path / name)
        make_old(tmp_path / name)
    with Lock(tmp_path / "lock") as lock:
        assert lock.acquire() is None
    assert not [*tmp_path.iterdir()]


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    assert Lock(tmp_path / "lock").acquire() is not None
    assert (tmp_path / "precious").read_text() == "kept"


def test_where_nothing_can_be_written_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "nights").write_text("a file")
    with pytest.raises(ArchiveError, match="the lock cannot be made here"):
        Lock(tmp_path / "nights" / "lock").acquire()


def test_what_a_holder_says_cannot_move_the_cursor(tmp_path: Path) -> None:
    write_holder(tmp_path / "lock", host="a\x1b[2J", boot=boot_id())
    holder = read_holder(tmp_path / "lock")
    assert holder is not None and "\x1b" not in holder.words
