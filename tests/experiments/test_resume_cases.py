"""The cases of real-life faults, resumed: each program is killed for real, resumed, and judged as its case says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.running import detrun

CASES = Path(__file__).parents[1] / "cases"
pytestmark = pytest.mark.slow

# What the case calls the culprit, in the words of a verdict: its kind, and what its name has to hold.
CULPRITS = {
    "resume_fp8_history_lost": ("module-state", ["layers.0.amax_history", "layers.1.amax_history"]),
    "resume_loader_restarts": ("data", ["loader"]),
    "resume_moment_bf16_one_layer": ("optimizer", ["exp_avg_sq", "layers.2.weight"]),
    "resume_numpy_rng_lost": ("rng", ["numpy"]),
    "resume_zero_shard_2rank": ("optimizer", ["exp_avg", "layers.2"]),
}
RANKS = {"resume_zero_shard_2rank": [1]}


def resumes() -> Iterator[Any]:
    for path in sorted(CASES.glob("*/case.yaml")):
        expected = yaml.safe_load(path.read_text())["expect"].get("resume") or []
        for number, resume in enumerate(expected if isinstance(expected, list) else [expected]):
            yield pytest.param(path.parent.name, resume, id=f"{path.parent.name}-{number}")


def recipe_of(case: str, resume: dict[str, Any], folder: Path) -> Path:
    launch = yaml.safe_load((CASES / case / "case.yaml").read_text())["launch"]
    saves = resume["save_at"] if isinstance(resume["save_at"], list) else [resume["save_at"]]
    program = [sys.executable, str(CASES / case / "train.py")]
    recipe = {
        "cluster": "local",
        "launch": {
            "launcher": "torchrun" if launch["nproc"] > 1 else "none",
            "ranks_per_node": launch["nproc"],
            "command": [*program, "--steps", "{steps}", "--seed", "{seed}", "--out", "{out}"],
            "env": {"OMP_NUM_THREADS": "1"},
        },
        "steps": launch["steps"],
        # A process group's end can wait for the interpreter, which waits for it: not to be waited for.
        "watchdog": {"start": 60.0},
        "seed": launch["seed"],
        "checkpoint": {
            "directory": "{out}",
            "pattern": "ckpt-{step}",
            "save_args": ["--save-at", *map(str, saves)],
            "resume_args": ["--resume-from", "{checkpoint}"],
        },
        "interrupt": {"kind": "kill", "at_step": min(launch["steps"], max(saves) + 2)},
    }
    path = folder / "case.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


@pytest.mark.parametrize(("case", "resume"), list(resumes()))
def test_the_verdict_is_the_case_s(case: str, resume: dict[str, Any], tmp_path: Path) -> None:
    ran = detrun("resume-check", str(recipe_of(case, resume, tmp_path)), "--json", "--fresh", cwd=tmp_path)
    if resume["verdict"] == "equal":
        assert ran.code == 0, ran.explain()
        assert ran.verdict["verdict"] == "identical"
        assert ran.verdict["culprit"] is None
        return
    assert ran.code == 1, ran.explain()
    verdict = ran.verdict
    low, high = resume["first_step"]
    assert low <= verdict["first_divergence"]["step"] <= high
    kind, names = CULPRITS[case]
    culprit = verdict["culprit"]
    assert culprit["kind"] == kind, ran.explain()
    assert all(name in culprit["name"] for name in names), culprit["name"]
    if case in RANKS:
        assert culprit["ranks"] == RANKS[case]
    saved = resume["save_at"]
    assert culprit["step"] == (saved[-1] if isinstance(saved, list) else saved)


# One line of the restore of a program that saves everything, and what is lost without it.
LOST = {
    "accumulated gradients": ("            p.grad = c", "parameter", "gradients", (2, 2)),
    "a private generator": ("        model.noise.set_state", "rng", "noise", (2, 2)),
    "an average of the weights": ("        ema, (scale, good), done =", "ema", "ema", None),
    "the schedule": ("        sched.load_state_dict", "scheduler", "scheduler", (4, 4)),
    "the optimizer": ("        opt.load_state_dict", "optimizer", "exp_avg", (3, 3)),
    "every global stream": ("        set_rng_states(c", "rng", "python", (2, 2)),
}


@pytest.mark.parametrize("lost", LOST)
def test_what_one_line_less_in_a_restore_loses_is_named(lost: str, tmp_path: Path) -> None:
    line, kind, name, first = LOST[lost]
    source = (CASES / "control_everything_saved" / "train.py").read_text().splitlines(keepends=True)
    places = [number for number, text in enumerate(source) if text.startswith(line)]
    assert len(places) == 1
    text = source[places[0]]
    source[places[0]] = (
        text.replace('ema, (scale, good), done = c["ema"], c["scaler"]', '(scale, good), done = c["scaler"]')
        if "ema, (" in text
        else text[: len(text) - len(text.lstrip())] + "pass\n"
    )
    case = tmp_path / "case" / "train.py"
    case.parent.mkdir()
    case.write_text("".join(source))
    path = recipe_of("control_everything_saved", {"save_at": 5}, tmp_path)
    path.write_text(path.read_text().replace(str(CASES / "control_everything_saved" / "train.py"), str(case)))
    ran = detrun("resume-check", str(path), "--json", "--fresh", cwd=tmp_path)
    assert ran.code == 1, ran.explain()
    culprit = ran.verdict["culprit"]
    assert culprit["kind"] == kind, ran.explain()
    assert name in culprit["name"] or name in culprit["component"], culprit
    metrics = ran.verdict["first_divergence"]["metrics"]
    if first is None:
        assert not metrics
    else:
        assert first[0] <= min(metric["step"] for metric in metrics.values()) <= first[1]


def test_a_resumed_attempt_that_dies_after_its_last_step_has_recorded_everything(tmp_path: Path) -> None:
    source = (CASES / "control_ddp_2rank" / "train.py").read_text()
    end = "        dist.destroy_process_group()\n"
    assert source.count(end) == 1
    case = tmp_path / "case" / "train.py"
    case.parent.mkdir()
    case.write_text(source.replace(end, "        if a.resume_from:\n            os.abort()\n" + end))
    path = recipe_of("control_ddp_2rank", {"save_at": 5}, tmp_path)
    path.write_text(path.read_text().replace(str(CASES / "control_ddp_2rank" / "train.py"), str(case)))
    ran = detrun("resume-check", str(path), "--json", "--fresh", cwd=tmp_path)
    assert ran.code == 0, ran.explain()
    assert ran.verdict["verdict"] == "identical"
    assert [finding["kind"] for finding in ran.verdict["findings"] if finding["where"].get("attempt") == 1][:1] == [
        "late-exit"
    ], ran.explain()
