"""An arm is really interrupted on this machine, and really goes on; what is refused before anything starts."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from detrun.errors import RecipeError
from detrun.experiments.resume import ResumeOptions, plan_resume, resolve_interrupts
from detrun.launch.local import LocalCluster
from detrun.recipe import load_recipe
from detrun.records.jobs import ExperimentFile
from detrun.records.layout import ExperimentFolder
from tests.experiments.resuming import SAVES, Arms, plain_recipe, run_resume
from tests.running import write_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
CASES = Path(__file__).parents[1] / "cases"


def resumed(arms: Arms, step: int) -> None:
    """The interrupted arm went on after `step` and computed what the undisturbed one did."""
    job = arms.job("b", 1)
    assert job.state == "done", arms.explain()
    assert job.resumed_from is not None and job.resumed_from.step == step, arms.explain()
    last = arms.steps("a", 0)[-1]
    assert arms.steps("b", 1) == list(range(step + 1, last + 1))
    assert arms.metrics("b", 1, last) == arms.metrics("a", 0, last)


@pytest.mark.slow
def test_killed_between_two_saves(tmp_path: Path) -> None:
    arms = run_resume(plain_recipe(tmp_path), LocalCluster())
    first = arms.job("b", 0)
    assert first.state == "interrupted", arms.explain()
    assert first.interruption is not None
    assert (first.interruption.kind, first.interruption.step, first.interruption.ranks) == ("kill", 4, [0, 1])
    assert arms.steps("b", 0) == arms.steps("b", 0, rank=1) == [1, 2, 3, 4]
    resumed(arms, 3)
    views = {(view.arm, view.attempt, view.resumed) for look in arms.seen for view in look}
    assert ("b", 1, 3) in views
    asked = ExperimentFile.read(arms.folder.experiment_file)
    assert [how["at_step"] for how in asked.interrupts] == [4]


@pytest.mark.slow
def test_one_rank_killed_takes_the_rest_of_the_step_along(tmp_path: Path) -> None:
    arms = run_resume(plain_recipe(tmp_path), LocalCluster(), ["interrupt={kind: kill, at_step: 5, ranks: 1}"])
    first = arms.job("b", 0)
    assert first.interruption is not None and first.interruption.ranks == [1], arms.explain()
    resumed(arms, 3)


@pytest.mark.slow
def test_a_signal_after_which_the_program_saves_and_leaves(tmp_path: Path) -> None:
    path = plain_recipe(tmp_path, args=["--leave-on", "USR1"])
    arms = run_resume(path, LocalCluster(), ["interrupt={kind: signal, at_step: 5, signal: USR1}"])
    first = arms.job("b", 0)
    assert (first.state, first.exit_code) == ("interrupted", 0), arms.explain()
    resumed(arms, 5)


@pytest.mark.slow
def test_a_signal_at_the_last_step(tmp_path: Path) -> None:
    path = plain_recipe(tmp_path, args=["--leave-on", "TERM"])
    arms = run_resume(path, LocalCluster(), ["interrupt={kind: kill, at_step: 10}"])
    assert arms.steps("b", 0)[-1] == 10, arms.explain()
    resumed(arms, 9)


@pytest.mark.slow
def test_stopped_at_a_step_whose_save_is_done(tmp_path: Path) -> None:
    arms = run_resume(plain_recipe(tmp_path), LocalCluster(), ["interrupt={kind: stop, at_step: 6}"])
    first = arms.job("b", 0)
    assert first.state == "interrupted", arms.explain()
    resumed(arms, 6)


@pytest.mark.slow
def test_killed_during_a_save_it_falls_back_to_the_one_before(tmp_path: Path) -> None:
    path = plain_recipe(tmp_path, args=["--pad", "60"], steps=13)
    arms = run_resume(path, LocalCluster(), ["interrupt={kind: kill-during-save, at_step: 5}"])
    first, second = arms.job("b", 0), arms.job("b", 1)
    assert first.state == "interrupted", arms.explain()
    assert first.interruption is not None
    cut = first.interruption.step
    assert cut in (6, 9, 12)
    assert first.interruption.detail["bytes"] > 0 and first.interruption.detail["entries"] == [f"step-{cut}"]
    resumed(arms, cut - 3)
    assert second.resumed_from is not None
    assert [Path(each.path).name for each in second.resumed_from.rejected] == [f"step-{cut}"]


@pytest.mark.slow
def test_interrupted_twice(tmp_path: Path) -> None:
    how = "[{kind: kill, at_step: 4}, {kind: kill, at_step: 7, moment: after-save}]"
    arms = run_resume(plain_recipe(tmp_path), LocalCluster(), [f"interrupt={how}"])
    assert [arms.job("b", n).state for n in range(3)] == ["interrupted", "interrupted", "done"], arms.explain()
    assert arms.steps("b", 1) == [4, 5, 6, 7]
    assert arms.steps("b", 2) == [7, 8, 9, 10]
    assert arms.metrics("b", 2, 10) == arms.metrics("a", 0, 10)


@pytest.mark.slow
def test_a_program_that_finds_its_checkpoint_itself_and_the_arms_beside(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"launch": {"launcher": "none", "ranks_per_node": 1}}
    keys["checkpoint"] = {**SAVES, "resume_args": []}
    path = plain_recipe(tmp_path, args=["--resume", "auto"], **keys)
    options = ResumeOptions(observer=True, self_test=True, fresh=True)
    arms = run_resume(path, LocalCluster(), [], options)
    resumed(arms, 3)
    asked = ExperimentFile.read(arms.folder.experiment_file)
    purposes = {arm.id: arm.purpose for arm in asked.arms if arm.role == "control"}
    assert purposes["c"] == "observer" and len(purposes) == 6
    assert arms.steps("c", 0) == list(range(1, 11))
    assert not (arms.folder.work_dir("c") / "checkpoints").exists()
    for arm in sorted(set(purposes) - {"c"}):
        assert arms.steps(arm, 1) == arms.steps("b", 1), arms.explain()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill", "kill-during-save"])
def test_the_recipe_that_comes_with_detrun(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "hybrid.yaml"
    shutil.copy(RECIPES / "hybrid-cpu.yaml", path)
    overrides = ["cluster=local", "steps=24", "checkpoint.save_every=6", "interrupt.at_step=8"]
    arms = run_resume(path, LocalCluster(), [*overrides, f"interrupt.kind={kind}"])
    first = arms.job("b", 0)
    assert first.state == "interrupted", arms.explain()
    assert first.interruption is not None
    resumed(arms, 6 if kind == "kill" else first.interruption.step // 6 * 6 - 6)


@pytest.mark.slow
def test_a_recipe_that_counts_micro_batches_is_resumed_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """Three micro-batches a step: saved after the fifth, interrupted after the seventh."""
    shutil.copy(CASES / "control_everything_saved" / "train.py", tmp_path)
    keys: dict[str, Any] = {
        "launch": {
            "launcher": "none",
            "ranks_per_node": 1,
            "command": [sys.executable, "train.py", "--steps", "{steps}", "--seed", "{seed}", "--out", "{out}"],
        },
        "steps": 18,
        "metrics": {"required": ["loss"]},
        "determinism": "observe",
        "checkpoint": {
            "directory": "{out}",
            "save_args": ["--save-at", "5", "12"],
            "resume_args": ["--resume-from", "{checkpoint}"],
        },
        "interrupt": {"kind": "kill", "at_step": 7},
    }
    arms = run_resume(write_recipe(tmp_path, **keys), LocalCluster())
    first, second = arms.job("b", 0), arms.job("b", 1)
    assert first.interruption is not None, arms.explain()
    assert (first.interruption.step, first.interruption.microbatch) == (2, 1)
    assert second.resumed_from is not None, arms.explain()
    assert (second.resumed_from.step, second.resumed_from.microbatch) == (1, 2)
    assert arms.steps("a", 0) == [1, 2, 3, 4, 5, 6] and arms.steps("b", 1) == [2, 3, 4, 5, 6]
    assert arms.metrics("b", 1, 6) == arms.metrics("a", 0, 6)


@pytest.mark.slow
def test_a_run_that_was_never_interrupted_says_so(tmp_path: Path) -> None:
    """It ignores the signal."""
    path = plain_recipe(tmp_path, args=["--ignore", "USR2"])
    arms = run_resume(path, LocalCluster(), ["interrupt={kind: signal, at_step: 5, signal: USR2}"])
    assert (arms.job("b", 0).state, arms.job("b", 1).state) == ("done", "cancelled"), arms.explain()
    assert "was never interrupted" in str(arms.job("b", 1).reason)


# What is refused before anything starts


def plan(path: Path, overrides: list[str], cluster: str = "slurm", options: ResumeOptions | None = None) -> Any:
    loaded = load_recipe(path, overrides)
    return plan_resume(loaded, ExperimentFolder(path.parent / "x"), cluster, options or ResumeOptions(), {})


@pytest.mark.parametrize(
    ("overrides", "cluster", "said"),
    [
        (["checkpoint=null"], "local", "checkpoint is missing, and without checkpoints nothing is resumed"),
        (
            ["checkpoint.save_every=null", "checkpoint.save_args=[]"],
            "local",
            "checkpoint.save_every is missing, so that nobody knows between which saves to interrupt",
        ),
        (["steps=4"], "local", "the first save, after step 3 of 4, leaves nothing to resume"),
        (["interrupt={kind: requeue, at_step: 5}"], "local", "interrupt.kind: requeue needs Slurm"),
        (["interrupt={kind: timeout}"], "local", "interrupt.kind: timeout needs Slurm"),
        (
            ["interrupt={kind: node-failure, at_step: 5}"],
            "slurm",
            "interrupt.kind: failing a node needs an administrator",
        ),
        (["interrupt={kind: stop, at_step: 10}"], "local", "stop at the last step is the program's ordinary end"),
        (["interrupt={kind: kill, at_step: 3}"], "local", "3 leaves nothing to resume from: the first save is that of"),
        (["interrupt={kind: kill-during-save, at_step: 10}"], "local", "no save follows step 10"),
        (["interrupt={kind: kill, at_step: 11}"], "local", "11 is after the last step"),
        (["interrupt={kind: kill, at_step: 5, ranks: 2}"], "local", "there is no rank 2"),
        (
            ["interrupt=[{kind: kill, at_step: 5}, {kind: kill, at_step: 2}]"],
            "local",
            "interrupt.1.at_step: 2 is behind this attempt when it begins: it goes on from the save of step 3",
        ),
        (["checkpoint.pattern=../{step}"], "local", "leads out of checkpoint.directory"),
        (["checkpoint.directory=/shared/checkpoints"], "local", "/shared/checkpoints is the same for every arm"),
        (["arms.c.args=[x]"], "local", "arms.c: a resume check has the arms a (undisturbed) and b (interrupted)"),
    ],
)
def test_what_cannot_be_is_said_first(tmp_path: Path, overrides: list[str], cluster: str, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        plan(plain_recipe(tmp_path), overrides, cluster)
    assert said in caught.value.render()


@pytest.mark.parametrize(
    ("save_every", "steps", "step"), [(10, 30, 14), (3, 10, 4), (1, 10, 2), (10, 12, 11), (5, 100, 7)]
)
def test_without_a_word_it_is_killed_between_the_first_two_saves(
    tmp_path: Path, save_every: int, steps: int, step: int
) -> None:
    loaded = load_recipe(plain_recipe(tmp_path), [f"checkpoint.save_every={save_every}", f"steps={steps}"])
    (how,) = resolve_interrupts(loaded, "local")
    assert (how["kind"], how["at_step"], how["ranks"], how["moment"]) == ("kill", step, "all", "end")


@pytest.mark.parametrize("how", ["{kind: kill, at_step: 3, moment: after-save}", "{kind: stop, at_step: 3}"])
def test_right_after_the_first_save_there_is_something_to_resume(tmp_path: Path, how: str) -> None:
    assert plan(plain_recipe(tmp_path), [f"interrupt={how}"], "local").requests


def test_save_arguments_are_given_with_or_without_a_schedule(tmp_path: Path) -> None:
    keys = {"checkpoint": {**SAVES, "save_every": None, "save_args": ["--save"]}}
    path = plain_recipe(tmp_path, **keys)
    made = plan(path, ["interrupt={kind: kill, at_step: 5}"], options=ResumeOptions(observer=True))
    segments = [segment for request in made.requests for segment in request.spec.segments]
    assert [(s.arm, s.attempt, "--save" in s.argv) for s in segments] == [
        ("a", 0, True),
        ("b", 0, True),
        ("b", 1, True),
        ("c", 0, False),
    ]
    assert [s.env["DETRUN_STATE_AT"] for s in segments] == ["", "", "", "none"]


def test_state_is_captured_at_the_steps_that_the_program_is_told_to_save_at(tmp_path: Path) -> None:
    keys = {"checkpoint": {**SAVES, "save_every": None, "save_args": ["--save-at", "2", "7", "--keep", "100000"]}}
    made = plan(plain_recipe(tmp_path, **keys), ["interrupt={kind: kill, at_step: 5}"])
    assert {s.env["DETRUN_STATE_AT"] for r in made.requests for s in r.spec.segments} == {"2,7"}


def test_state_is_captured_where_a_signal_has_the_program_save(tmp_path: Path) -> None:
    made = plan(plain_recipe(tmp_path), ["interrupt={kind: signal, at_step: 5}"])
    assert {s.env["DETRUN_STATE_AT"] for r in made.requests for s in r.spec.segments} == {"3,5,6,9"}
