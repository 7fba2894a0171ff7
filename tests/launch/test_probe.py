"""The script that doctor runs on nodes: any Python from 3.8 on, and no end that hangs."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from detrun.launch import probe
from detrun.launch.probe_job import Probe, batch_script, look_here, probe_folder

SOURCE = Path(str(probe.__file__))


def wait_for(path: Path) -> None:
    assert probe.wait_for(path, 20), f"no {path.name}"


def test_it_is_python_3_8_and_of_the_standard_library_alone() -> None:
    tree = ast.parse(SOURCE.read_text(), feature_version=(3, 8))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} <= set(sys.stdlib_module_names)


def test_what_hangs_or_fails_is_told_and_does_not_stop_the_rest() -> None:
    began = time.monotonic()
    assert probe.within(0.2, lambda: time.sleep(60)) == {"error": "no answer within 0 s"}
    assert probe.within(5, lambda: 1 / 0) == {"error": "ZeroDivisionError: division by zero"}
    assert probe.within(5, lambda: [1]) == [1]
    assert time.monotonic() - began < 5


def test_a_name_that_does_not_resolve_is_an_answer() -> None:
    assert "error" in probe.resolve("no-such-host.invalid")
    assert probe.resolve("localhost")["addresses"]


def test_two_nodes_never_claim_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "exclusive").mkdir()
    first, second = probe.claim(tmp_path), probe.claim(tmp_path)
    assert sorted(first + second) == list(range(probe.EXCLUSIVE_TRIES))


def test_a_program_is_looked_for_as_the_trainer_will(tmp_path: Path) -> None:
    tool = tmp_path / "bin" / "tool"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    asked = {"workdir": str(tmp_path), "env": {}, "prepend": str(tool.parent)}
    assert probe.found("tool", asked) is None  # it may not be run
    tool.chmod(0o755)
    assert probe.found("tool", asked) == str(tool)
    assert probe.found("bin/tool", asked) == str(tool)
    assert probe.found("tool", {**asked, "prepend": None}) is None


def test_a_python_without_torch_says_so(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 'libpython: cannot open' >&2; exit 127\n")
    fake.chmod(0o755)
    asked = {"workdir": None, "env": {}, "prepend": None, "program": str(fake)}
    assert probe.program(asked) == {"error": f"{fake}: libpython: cannot open"}
    assert probe.program({**asked, "program": "no-such-python"}) == {"error": "there is no no-such-python"}
    assert probe.program({**asked, "program": None}) is None


def test_a_listener_notes_signals_and_ends_when_told(tmp_path: Path) -> None:
    (tmp_path / "signals").mkdir()
    (tmp_path / "probe.json").write_text("{}")
    env = {**os.environ, "SLURMD_NODENAME": "n1", "DETRUN_PROBE_STEP": "2", "SLURM_RESTART_COUNT": "1"}
    listener = subprocess.Popen([sys.executable, str(SOURCE), "listen", str(tmp_path)], env=env)
    try:
        wait_for(tmp_path / "signals" / "ready-1-2-n1")
        log = tmp_path / "signals" / "step-1-2-n1.log"
        for count, number in enumerate((signal.SIGUSR1, signal.SIGTERM), start=1):
            listener.send_signal(number)
            until = time.monotonic() + 20
            while len(log.read_text().splitlines()) < count and time.monotonic() < until:
                time.sleep(0.01)
        assert [line.split()[1] for line in log.read_text().splitlines()] == ["USR1", "TERM"]
        (tmp_path / "end").touch()
        assert listener.wait(timeout=20) == 0
        assert float((tmp_path / "signals" / "alive-1-2-n1").read_text()) > 1e9
    finally:
        listener.kill()


def test_a_listener_ends_with_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "probe"
    (folder / "signals").mkdir(parents=True)
    assert not probe.ended(folder)
    (folder / "signals").rmdir()
    folder.rmdir()
    assert probe.ended(folder)


@pytest.mark.slow
def test_it_looks_around_on_this_machine(tmp_path: Path) -> None:
    with probe_folder(tmp_path / "archive") as folder:
        seen = look_here(folder, Probe(commands=["sh"], files=["a.py"], workdir=str(tmp_path)), os.environ)
    assert seen["program"]["torch"]["version"] and seen["program"]["torch"]["seconds"] > 0
    assert seen["command"]["sh"] and seen["workdir"] is True and seen["files"] == {"a.py": False}
    assert seen["cores"]["affinity"] == len(os.sched_getaffinity(0))
    assert not (tmp_path / "archive").exists()


@pytest.mark.parametrize(
    ("setup", "stage"), [([], "python"), (["true", "cd /"], "python"), (["true", "no-such-module load x"], "setup")]
)
def test_the_batch_script_says_how_far_it_came(setup: list[str], stage: str, tmp_path: Path) -> None:
    folder = tmp_path / "a 'folder'"
    folder.mkdir()
    (folder / "probe.py").write_text("import sys; print(sys.argv)\n")
    done = subprocess.run(["bash", "-c", batch_script(folder, setup)], cwd="/", capture_output=True, timeout=60)
    assert (folder / "stage").read_text().strip() == stage
    log = (folder / "job.log").read_text()
    if stage == "python":
        assert done.returncode == 0 and "'batch'" in log
    else:
        assert done.returncode != 0 and "no-such-module" in log


def test_the_batch_script_gives_a_missing_folder_a_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("detrun.launch.probe_job.SEEN_WITHIN", 1)
    done = subprocess.run(["bash", "-c", batch_script(tmp_path / "gone", [])], capture_output=True, timeout=60)
    assert done.returncode == 66


def test_answers_that_are_torn_are_passed_over(tmp_path: Path) -> None:
    from detrun.launch.probe_job import read_answers

    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / "n1.json").write_text('{"node": "n1"}')
    (tmp_path / "nodes" / "n2.json").write_text('{"node": ')
    assert read_answers(tmp_path) == {"n1": {"node": "n1"}}
    assert json.dumps(read_answers(tmp_path / "none")) == "{}"
