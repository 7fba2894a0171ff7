"""Pairs and resume checks by what a program writes itself, from the command line to the verdict."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.running import TRAINERS, Ran, detrun, write_recipe

pytestmark = pytest.mark.slow

PATTERN = r"""
names: {grad_norm: [norm]}
derived: [took]
log:
  head: 'step (?P<step>\d+) \|'
  field: '\|\s*{name} (?P<number>\S+) (?=\|)'
"""
PLAIN_PATTERN = r"log: {line: 'step (?P<step>\d+) loss (?P<loss>\S+)'}"


def recipe(folder: Path, metrics: dict[str, Any], *args: str, **keys: Any) -> Path:
    (folder / "lines.yaml").write_text(PATTERN)
    command = [sys.executable, str(TRAINERS / "writer.py"), "--steps", "{steps}", "--seed", "{seed}", "--out", "{out}"]
    data: dict[str, Any] = {
        "name": "writer",
        "cluster": "local",
        "launch": {"launcher": "none", "command": command, "args": list(args)},
        "steps": 8,
        "metrics": {"required": ["loss", "grad_norm"], "state_every": 0, **metrics},
        **keys,
    }
    path = folder / "writer.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def run(command: str, path: Path, *more: str) -> Ran:
    return detrun(command, str(path), "--json", *more, cwd=path.parent)


def findings(ran: Ran, kind: str) -> list[dict[str, Any]]:
    return [finding for finding in ran.verdict["findings"] if finding["kind"] == kind]


SOURCES: dict[str, dict[str, Any]] = {
    "jsonl": {"source": "jsonl", "path": "{out}/metrics.jsonl"},
    "csv": {"source": "csv", "path": "{out}/*.csv"},
    "tensorboard": {"source": "tensorboard", "path": "{out}/tb", "names": {"loss": "train/loss"}},
    "log": {"source": "log", "pattern": "lines.yaml"},
}


@pytest.mark.parametrize(("kind", "code"), [("jsonl", 0), ("csv", 0), ("tensorboard", 0), ("log", 3)])
def test_a_clean_pair_is_identical_as_far_as_its_source_reaches(tmp_path: Path, kind: str, code: int) -> None:
    ran = run("pair", recipe(tmp_path, SOURCES[kind], "--write", kind))
    assert ran.code == code, ran.explain()
    assert findings(ran, "source") and "no state" in findings(ran, "source")[0]["what"]
    assert bool(findings(ran, "resolution")) == (kind == "log")
    assert not list(tmp_path.glob(".detrun/*/arms/*/attempt-0/metrics/*"))  # no recorder ran


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tensorboard"])
def test_one_float32_in_one_arm_is_found_at_its_step(tmp_path: Path, kind: str) -> None:
    ran = run("pair", recipe(tmp_path, SOURCES[kind], "--write", kind), "--arm", "b.args=--nudge-at 5")
    assert ran.code == 1, ran.explain()
    first = ran.verdict["first_divergence"]
    assert first["step"] == 5 and first["metrics"]["grad_norm"]["ulp"] == 1
    assert "arms/a/work/" in first["metrics"]["grad_norm"]["a"]["place"]


def test_decimals_show_a_difference_of_theirs(tmp_path: Path) -> None:
    path = recipe(tmp_path, SOURCES["log"], "--write", "log")
    ran = run("pair", path, "--set", "metrics.required=[loss]", "--arm", "b.env.SEED=1", "--arm", "b.args=--seed 7")
    assert ran.code == 1, ran.explain()
    loss = ran.verdict["first_divergence"]["metrics"]["loss"]
    assert loss["step"] == 1 and loss["ulp"] is None and loss["a"]["printed"] != loss["b"]["printed"]


def test_decimals_do_not_prove_that_nothing_differs(tmp_path: Path) -> None:
    ran = run("pair", recipe(tmp_path, SOURCES["log"], "--write", "log"), "--arm", "b.args=--nudge-at 2")
    assert ran.code == 3, ran.explain()
    assert "6 significant digits" in findings(ran, "resolution")[0]["what"]


def test_state_that_was_asked_for_and_is_nowhere_forbids_identical(tmp_path: Path) -> None:
    ran = run("pair", recipe(tmp_path, {**SOURCES["jsonl"], "state_every": 1}))
    assert ran.code == 3, ran.explain()
    assert findings(ran, "state-not-held")


def test_a_step_that_was_not_written_is_not_verified(tmp_path: Path) -> None:
    ran = run("pair", recipe(tmp_path, SOURCES["jsonl"]), "--arm", "b.args=--drop-at 4")
    assert ran.code == 3, ran.explain()
    assert "at step 4" in " ".join(ran.verdict["not_verified"])


def test_a_file_that_is_not_there_is_not_verified(tmp_path: Path) -> None:
    ran = run("pair", recipe(tmp_path, SOURCES["jsonl"], "--write", "csv"))
    assert ran.code == 3, ran.explain()
    assert findings(ran, "nothing-compared")


def test_two_sources_are_held_against_each_other(tmp_path: Path) -> None:
    also = [{**SOURCES["csv"], "names": {"loss": "loss"}}, {**SOURCES["log"], "names": {"loss": "loss"}}]
    path = recipe(tmp_path, {**SOURCES["tensorboard"], "also": also}, "--write", "tensorboard,csv,log")
    ran = run("pair", path)
    assert ran.code == 0, ran.explain()
    assert len(findings(ran, "sources-agree")) == 4
    ran = run("pair", path, "--arm", "b.args=--csv-off-at 6")
    assert ran.code == 3, ran.explain()
    (found,) = findings(ran, "sources-disagree")
    assert (found["where"]["arm"], found["where"]["source"], found["where"]["step"]) == ("b", "csv", 6)


def test_a_log_is_held_against_the_recorder(tmp_path: Path) -> None:
    (tmp_path / "plain-lines.yaml").write_text(PLAIN_PATTERN)
    also = {"source": "log", "pattern": "plain-lines.yaml"}
    ran = run("pair", write_recipe(tmp_path, metrics={"required": ["loss"], "also": also}))
    assert ran.code == 0, ran.explain()
    a, _ = findings(ran, "sources-agree")
    assert "log agrees with the recorder: loss" in a["what"] and a["evidence"]["metrics"]["loss"]["steps"] == 6
    also["first_step"] = 2  # as if the log counted one ahead: every line is another step's
    ran = run("pair", write_recipe(tmp_path, metrics={"required": ["loss"], "also": also}))
    assert ran.code == 3, ran.explain()
    assert findings(ran, "sources-disagree")


SAVES = {
    "pattern": "step-{step}",
    "save_every": 3,
    "save_args": ["--save-every", "{save_every}"],
    "resume_args": ["--resume", "{checkpoint}"],
}
SLOWLY = ("--sleep", "0.4")


@pytest.mark.parametrize("kind", ["jsonl", "tensorboard"])
def test_a_resume_is_judged_by_each_attempts_own_readings(tmp_path: Path, kind: str) -> None:
    keys: dict[str, Any] = {"checkpoint": SAVES, "interrupt": {"kind": "kill", "at_step": 5}, "steps": 10}
    path = recipe(tmp_path, SOURCES[kind], "--write", kind, *SLOWLY, **keys)
    ran = run("resume-check", path)
    assert ran.code == 0, ran.explain()
    resumed = where_it_went_on(ran)
    assert resumed["last_step"] == 10
    ran = run("resume-check", path, "--set", f"launch.args={json.dumps(['--write', kind, *SLOWLY, '--forget'])}")
    assert ran.code == 1, ran.explain()
    assert ran.verdict["first_divergence"]["step"] == where_it_went_on(ran)["first_step"]


def where_it_went_on(ran: Any) -> dict[str, Any]:
    """The resumed attempt. Readings tell late where the program is, so that the kill at step 5 may come later, and then
    hit a save."""
    killed, resumed = ran.verdict["arms"][1]["attempts"]
    assert 5 <= killed["last_step"] < 10
    assert resumed["first_step"] - 1 in range(SAVES["save_every"], killed["last_step"] + 1, SAVES["save_every"])
    return resumed


def test_a_resume_by_decimals_is_not_verified_and_says_how_far_it_agrees(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"checkpoint": SAVES, "interrupt": {"kind": "signal", "at_step": 4}, "steps": 8}
    ran = run("resume-check", recipe(tmp_path, SOURCES["log"], "--write", "log", *SLOWLY, **keys))
    assert ran.code == 3, ran.explain()
    assert findings(ran, "resolution") and not findings(ran, "missing-step")
