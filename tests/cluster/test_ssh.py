"""`detrun --host`: from a laptop that is not the cluster, through a real sshd, on the real Slurm cluster."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import SlurmCluster
from tests.running import DETRUN, TRAINERS, Ran, detrun, write_recipe
from tests.ssh_server import Line, Sshd, running_sshd


@pytest.fixture
def server(mended_cluster: SlurmCluster, tmp_path: Path) -> Iterator[Sshd]:
    root = tmp_path / "login"
    root.mkdir()
    with running_sshd(root, variables={"SLURM_CONF": os.environ["SLURM_CONF"]}) as running:
        yield running


@pytest.fixture
def line(server: Sshd) -> Iterator[Line]:
    cuttable = Line(server.port)
    server.know(cuttable.port)
    server.write_client_config(port=cuttable.port)
    yield cuttable
    cuttable.close()


def laptop(folder: Path, **keys: Any) -> Path:
    """A repository with a program and its recipe, in a folder that the cluster never sees."""
    code = folder / "laptop"
    (code / "recipes").mkdir(parents=True)
    shutil.copy(TRAINERS / "plain.py", code / "train.py")
    launch = {
        "command": [sys.executable, "train.py", "--steps", "{steps}", "--seed", "{seed}", "--out", "{out}"],
        "workdir": "..",
        "ranks_per_node": 1,
        **keys.pop("launch", {}),
    }
    write_recipe(
        code / "recipes",
        cluster="slurm",
        placement="allocation",
        slurm={"time": "00:05:00", "partition": "debug"},
        launch=launch,
        **keys,
    )
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "x"]):
        git = ["git", "-C", str(code), "-c", "user.name=x", "-c", "user.email=x@y", *words]
        subprocess.run(git, check=True, capture_output=True)
    return code


def environment(server: Sshd) -> dict[str, str]:
    """Of the laptop, which has no Slurm."""
    return {**server.environment(PATH=server.ssh_on_path()), "SLURM_CONF": "/nowhere"}


def start(server: Sshd, code: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*DETRUN, "--host", "cluster", *words],
        cwd=code,
        env={**os.environ, **environment(server)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until_it_runs(server: Sshd, step: int = 1) -> str:
    """The experiment's id, once its first arm has done a step."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        for file in server.archive.glob("*/arms/a/attempt-0/metrics/rank00000.jsonl"):
            if file.read_bytes().count(b"\n") >= step:
                return file.parents[4].name
        time.sleep(0.2)
    pytest.fail("no step within 90 s")


def finish(process: subprocess.Popen[str]) -> Ran:
    out, err = process.communicate(timeout=240)
    return Ran(process.returncode, out, err)


def test_a_pair_goes_on_through_a_cut_line(server: Sshd, line: Line, tmp_path: Path) -> None:
    code = laptop(tmp_path, launch={"args": ["--sleep", "0.4"]})
    process = start(server, code / "recipes", "pair", "plain.yaml", "--json", "--arm", "b.args=--nudge-at 4 --rank 0")
    id = wait_until_it_runs(server, 2)
    line.cut()
    ran = finish(process)
    assert ran.code == 1, ran.explain()
    assert ran.verdict["id"] == id and ran.verdict["first_divergence"]["step"] == 4
    assert "trying again" in ran.err and "Traceback" not in ran.err and line.connections >= 2
    brought = code / "recipes" / ".detrun" / "remote" / "cluster" / id
    assert json.loads((brought / "verdict.json").read_text()) == ran.verdict
    assert "<html" in (brought / "report.html").read_text()
    asked = json.loads((brought / "experiment.json").read_text())
    head = subprocess.run(["git", "-C", str(code), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert asked["code"]["commit"] == head.stdout.strip()
    assert str(code) not in json.dumps(asked)  # it ran what was uploaded, with paths of the other machine
    assert all(arm["attempts"][0]["nodes"][0].startswith("node") for arm in ran.verdict["arms"])


def test_ctrl_c_leaves_it_going_and_attach_takes_it_up(server: Sshd, tmp_path: Path) -> None:
    code = laptop(tmp_path, launch={"args": ["--sleep", "0.4"]})
    process = start(server, code, "pair", "recipes/plain.yaml")
    id = wait_until_it_runs(server)
    process.send_signal(signal.SIGINT)
    left = finish(process)
    assert left.code == 130, left.explain()
    assert f"detrun --host cluster attach {id} takes up here" in left.err
    env = environment(server)
    status = detrun("--host", "cluster", "--ssh", "openssh", "status", id, cwd=code, env=env)
    assert status.code == 0 and id in status.out, status.explain()
    ran = detrun("--host", "cluster", "attach", id, cwd=code, env=env)
    assert ran.code == 0, ran.explain()
    assert ran.out.startswith("IDENTICAL  plain")
    assert (code / ".detrun" / "remote" / "cluster" / id / "report.html").exists()
    shutil.rmtree(code / ".detrun" / "remote" / "cluster" / id / "report.html", ignore_errors=True)
    fetched = detrun("fetch", id, cwd=code, env=env)
    assert fetched.code == 0, fetched.explain()


def test_a_pair_by_the_systems_ssh_and_a_partition_that_is_not_there(server: Sshd, tmp_path: Path) -> None:
    code = laptop(tmp_path)
    env = environment(server)
    words = ["--host", "cluster", "--ssh", "openssh", "pair", "recipes/plain.yaml"]
    refused = detrun(*words, "--set", "slurm.partition=no-such", cwd=code, env=env)
    assert refused.code == 4, refused.explain()
    assert "Slurm has no partition no-such" in refused.err
    ran = detrun(*words, cwd=code, env=env)
    assert ran.code == 0, ran.explain()
    assert ran.out.startswith("IDENTICAL  plain") and "uploading" not in ran.err
