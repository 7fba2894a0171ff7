"""`detrun nightly` as a person and as cron give it: real runs on this machine, of a program that costs little."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.running import DETRUN, TRAINERS, detrun, write_recipe

SECRET = "planted-7f3a9c"
URLS = f"json://127.0.0.1:1/{SECRET}, apprise://user-{SECRET}:pass-{SECRET}@host.example/{SECRET}-token"


def recipe(folder: Path, name: str = "small", args: list[str] | None = None, **keys: Any) -> Path:
    """A pair of a program without torch: about a second an arm."""
    command = [
        *(sys.executable, str(TRAINERS / "writer.py"), "--steps", "{steps}", "--seed", "{seed}", "--out", "{out}"),
        *("--digits", "hex"),
    ]
    metrics = {"source": "jsonl", "path": "{out}/metrics.jsonl", "required": ["loss", "grad_norm"], "state_every": 0}
    launch = {"launcher": "none", "ranks_per_node": 1, "command": command}
    return write_recipe(folder, name, args, launch=launch, metrics=metrics, steps=4, **keys)


def files_that_hold(root: Path, text: str) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def entry_of(printed: str) -> tuple[dict[str, str], str]:
    """A crontab's variables and command, as cron would read them."""
    lines = [line for line in printed.splitlines() if not line.startswith("#")]
    environment = dict(line.split("=", 1) for line in lines[:-1])
    return environment, lines[-1].split(" ", 5)[5].replace(r"\%", "%")


