"""`detrun doctor` on a real Slurm cluster: what it measures there, and that nothing of it stays."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from detrun.launch.probe_signals import COMMANDS
from tests.cluster.conftest import SlurmCluster
from tests.running import DETRUN, Ran, detrun, write_recipe

SLURM: dict[str, Any] = {"time": "00:05:00", "partition": "debug"}


def recipe(folder: Path, **keys: Any) -> Path:
    launch = {"nodes": 2, **keys.pop("launch", {})}
    return write_recipe(folder, cluster="slurm", launch=launch, slurm={**SLURM, **keys.pop("slurm", {})}, **keys)


def checks_of(ran: Ran) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in json.loads(ran.out)["checks"]}


def nothing_is_left(cluster: SlurmCluster, folder: Path) -> bool:
    names = cluster.run_slurm("squeue", "--noheader", "--format=%j").split()
    return not list(folder.rglob(".doctor-*")) and not any(name.startswith("detrun-doctor") for name in names)


def test_the_whole_checkup_measures_signals_and_requeueing(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    ran = detrun("doctor", str(recipe(tmp_path)), "--json", cwd=tmp_path)
    checks = checks_of(ran)
    assert ran.code == 0, ran.explain()
    assert {check["status"] for check in checks.values()} <= {"ok", "warn"}
    assert [name for name in checks if name in COMMANDS] == list(COMMANDS)
    assert all(checks[name]["status"] == "ok" for name in COMMANDS), ran.out
    for name in (
        "torch",
        "node to node",
        "node names",
        "clocks",
        "archive, claims and renames",
        "accounting of the job",
    ):
        assert checks[name]["status"] == "ok", checks[name]
    assert "batch lives and saw 137" in checks["scancel -s KILL JOB.STEP"]["measured"]
    assert checks["requeue delay"]["figures"]["seconds"] > 20
    killed, wait = checks["scancel JOB"]["figures"]["kill_seconds"], checks["KillWait"]["figures"]["seconds"]
    assert wait - 2 < killed < wait + 6
    assert nothing_is_left(slurm_cluster, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["plain.yaml"]


def test_what_a_first_run_would_stumble_over_has_its_remedy(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    path = recipe(tmp_path, launch={"command": ["no-such-trainer", "nowhere.py"]})
    ran = detrun("doctor", str(path), "--quick", "--nodes", "1", cwd=tmp_path)
    assert ran.code == 4, ran.explain()
    assert ran.out.startswith("NOT READY")
    assert "fail     launch.command: not found: no-such-trainer" in ran.out
    assert "fail     the program's file: not found: nowhere.py" in ran.out
    assert "ran on node" in ran.out and "scancel -s" not in ran.out
    assert nothing_is_left(slurm_cluster, tmp_path)


def test_a_set_up_line_that_fails_is_named(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    ran = detrun("doctor", str(recipe(tmp_path, slurm={"setup": ["module_of_nowhere load x"]})), cwd=tmp_path)
    assert ran.code == 4, ran.explain()
    assert "a line of slurm.setup failed" in ran.out and "module_of_nowhere" in ran.out
    assert nothing_is_left(slurm_cluster, tmp_path)


def test_a_container_that_does_not_start_is_told_in_sruns_words(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    ran = detrun("doctor", str(recipe(tmp_path, slurm={"container": {"image": "nowhere"}})), cwd=tmp_path)
    assert ran.code == 4, ran.explain()
    assert "fail     nodes: no answer from node" in ran.out and "container" in ran.out
    assert nothing_is_left(slurm_cluster, tmp_path)


def test_a_job_that_is_refused_is_told_in_sbatchs_words(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    ran = detrun("doctor", str(recipe(tmp_path, slurm={"extra": {"nodelist": "node99"}})), cwd=tmp_path)
    assert ran.code == 4, ran.explain()
    assert "sbatch refused the job" in ran.out
    unknown = detrun("doctor", str(recipe(tmp_path, slurm={"partition": "nowhere"})), cwd=tmp_path)
    assert unknown.code == 4 and "no partition nowhere" in unknown.out, unknown.explain()
    assert nothing_is_left(slurm_cluster, tmp_path)


def test_a_job_that_only_waits_is_unknown_and_taken_back(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    path = recipe(tmp_path, slurm={"extra": {"begin": "now+1hour"}})
    ran = detrun("doctor", str(path), "--wait", "0.02", cwd=tmp_path)
    assert ran.code == 3, ran.explain()
    assert "still waits" in ran.out and "remedy: --wait MINUTES" in ran.out
    assert nothing_is_left(slurm_cluster, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_ends_it_takes_the_job_and_the_files_back(
    number: signal.Signals, mended_cluster: SlurmCluster, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [*DETRUN, "doctor", str(recipe(tmp_path))],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    mended_cluster.wait_until(lambda: list(tmp_path.rglob("ping-*-0")), 60)
    process.send_signal(number)
    began = time.monotonic()
    out, err = process.communicate(timeout=90)
    assert process.returncode == 130, err
    assert out == "" and "Traceback" not in err
    assert time.monotonic() - began < 60
    assert nothing_is_left(mended_cluster, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["plain.yaml"]
