"""The wrapper as it is really used: a script, with its folder, around real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from detrun.launch import wrapper


def prepare(folder: Path, argv: list[str], **more: Any) -> None:
    for name in ("marker", "log"):
        (folder / name).mkdir()
    launch = {"argv": argv, "env": {}, "unset": [], "prepend": {}, "workdir": str(folder), "ranks_are_tasks": False}
    (folder / "launch.json").write_text(json.dumps({**launch, **more}))


def run(folder: Path, env: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(wrapper.__file__), str(folder)], env={**os.environ, **(env or {})}, timeout=30, check=False
    )
    return done.returncode, json.loads((folder / "marker" / "task00000.json").read_text())


def test_it_tells_the_true_exit_code(tmp_path: Path) -> None:
    prepare(tmp_path, [sys.executable, "-c", "print('hello'); raise SystemExit(200)"])
    code, marker = run(tmp_path)
    assert code == 200
    assert marker["exit_code"] == 200
    assert marker["signal"] is None
    assert (tmp_path / "log" / "task00000.log").read_text() == "hello\n"


def test_it_tells_a_signal_from_an_exit_code(tmp_path: Path) -> None:
    prepare(tmp_path, ["sh", "-c", "kill -9 $$"])
    code, marker = run(tmp_path)
    assert (code, marker["exit_code"], marker["signal"]) == (137, 137, 9)


def test_a_program_that_does_not_exist_has_a_marker_too(tmp_path: Path) -> None:
    prepare(tmp_path, ["no-such-program"])
    code, marker = run(tmp_path)
    assert code == 127
    assert marker["error"] == "could not start no-such-program: No such file or directory"


def test_ranks_do_not_see_the_variables_of_a_step(tmp_path: Path) -> None:
    prepare(tmp_path, ["env"], env={"NEW": "1"}, unset=["GONE"], prepend={"SOME_PATH": "/first"})
    run(tmp_path, {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", "GONE": "1", "SOME_PATH": "/second"})
    lines = (tmp_path / "log" / "task00000.log").read_text().splitlines()
    assert {"NEW=1", "SLURM_JOB_ID=7", "SOME_PATH=/first:/second"} <= set(lines)
    assert not [line for line in lines if line.startswith(("SLURM_NTASKS", "GONE"))]


def test_ranks_that_are_tasks_are_numbered_by_slurm(tmp_path: Path) -> None:
    prepare(tmp_path, ["sh", "-c", "echo $RANK $LOCAL_RANK $SLURM_NTASKS"], ranks_are_tasks=True)
    env = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4"}
    subprocess.run([sys.executable, str(wrapper.__file__), str(tmp_path)], env={**os.environ, **env}, check=True)
    assert (tmp_path / "log" / "rank00003.log").read_text() == "3 1 4\n"
    assert (tmp_path / "marker" / "task00003.json").exists()


def test_nothing_that_the_trainer_left_behind_lives_on(tmp_path: Path) -> None:
    # The orphan has a session of its own, as torchrun's ranks have.
    prepare(tmp_path, ["sh", "-c", "setsid sleep 60 & echo $! >pid; exit 3"])
    code, _ = run(tmp_path)
    assert code == 3
    pid = int((tmp_path / "pid").read_text())
    for _ in range(50):
        if (
            not Path(f"/proc/{pid}").exists()
            or "Z" in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        ):
            break
        time.sleep(0.1)
    else:
        pytest.fail("the orphan is still there")


def test_signals_reach_the_trainer_and_its_end_is_told(tmp_path: Path) -> None:
    prepare(tmp_path, [sys.executable, "-u", "-c", "import signal; print('up'); signal.pause()"])
    process = subprocess.Popen([sys.executable, str(wrapper.__file__), str(tmp_path)])
    log = tmp_path / "log" / "task00000.log"
    for _ in range(200):
        if log.exists() and "up" in log.read_text():
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 143
    assert json.loads((tmp_path / "marker" / "task00000.json").read_text())["signal"] == 15


def test_the_trainer_does_not_outlive_a_driver_that_was_killed(tmp_path: Path) -> None:
    # It ignores SIGTERM, as some do while they save.
    prepare(tmp_path, ["sh", "-c", "trap '' TERM; echo $$ >pid; while :; do sleep 0.1; done"])
    start = f"import os, subprocess; subprocess.Popen({[sys.executable, str(wrapper.__file__), str(tmp_path)]}); "
    script = f"{start} import time; time.sleep(60)"
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    driver = subprocess.Popen([sys.executable, "-c", script], env=env)
    wait_until((tmp_path / "pid").exists)
    driver.kill()
    driver.wait()
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 20)
    wait_until((tmp_path / "marker" / "task00000.json").exists)


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