@pytest.mark.slow
def test_crons_bare_environment_is_enough(tmp_path: Path) -> None:
    recipe(tmp_path)
    printed = detrun("nightly", str(tmp_path), "--print-crontab", cwd=tmp_path)
    assert printed.code == 0, printed.explain()
    _, command = entry_of(printed.out)
    done = subprocess.run(
        ["/usr/bin/env", "-i", "/bin/sh", "-c", command],
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.match(r"IDENTICAL  night [0-9-]+: 1 recipe: 1 identical\n$", done.stdout)
    assert done.stderr == ""
    environment, command = entry_of(printed.out)
    again = subprocess.run(
        ["/bin/sh", "-c", command], capture_output=True, text=True, timeout=120, cwd="/", env=environment, check=False
    )
    assert again.returncode == 0 and len(list((tmp_path / ".detrun").glob("small-pair-*"))) == 1


@pytest.mark.slow
def test_a_planted_url_is_in_no_file(tmp_path: Path) -> None:
    recipe(tmp_path, "good")
    recipe(tmp_path, "bad", arms={"b": {"args": ["--nudge-at", "2"]}})
    env = {"DETRUN_NOTIFY_URLS": URLS}
    ran = detrun("nightly", str(tmp_path), "--night", "n1", "--localize-budget", "0", "--json", cwd=tmp_path, env=env)
    assert ran.code == 1, ran.explain()
    # Nobody answers there: a warning each, and neither says where that is.
    assert ran.err.count("was not sent") == 2, ran.err
    assert SECRET not in ran.out + ran.err
    alone = detrun("pair", "good.yaml", cwd=tmp_path, env=env)
    assert alone.code == 0 and SECRET not in alone.out + alone.err
    archive = tmp_path / ".detrun"
    assert files_that_hold(archive, SECRET) == []
    assert files_that_hold(archive, "DETRUN_NOTIFY_URLS") == []
    assert json.loads((archive / "nights" / "last-notified.json").read_text())["notified"] is None


@pytest.mark.slow
def test_a_crash_keeps_the_planted_url_to_itself(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    archive.mkdir()
    source = (
        "import os, sys, detrun.experiments.pair as p\n"
        "url = os.environ['DETRUN_NOTIFY_URLS'].split(', ')[1]\n"
        "def crash(*_a, **_k): raise ZeroDivisionError(f'cannot reach {url}')\n"
        "p.start_pair = crash\n"
        "from detrun.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    path = recipe(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", source, "pair", str(path), "--archive", str(archive)],
        env={**os.environ, "DETRUN_NOTIFY_URLS": URLS},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 70 and "a bug of detrun" in done.stderr
    assert len(list(archive.glob("detrun-crash-*"))) == 1
    assert SECRET not in done.stdout + done.stderr and files_that_hold(archive, SECRET) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_told_to_end_it_gives_the_lock_back_and_its_jobs_go_on(tmp_path: Path, number: signal.Signals) -> None:
    recipe(tmp_path, args=["--sleep", "0.3"])
    archive = tmp_path / ".detrun"
    command = [*DETRUN, "nightly", str(tmp_path), "--night", "n1"]
    process = subprocess.Popen(command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 90
    while not list(archive.glob("small-pair-*/arms/a/attempt-0/job.json")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out == "", err
    assert err.endswith("Jobs go on. The same command takes the night up.\n")
    assert not (archive / "nights" / "lock").exists()
    again = detrun("nightly", str(tmp_path), "--night", "n1", cwd=tmp_path)
    assert again.code == 0 and "is taken up" in again.err, again.explain()
    assert len(list(archive.glob("small-pair-*"))) == 1


@pytest.mark.slow
def test_a_resume_check_follows_the_clean_pair(tmp_path: Path) -> None:
    checkpoint = {
        "directory": "{out}/checkpoints",
        "pattern": "step-{step}",
        "save_every": 2,
        "save_args": ["--save-every", "{save_every}"],
        "resume_args": ["--resume", "{checkpoint}"],
    }
    keys = {"checkpoint": checkpoint, "interrupt": {"kind": "kill", "at_step": 3}}
    recipe(tmp_path, "sound", ["--sleep", "0.2"], **keys)
    recipe(tmp_path, "forgets", ["--sleep", "0.2", "--forget"], **keys)
    ran = detrun("nightly", str(tmp_path), "--night", "n1", "--localize-budget", "0", "--json", cwd=tmp_path)
    assert ran.code == 1, ran.explain()
    came = {f"{item['recipe']} {item['kind']}": item["verdict"] for item in json.loads(ran.out)["items"]}
    assert came == {
        "forgets pair": "identical",
        "forgets resume-check": "diverged",
        "forgets localize": None,
        "sound pair": "identical",
        "sound resume-check": "identical",
    }


@pytest.mark.slow
def test_killed_in_the_middle_it_is_taken_up_and_nothing_runs_twice(tmp_path: Path) -> None:
    for name in ("one", "two"):
        recipe(tmp_path, name, ["--sleep", "0.2"])
    archive = tmp_path / ".detrun"
    command = [*DETRUN, "nightly", str(tmp_path), "--night", "n1"]
    first = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 90
    while not list(archive.glob("one-pair-*/arms/a/attempt-0/job.json")):
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert (archive / "nights" / "lock").exists()
    second = detrun("nightly", str(tmp_path), "--night", "n1", "--quiet", cwd=tmp_path)
    assert second.code == 0, second.explain()
    assert second.out == "IDENTICAL  night n1: 2 recipes: 2 identical\n"
    assert len(list(archive.glob("*-pair-*"))) == 2 and not (archive / "nights" / "lock").exists()
    third = detrun("nightly", str(tmp_path), "--night", "n2", "--quiet", cwd=tmp_path)
    assert (third.code, third.out, third.err) == (0, "", "")


def test_junit_and_json_and_what_is_wrong_with_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "typo.yaml").write_text("launch: {comand: [x]}\n")
    ran = detrun("nightly", "typo.yaml", "--night", "n1", "--json", "--junit", "out.xml", cwd=tmp_path)
    assert ran.code == 2, ran.explain()
    document = json.loads(ran.out)
    assert document["exit_code"] == 2 and document["items"][0]["state"] == "error" and document["night"] == "n1"
    assert 'errors="1"' in (tmp_path / "out.xml").read_text()
    for arguments in (["--only", "tax"], ["--only", ""], ["--night", "a/b"], ["--print-crontab", "--at", "25:00"]):
        wrong = detrun("nightly", "typo.yaml", *arguments, cwd=tmp_path)
        assert wrong.code == 2 and wrong.err.startswith("error: ") and wrong.out == "", wrong.explain()
    assert shlex.quote(str(tmp_path)) in detrun("nightly", "typo.yaml", "--print-crontab", cwd=tmp_path).out


def test_a_file_that_others_may_read_is_refused_before_anything_runs(tmp_path: Path) -> None:
    recipe(tmp_path)
    urls = tmp_path / "urls"
    urls.write_text(URLS)
    urls.chmod(0o644)
    ran = detrun("nightly", "small.yaml", cwd=tmp_path, env={"DETRUN_NOTIFY_FILE": str(urls)})
    assert ran.code == 2 and f"hint: chmod 600 {urls}" in ran.err and SECRET not in ran.err
    assert not (tmp_path / ".detrun").exists()
