"""`detrun pair` on this machine, from the command line to the verdict."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.running import DETRUN, Ran, detrun, write_recipe

pytestmark = pytest.mark.slow

CASES = Path(__file__).parents[1] / "cases"


def pair(path: Path, *more: str, **keys: Any) -> Ran:
    return detrun("pair", str(path), *more, cwd=path.parent, **keys)


def experiment(folder: Path) -> Path:
    (found,) = (folder / ".detrun").glob("*-pair-*")
    return found


def test_a_clean_pair_is_identical_and_its_report_can_be_made_again(tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    ran = pair(path)
    assert ran.code == 0, ran.explain()
    assert ran.out.startswith("IDENTICAL  plain: 2 ranks × 6 steps")
    assert "PYTHONHASHSEED=0" in ran.out
    folder = experiment(tmp_path)
    (folder / "verdict.json").unlink()
    (folder / "report.html").unlink()
    again = detrun("report", "@latest", cwd=tmp_path)
    assert (again.code, again.out) == (0, ran.out)
    assert (folder / "verdict.json").exists() and (folder / "report.html").exists()


@pytest.mark.parametrize(("step", "rank"), [(1, 0), (4, 1), (6, 0)])
def test_one_bit_of_one_gradient_is_found_at_its_step_and_rank(tmp_path: Path, step: int, rank: int) -> None:
    path = write_recipe(tmp_path)
    ran = pair(path, "--json", "--arm", f"b.args=--nudge-at {step} --rank {rank}")
    assert ran.code == 1, ran.explain()
    first = ran.verdict["first_divergence"]
    assert first["step"] == step
    assert first["ranks"] == [rank]
    assert "gradients" in {entry["component"] for entry in first["state"]}


def test_a_crash_names_the_rank_its_last_words_and_its_log(tmp_path: Path) -> None:
    ran = pair(write_recipe(tmp_path), "--arm", "b.args=--do raise --at 3 --rank 1")
    assert ran.code == 4, ran.explain()
    assert "rank 1" in ran.out
    assert "ValueError: the loss went through the roof" in ran.out
    assert "arms/b/attempt-0/log/rank00001.log" in ran.out


def test_a_killed_rank_is_infrastructure(tmp_path: Path) -> None:
    ran = pair(write_recipe(tmp_path), "--json", "--arm", "a.args=--do kill --at 3 --rank 1")
    assert ran.code == 4, ran.explain()
    assert "SIGKILL" in json.dumps(ran.verdict)


def test_a_rank_that_dies_on_its_way_out_is_complete_with_a_remark(tmp_path: Path) -> None:
    ran = pair(write_recipe(tmp_path), "--json", "--arm", "b.args=--do abort-at-exit --rank 1")
    assert ran.code == 0, ran.explain()
    (attempt,) = ran.verdict["arms"][1]["attempts"]
    assert attempt["exit_code"] == 134
    assert attempt["remark"]


def test_an_arm_that_leaves_early_with_exit_0_is_not_verified(tmp_path: Path) -> None:
    ran = pair(write_recipe(tmp_path), "--arm", "b.args=--do leave --at 4")
    assert ran.code == 3, ran.explain()
    assert ran.out.startswith("NOT VERIFIED")
    assert "step 4 of 6" in ran.out


def test_both_arms_leaving_early_are_not_verified_either(tmp_path: Path) -> None:
    ran = pair(write_recipe(tmp_path, args=["--do", "leave", "--at", "4"]))
    assert ran.code == 3, ran.explain()


def test_a_stalled_rank_is_ended_and_named(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, watchdog={"multiple": 5, "at_least": 4, "start": 60})
    ran = pair(path, "--arm", "b.args=--do hang --at 4 --rank 1")
    assert ran.code == 4, ran.explain()
    assert "no step for" in ran.out
    assert "last step 3 on every rank" in ran.out
    assert "rank 1 in" in ran.out


def test_a_command_killed_in_mid_run_is_taken_up_again(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, args=["--sleep", "0.3"])
    process = subprocess.Popen([*DETRUN, "pair", str(path)], cwd=tmp_path)
    while not list((tmp_path / ".detrun").glob("*/arms/a/attempt-0/metrics/rank00000.jsonl")):
        time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    ran = detrun("attach", "@latest", cwd=tmp_path)
    assert ran.code == 0, ran.explain()


def test_ctrl_c_leaves_the_jobs_running_and_says_so(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, args=["--sleep", "0.3"])
    process = subprocess.Popen(
        [*DETRUN, "pair", str(path)], cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not list((tmp_path / ".detrun").glob("*/arms/a/attempt-0/metrics/rank00000.jsonl")):
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Jobs go on. detrun attach" in err
    ran = detrun("attach", "@latest", cwd=tmp_path)
    assert ran.code == 0, ran.explain()


def test_cancel_ends_the_ranks(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, args=["--sleep", "1"], steps=100)
    name = pair(path, "--detach").out.strip()
    while not list((tmp_path / ".detrun").glob("*/arms/a/attempt-0/metrics/rank00000.jsonl")):
        time.sleep(0.2)
    assert detrun("cancel", name, cwd=tmp_path).code == 0
    ran = detrun("attach", name, "--json", cwd=tmp_path)
    assert ran.code == 4, ran.explain()
    running = subprocess.run(["pgrep", "-f", str(tmp_path / ".detrun")], capture_output=True, text=True, check=False)
    assert running.stdout == ""


def test_parallel_arms_have_ports_of_their_own(tmp_path: Path) -> None:
    ran = pair(write_recipe(tmp_path, placement="parallel"), "--json")
    assert ran.code == 0, ran.explain()


def test_several_repeats_are_held_against_the_first_arm(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, launch={"launcher": "none", "ranks_per_node": 1})
    ran = pair(path, "--json", "--repeat", "2", "--arm", "c.args=--nudge-at 5")
    assert ran.code == 1, ran.explain()
    assert [arm["id"] for arm in ran.verdict["arms"]] == ["a", "b", "c"]
    assert ran.verdict["first_divergence"]["step"] == 5


def test_an_undeclared_difference_of_settings_forbids_identical(tmp_path: Path) -> None:
    """The program itself changes a switch in one arm only: nothing that was declared explains it."""
    trainer = tmp_path / "train.py"
    source = (Path(__file__).parents[1] / "trainers" / "plain.py").read_text()
    trainer.write_text(
        source.replace("rank, world", "if '/arms/b/' in args.out: torch.set_flush_denormal(True)\nrank, world")
    )
    path = write_recipe(tmp_path, launch={"launcher": "none", "ranks_per_node": 1})
    recipe = yaml.safe_load(path.read_text())
    recipe["launch"]["command"][1] = str(trainer)
    path.write_text(yaml.safe_dump(recipe))
    ran = pair(path)
    assert ran.code == 3, ran.explain()
    assert "flush_denormal" in ran.out


def test_a_command_that_does_not_exist_leaves_nothing(tmp_path: Path) -> None:
    ran = pair(write_recipe(tmp_path, launch={"command": ["no-such-trainer"]}))
    assert ran.code == 2, ran.explain()
    assert "there is no program no-such-trainer" in ran.err
    assert not (tmp_path / ".detrun").exists()


def test_an_environment_that_strict_determinism_refuses(tmp_path: Path) -> None:
    ran = pair(write_recipe(tmp_path, launch={"env": {"NCCL_ALGO": "Tree"}}))
    assert ran.code == 2, ran.explain()
    assert "NCCL_ALGO=Tree" in ran.err


CASE_NAMES = sorted(
    path.parent.name for path in CASES.glob("*/case.yaml") if path.parent.name.startswith(("pair_", "control_"))
)


@pytest.mark.parametrize("name", CASE_NAMES)
def test_a_real_life_case(name: str, tmp_path: Path) -> None:
    """Programs that know nothing of detrun, each with one real-life fault or none."""
    case = yaml.safe_load((CASES / name / "case.yaml").read_text())
    shutil.copy(CASES / name / "train.py", tmp_path)
    launch = case["launch"]
    recipe = {
        "name": name,
        "cluster": "local",
        "launch": {
            "command": [sys.executable, "train.py", "--steps", "{steps}", "--seed", "{seed}", "--out", "{out}"],
            "ranks_per_node": launch["nproc"],
        },
        "steps": launch["steps"],
        "seed": launch["seed"],
        "metrics": {"required": ["loss", "grad_norm"]},
        "determinism": "observe",
        "pin": "none",
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    ran = pair(path, "--json")
    if case["verdict"]["pair"] == "equal":
        assert ran.code == 0, ran.explain()
    else:
        assert ran.code == 1, ran.explain()
        low, high = case["expect"]["pair"]["first_step"]
        assert low <= ran.verdict["first_divergence"]["step"] <= high


def test_the_hash_seed_is_pinned_and_said(tmp_path: Path) -> None:
    shutil.copy(CASES / "pair_hashseed_vocab" / "train.py", tmp_path)
    recipe = {
        "name": "vocab",
        "cluster": "local",
        "launch": {
            "command": [sys.executable, "train.py", "--steps", "{steps}", "--seed", "{seed}", "--out", "{out}"],
        },
        "steps": 10,
        "metrics": {"required": ["loss", "grad_norm"]},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    ran = pair(path)
    assert ran.code == 0, ran.explain()
    assert "pinned by detrun: PYTHONHASHSEED=0" in ran.out


@pytest.mark.parametrize("victim", ["wrapper.py", "submitit.core._submit", "submitit.local._local"])
def test_whoever_is_killed_no_rank_runs_on(tmp_path: Path, victim: str) -> None:
    path = write_recipe(tmp_path, args=["--sleep", "0.3"], steps=60)
    process = subprocess.Popen([*DETRUN, "pair", str(path)], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    while not list((tmp_path / ".detrun").glob("*/arms/a/attempt-0/metrics/rank00000.jsonl")):
        time.sleep(0.2)
    ours = [proc for proc in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(proc.info["cmdline"] or [])]
    ranks = [proc for proc in ours if "plain.py" in " ".join(proc.info["cmdline"]) and "/arms/a/" in str(proc.info)]
    assert ranks
    for proc in ours:
        if victim in proc.info["cmdline"] or any(word.endswith(victim) for word in proc.info["cmdline"]):
            proc.kill()
    _, alive = psutil.wait_procs(ranks, timeout=30)
    assert not alive
    detrun("cancel", "@latest", cwd=tmp_path)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 4, out


def test_a_report_of_what_still_runs_leaves_no_verdict_behind(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, args=["--sleep", "0.5"])
    process = subprocess.Popen([*DETRUN, "pair", str(path)], cwd=tmp_path)
    while not list((tmp_path / ".detrun").glob("*/arms/a/attempt-0/metrics/rank00000.jsonl")):
        time.sleep(0.2)
    ran = detrun("report", cwd=tmp_path)
    assert ran.code == 3, ran.explain()
    assert "it still runs, so nothing was written" in ran.err
    assert not (experiment(tmp_path) / "verdict.json").exists()
    assert process.wait(timeout=120) == 0
    assert (experiment(tmp_path) / "verdict.json").exists()
