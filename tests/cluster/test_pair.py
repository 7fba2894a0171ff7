"""`detrun pair` on a real Slurm cluster: two nodes, two ranks each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import SlurmCluster
from tests.running import DETRUN, TRAINERS, Ran, detrun, write_recipe

SLURM: dict[str, Any] = {"time": "00:05:00", "partition": "debug"}
TWO_NODES: dict[str, Any] = {"nodes": 2, "ranks_per_node": 2}


def recipe(folder: Path, placement: str, args: list[str] | None = None, **keys: Any) -> Path:
    keys["launch"] = {**TWO_NODES, **keys.get("launch", {})}
    keys["slurm"] = {**SLURM, **keys.get("slurm", {})}
    return write_recipe(folder, keys.pop("name", "plain"), args, cluster="slurm", placement=placement, **keys)


def trainer_arguments() -> list[str]:
    return [str(TRAINERS / "plain.py"), "--steps", "{steps}", "--seed", "{seed}", "--out", "{out}"]


def nodes_of(ran: Ran) -> dict[str, list[str]]:
    return {arm["id"]: sorted(arm["attempts"][0]["nodes"]) for arm in ran.verdict["arms"]}


def jobs_of(ran: Ran) -> dict[str, list[str]]:
    return {arm["id"]: arm["attempts"][0]["jobs"] for arm in ran.verdict["arms"]}


def follow(process: subprocess.Popen[str]) -> Ran:
    out, err = process.communicate(timeout=240)
    return Ran(process.returncode, out, err)


def start(path: Path, *more: str) -> subprocess.Popen[str]:
    command = [*DETRUN, "pair", str(path), "--json", *more]
    return subprocess.Popen(command, cwd=path.parent, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def experiment(folder: Path) -> Path:
    found = sorted((folder / ".detrun").glob("plain-pair-*"))
    assert len(found) == 1
    return found[0]


def wait_for_step(cluster: SlurmCluster, folder: Path, arm: str, step: int) -> None:
    def reached() -> bool:
        metrics = list((folder / ".detrun").glob(f"plain-pair-*/arms/{arm}/attempt-0/metrics/rank00000.jsonl"))
        return bool(metrics) and metrics[0].read_bytes().count(b"\n") >= step

    cluster.wait_until(reached, 90)


def test_pinned_runs_both_arms_on_the_same_nodes(mended_cluster: SlurmCluster, tmp_path: Path) -> None:
    ran = detrun("pair", str(recipe(tmp_path, "pinned")), "--json", cwd=tmp_path)
    assert ran.code == 0, ran.explain()
    nodes, jobs = nodes_of(ran), jobs_of(ran)
    assert nodes["a"] == nodes["b"] and len(nodes["a"]) == 2
    assert jobs["a"] != jobs["b"]


def test_allocation_runs_the_arms_in_turn_in_one_job(mended_cluster: SlurmCluster, tmp_path: Path) -> None:
    ran = detrun("pair", str(recipe(tmp_path, "allocation")), "--json", cwd=tmp_path)
    assert ran.code == 0, ran.explain()
    assert jobs_of(ran)["a"] == jobs_of(ran)["b"]


def test_parallel_runs_two_jobs_at_once(mended_cluster: SlurmCluster, tmp_path: Path) -> None:
    ran = detrun("pair", str(recipe(tmp_path, "parallel")), "--json", cwd=tmp_path)
    assert ran.code == 0, ran.explain()
    assert jobs_of(ran)["a"] != jobs_of(ran)["b"]


def test_disjoint_runs_on_other_nodes(mended_cluster: SlurmCluster, tmp_path: Path) -> None:
    ran = detrun("pair", str(recipe(tmp_path, "disjoint")), "--json", cwd=tmp_path)
    assert ran.code == 0, ran.explain()
    nodes = nodes_of(ran)
    assert not set(nodes["a"]) & set(nodes["b"])


def test_ranks_that_slurm_starts_and_a_fault_planted_in_one_arm(mended_cluster: SlurmCluster, tmp_path: Path) -> None:
    path = recipe(tmp_path, "allocation", launch={"launcher": "srun"})
    ran = detrun("pair", str(path), "--json", "--arm", "b.args=--nudge-at 4 --rank 3", cwd=tmp_path)
    assert ran.code == 1, ran.explain()
    first = ran.verdict["first_divergence"]
    assert first["step"] == 4
    assert first["ranks"] == [3]


def test_a_job_that_fails_names_the_rank_and_shows_its_log(mended_cluster: SlurmCluster, tmp_path: Path) -> None:
    path = recipe(tmp_path, "allocation")
    ran = detrun("pair", str(path), "--arm", "b.args=--do raise --at 3 --rank 2", cwd=tmp_path)
    assert ran.code == 4, ran.explain()
    assert "rank 2" in ran.out
    assert "ValueError: the loss went through the roof" in ran.out
    assert "arms/b/attempt-0/log/rank00002.log" in ran.out


def test_a_stalled_rank_is_ended_by_the_watchdog(mended_cluster: SlurmCluster, tmp_path: Path) -> None:
    path = recipe(tmp_path, "allocation", watchdog={"multiple": 5, "at_least": 6, "start": 120})
    ran = detrun("pair", str(path), "--arm", "b.args=--do hang --at 4 --rank 1", cwd=tmp_path)
    assert ran.code == 4, ran.explain()
    assert "no step for" in ran.out and "rank 1" in ran.out


def test_a_job_cancelled_behind_our_back(mended_cluster: SlurmCluster, tmp_path: Path) -> None:
    path = recipe(tmp_path, "pinned", args=["--sleep", "1"], steps=200)
    process = start(path)
    wait_for_step(mended_cluster, tmp_path, "a", 2)
    mended_cluster.run_slurm("scancel", *mended_cluster.jobs())
    ran = follow(process)
    assert ran.code == 4, ran.explain()
    assert "cancelled" in str(ran.verdict["findings"])


def test_a_node_set_down(mended_cluster: SlurmCluster, tmp_path: Path) -> None:
    path = recipe(tmp_path, "allocation", args=["--sleep", "1"], steps=200)
    process = start(path)
    wait_for_step(mended_cluster, tmp_path, "a", 2)
    mended_cluster.node_down("node2")
    ran = follow(process)
    assert ran.code == 4, ran.explain()


def test_the_controller_restarted_and_accounting_stopped_in_mid_run(
    mended_cluster: SlurmCluster, tmp_path: Path
) -> None:
    path = recipe(tmp_path, "allocation", args=["--sleep", "0.7"], steps=8)
    process = start(path)
    wait_for_step(mended_cluster, tmp_path, "a", 1)
    mended_cluster.stop_accounting()
    mended_cluster.restart_controller()
    ran = follow(process)
    assert ran.code == 0, ran.explain()


def test_a_command_killed_in_mid_run_is_taken_up_again(mended_cluster: SlurmCluster, tmp_path: Path) -> None:
    path = recipe(tmp_path, "pinned", args=["--sleep", "0.5"])
    process = start(path)
    wait_for_step(mended_cluster, tmp_path, "a", 1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    shown = detrun("status", cwd=tmp_path)
    assert shown.code == 0 and "hint: detrun attach" in shown.out, shown.explain()
    ran = detrun("attach", "@latest", "--json", cwd=tmp_path)
    assert ran.code == 0, ran.explain()
    assert nodes_of(ran)["a"] == nodes_of(ran)["b"]


def test_detach_status_logs_cancel(mended_cluster: SlurmCluster, tmp_path: Path) -> None:
    path = recipe(tmp_path, "pinned", args=["--sleep", "1"], steps=200)
    detached = detrun("pair", str(path), "--detach", cwd=tmp_path)
    assert detached.code == 0, detached.explain()
    name = detached.out.strip()
    wait_for_step(mended_cluster, tmp_path, "a", 1)
    logs = detrun("logs", name, "--rank", "0", cwd=tmp_path)
    assert "step 1 loss" in logs.out
    assert detrun("cancel", name, cwd=tmp_path).code == 0
    ran = detrun("attach", name, cwd=tmp_path)
    assert ran.code == 4, ran.explain()
    listed = detrun("list", cwd=tmp_path)
    assert name in listed.out


def test_a_partition_that_does_not_exist_leaves_nothing_behind(mended_cluster: SlurmCluster, tmp_path: Path) -> None:
    path = recipe(tmp_path, "pinned", slurm={"partition": "no-such"})
    ran = detrun("pair", str(path), cwd=tmp_path)
    assert ran.code == 4, ran.explain()
    assert "Slurm has no partition no-such" in ran.err
    assert not list((tmp_path / ".detrun").glob("plain-*"))


def test_what_sbatch_refuses_is_told_in_its_words(mended_cluster: SlurmCluster, tmp_path: Path) -> None:
    path = recipe(tmp_path, "pinned", slurm={"extra": {"nodelist": "node99"}})
    ran = detrun("pair", str(path), cwd=tmp_path)
    assert ran.code == 4, ran.explain()
    assert "refused" in ran.err and "Traceback" not in ran.err
    assert not list((tmp_path / ".detrun").glob("plain-*"))
    assert not mended_cluster.jobs()


def test_a_set_up_line_that_fails_stops_the_job(mended_cluster: SlurmCluster, tmp_path: Path) -> None:
    path = recipe(tmp_path, "allocation", slurm={"setup": ["module_that_is_not_there load x"]})
    ran = detrun("pair", str(path), cwd=tmp_path)
    assert ran.code == 4, ran.explain()
    assert "module_that_is_not_there" in ran.out


def test_an_allocation_that_cannot_fit_is_said_before_submitting(mended_cluster: SlurmCluster, tmp_path: Path) -> None:
    path = recipe(tmp_path, "allocation", slurm={"partition": "small", "time": "00:02:00"})
    ran = detrun("pair", str(path), cwd=tmp_path)
    assert ran.code == 2, ran.explain()
    assert "the job needs 4 minutes (all arms in one allocation), the partition allows 2" in ran.err


def test_a_virtual_environment_of_the_nodes_runs_the_program(mended_cluster: SlurmCluster, tmp_path: Path) -> None:
    """Set-up lines bring another environment; a wrapper may run under another Python than the ranks and detrun."""
    venv = tmp_path / "of the nodes"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    packages = next(venv.glob("lib/python*/site-packages"))
    (packages / "shared.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    path = recipe(
        tmp_path,
        "allocation",
        launch={"nodes": 1, "command": ["python", *trainer_arguments()]},
        slurm={"setup": [f"source '{venv}/bin/activate'"], "container": {"python": "/usr/bin/python3"}},
    )
    ran = detrun("pair", str(path), "--json", cwd=tmp_path)
    assert ran.code == 0, ran.explain()
    seen = json.loads((experiment(tmp_path) / "arms/a/attempt-0/environment/rank00000.json").read_text())
    assert seen["python"]["executable"].startswith(str(venv))


def test_a_site_without_accounting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not below tmp_path, which is closed to the users that munge runs as.
    root = Path(tempfile.gettempdir()) / f"detrun-no-accounting-{os.getpid()}"
    cluster = SlurmCluster(root)
    cluster.local_cluster("up", "--no-accounting")
    try:
        monkeypatch.setenv("SLURM_CONF", str(root / "etc" / "slurm.conf"))
        ran = detrun("pair", str(recipe(tmp_path, "pinned")), "--json", cwd=tmp_path)
        assert ran.code == 0, ran.explain()
        path = recipe(tmp_path, "allocation", args=["--sleep", "1"], steps=200, name="cancelled")
        process = start(path)
        cluster.wait_until(lambda: "RUNNING" in cluster.jobs().values(), 60)
        cluster.run_slurm("scancel", *cluster.jobs())
        gone = follow(process)
        assert gone.code == 4, gone.explain()
    finally:
        cluster.local_cluster("down")
