"""The driver takes an arm through its attempts: with a trainer that plays its part, in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from detrun.launch import wrapper
from detrun.launch.attempts import start_of
from detrun.launch.command import RANK_SCRIPT
from detrun.launch.interruption import Ending, for_the_recorder, ranks_of
from detrun.launch.microbatches import microbatches_by_step
from detrun.launch.spec import CHECKPOINT, JobSpec, Segment, WatchdogLimits
from detrun.records.jobs import JobFile
from detrun.records.layout import ExperimentFolder

TRAINER = Path(__file__).with_name("fake_trainer.py")
KILL = {"kind": "kill", "at_step": 4, "moment": "end", "ranks": "all", "seed": 1}
KILLED: list[list[Any]] = [["interrupted", "kill", 4], ["kill"]]
TO_THE_END: list[list[Any]] = [["steps", 6]]


class Stage:
    """An experiment's folder with one job, on this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.place = ExperimentFolder(root)
        self.place.jobs_dir.mkdir(parents=True)
        shutil.copyfile(str(wrapper.__file__), self.place.jobs_dir / "wrapper.py")
        (self.place.jobs_dir / "rank.sh").write_text(RANK_SCRIPT)
        self.template = root / "template.pt"
        torch.save({"weight": torch.ones(3)}, self.template)

    def checkpoints(self, arm: str = "b") -> Path:
        return self.place.work_dir(arm) / "checkpoints"

    def segment(self, attempt: int, script: list[list[list[Any]]], arm: str = "b", **keys: Any) -> Segment:
        given = keys.pop("given", True)
        keys.setdefault("interrupt", KILL if attempt == 0 and len(script) > 1 else None)
        argv = [sys.executable, str(TRAINER), json.dumps(script), str(self.checkpoints(arm))]
        return Segment(
            arm=arm,
            attempt=attempt,
            argv=[*argv, "--resume", CHECKPOINT] if attempt and given else argv,
            env={
                "DETRUN_ATTEMPT": str(attempt),
                "DETRUN_ATTEMPT_DIR": str(self.place.attempt(arm, attempt).path),
                "FAKE_CHECKPOINT": str(self.template),
            },
            unset=[],
            workdir=str(self.root),
            launcher="none",
            nodes=1,
            ranks_per_node=1,
            steps=6,
            checkpoints={"directory": str(self.checkpoints(arm)), "pattern": None},
            **keys,
        )

    def spec(self, *segments: Segment, **keys: Any) -> JobSpec:
        limits = WatchdogLimits(multiple=5, at_least=20, start=20)
        return JobSpec("x-b", str(self.root), "local", "allocation", list(segments), limits, **keys)

    def run(self, *segments: Segment, **keys: Any) -> dict[tuple[str, int], JobFile]:
        path = self.spec(*segments, **keys).write()
        for arm in {segment.arm for segment in segments}:
            self.place.work_dir(arm).mkdir(parents=True, exist_ok=True)
        code = f"from detrun.launch.driver import run_job; run_job({str(path)!r})"
        subprocess.run([sys.executable, "-c", code], check=False, timeout=120)
        return {
            (segment.arm, segment.attempt): JobFile.read(self.place.attempt(segment.arm, segment.attempt).job_file)
            for segment in segments
        }

    def both(self, first: list[list[Any]], second: list[list[Any]] = TO_THE_END, **keys: Any) -> list[JobFile]:
        """Both attempts of arm b."""
        script = [first, second]
        jobs = self.run(self.segment(0, script, **keys), self.segment(1, script, **keys))
        return [jobs["b", 0], jobs["b", 1]]

    def seen(self, attempt: int, arm: str = "b") -> dict[str, Any]:
        """What the trainer was given."""
        document = json.loads((self.place.attempt(arm, attempt).path / "seen-0.json").read_text())
        assert isinstance(document, dict)
        return document


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path / "experiment")


def test_an_attempt_that_was_killed_goes_on_from_its_newest_checkpoint(stage: Stage) -> None:
    first, second = stage.both([["save", "step-1", 1], ["save", "step-2", 2], ["steps", 4], *KILLED])
    assert (first.state, first.exit_code) == ("interrupted", 137)
    assert first.interruption is not None
    assert (first.interruption.kind, first.interruption.step, first.interruption.ranks) == ("kill", 4, [0])
    assert second.state == "done"
    assert second.resumed_from is not None
    path = str(stage.checkpoints() / "step-2")
    assert (second.resumed_from.path, second.resumed_from.step, second.resumed_from.source) == (path, 2, "saves")
    seen = stage.seen(1)
    assert seen["argv"] == ["--resume", path]
    assert (seen["env"]["DETRUN_STEPS_DONE"], seen["env"]["DETRUN_MICROBATCHES_DONE"]) == ("2", "0")
    assert "DETRUN_INTERRUPT" not in seen["env"]
    assert json.loads(stage.seen(0)["env"]["DETRUN_INTERRUPT"])["directory"] == str(stage.checkpoints())


def test_no_process_of_an_attempt_is_left_when_the_next_one_starts(stage: Stage) -> None:
    stage.both([["save", "step-2", 2], ["orphan"], *KILLED], [["look-for-orphan"], *TO_THE_END])
    assert (stage.place.attempt("b", 1).path / "alone").read_text() == "True"


def test_what_a_killed_rank_leaves_hanging_is_ended(stage: Stage) -> None:
    began = time.monotonic()
    first, second = stage.both([["save", "step-2", 2], ["interrupted", "kill", 4], ["hang"]])
    assert (first.state, second.state) == ("interrupted", "done")
    assert time.monotonic() - began < 60


def test_one_that_ran_to_its_end_is_not_resumed(stage: Stage) -> None:
    first, second = stage.both([["save", "step-2", 2], *TO_THE_END])
    assert (first.state, second.state) == ("done", "cancelled")
    assert second.reason == (
        "attempt 0 was never interrupted: it ran to its last step (6); at_step 4 never came to its end"
    )
    assert not (stage.place.attempt("b", 1).path / "seen-0.json").exists()


def test_one_that_failed_by_itself_is_not_resumed(stage: Stage) -> None:
    first, second = stage.both([["save", "step-2", 2], ["steps", 3], ["exit", 3]])
    assert (first.state, second.state) == ("failed", "cancelled")
    assert second.reason == ("attempt 0 was never interrupted: it failed by itself (rank 0 exited with code 3)")


def test_one_that_ran_on_in_spite_of_its_signal_is_not_resumed(stage: Stage) -> None:
    how = {**KILL, "kind": "signal"}
    script = [[["save", "step-2", 2], ["interrupted", "signal", 4], *TO_THE_END], TO_THE_END]
    jobs = stage.run(stage.segment(0, script, interrupt=how), stage.segment(1, script))
    assert (jobs["b", 0].state, jobs["b", 1].state) == ("done", "cancelled")
    assert "ran on to its last step" in str(jobs["b", 1].reason)


def test_one_that_saved_and_left_at_a_signal_is_resumed_from_there(stage: Stage) -> None:
    how = {**KILL, "kind": "signal"}
    script = [[["steps", 4], ["interrupted", "signal", 4], ["save", "step-4", 4], ["exit", 0]], TO_THE_END]
    jobs = stage.run(stage.segment(0, script, interrupt=how), stage.segment(1, script))
    assert (jobs["b", 0].state, jobs["b", 0].exit_code) == ("interrupted", 0)
    resumed = jobs["b", 1].resumed_from
    assert resumed is not None and resumed.step == 4


@pytest.mark.parametrize(("code", "state"), [(0, "interrupted"), (1, "failed")])
def test_one_that_left_by_itself_at_its_step_was_stopped_unless_it_failed_there(
    stage: Stage, code: int, state: str
) -> None:
    stop = {**KILL, "kind": "stop"}
    leaves = [["save", "step-4", 4], ["steps", 4], ["interrupted", "stop", 4, {"left_by_itself": True}], ["exit", code]]
    script = [leaves, TO_THE_END]
    ran = stage.run(stage.segment(0, script, interrupt=stop), stage.segment(1, script))
    assert ran["b", 0].state == state
    assert ran["b", 1].state == ("done" if code == 0 else "cancelled")


def test_a_save_that_was_cut_short_never_counts_however_whole_it_looks(stage: Stage) -> None:
    _, second = stage.both([["save", "step-2", 2], ["cut-save", "step-4", 4], *KILLED])
    assert second.resumed_from is not None
    assert second.resumed_from.step == 2
    (rejected,) = second.resumed_from.rejected
    assert rejected.path.endswith("step-4")
    assert rejected.why == "its save was cut short on rank 0"


def test_without_a_complete_checkpoint_nothing_is_started_and_what_is_there_is_named(stage: Stage) -> None:
    first, second = stage.both([["cut-save", "step-2", 2], *KILLED])
    assert (first.state, second.state) == ("interrupted", "cancelled")
    assert "nothing to resume from: there is no complete checkpoint" in str(second.reason)
    assert "step-2: its save was cut short on rank 0" in str(second.reason)
    assert "FileNotFound" not in str(second.reason)


def test_a_checkpoint_directory_that_is_not_there_is_named(stage: Stage) -> None:
    _, second = stage.both(KILLED)
    assert second.reason == (
        f"nothing to resume from: there is no checkpoint: {stage.checkpoints()} does not exist (checkpoint.directory)"
    )


def test_a_program_that_saves_somewhere_else_is_told_where(stage: Stage, tmp_path: Path) -> None:
    _, second = stage.both([["save", "../elsewhere", 2], *KILLED])
    assert "has none (checkpoint.directory); the last save went to " in str(second.reason)
    assert str(second.reason).endswith("/elsewhere")


def test_a_rank_that_is_named_twice_is_one_rank(stage: Stage) -> None:
    segment = stage.segment(0, [], interrupt={**KILL, "ranks": [0, 0]})
    assert ranks_of(segment) == [0]


def test_the_position_is_that_of_the_save_whatever_the_name_says(stage: Stage) -> None:
    """Names that count from 0, given after the save; and one in the middle of an accumulation."""
    _, second = stage.both([["save", "ckpt-1", 2, ".tmp-1"], *KILLED])
    assert second.resumed_from is not None
    assert (second.resumed_from.step, second.resumed_from.source) == (2, "saves")
    assert stage.seen(1)["env"]["DETRUN_STEPS_DONE"] == "2"


def test_the_middle_of_an_accumulation_is_a_position_too(stage: Stage) -> None:
    _, second = stage.both([["save", "ckpt-5", 2, None, 1], *KILLED])
    assert second.resumed_from is not None
    assert (second.resumed_from.step, second.resumed_from.microbatch) == (2, 1)
    assert stage.seen(1)["env"]["DETRUN_MICROBATCHES_DONE"] == "1"


def test_where_no_save_was_seen_the_name_tells_the_step(stage: Stage) -> None:
    script = [KILLED, TO_THE_END]
    (stage.checkpoints() / "step-2").mkdir(parents=True)
    shutil.copyfile(stage.template, stage.checkpoints() / "step-2" / "rank0.pt")
    jobs = stage.run(stage.segment(0, script), stage.segment(1, script))
    resumed = jobs["b", 1].resumed_from
    assert resumed is not None and (resumed.step, resumed.source) == (2, "pattern")


def test_a_program_that_looks_for_itself_is_assumed_to_find_the_newest(stage: Stage) -> None:
    _, second = stage.both([["save", "step-2", 2], *KILLED], given=False)
    assert second.resumed_from is not None and second.resumed_from.step == 2
    assert stage.seen(1)["argv"] == []
    assert stage.seen(1)["env"]["DETRUN_STEPS_DONE"] == "2"


def test_one_that_finds_nothing_begins_anew(stage: Stage) -> None:
    _, second = stage.both(KILLED, given=False)
    assert second.resumed_from is not None
    assert (second.resumed_from.path, second.resumed_from.step, second.resumed_from.source) == (None, 0, "none")
    assert second.state == "done"


def test_several_interruptions_one_after_the_other(stage: Stage) -> None:
    script = [
        [["save", "step-2", 2], *KILLED],
        [["save", "step-4", 4], ["interrupted", "kill", 5], ["kill"]],
        TO_THE_END,
    ]
    jobs = stage.run(*(stage.segment(n, script, interrupt=KILL if n < 2 else None) for n in range(3)))
    assert [jobs["b", n].state for n in range(3)] == ["interrupted", "interrupted", "done"]
    assert [job.resumed_from.step for job in jobs.values() if job.resumed_from] == [2, 4]


def test_a_control_arm_starts_where_the_interrupted_one_did_not_at_what_it_saved_since(stage: Stage) -> None:
    script = [[["save", "step-2", 2], *KILLED], [["save", "step-6", 6], *TO_THE_END]]
    control = stage.segment(1, script, arm="c", continues="b", interrupt=None)
    looking = stage.segment(1, [[], TO_THE_END], arm="d", continues="b", interrupt=None, given=False)
    jobs = stage.run(stage.segment(0, script), stage.segment(1, script), control, looking)
    assert stage.seen(1, "c")["argv"] == ["--resume", str(stage.checkpoints() / "step-2")]
    assert [path.name for path in stage.checkpoints("d").iterdir()] == ["step-2"]
    assert jobs["d", 1].resumed_from is not None and jobs["d", 1].resumed_from.step == 2


def test_a_control_arm_is_not_started_where_the_interrupted_one_was_not_resumed(stage: Stage) -> None:
    script = [TO_THE_END, TO_THE_END]
    control = stage.segment(1, script, arm="c", continues="b", interrupt=None)
    jobs = stage.run(stage.segment(0, script), stage.segment(1, script), control)
    assert jobs["c", 1].state == "cancelled"
    assert str(jobs["c", 1].reason).startswith("attempt 0 of arm b was never interrupted")


def test_a_job_that_the_scheduler_started_again_goes_on_with_the_next_attempt(stage: Stage) -> None:
    how = {**KILL, "kind": "requeue"}
    script: list[list[list[Any]]] = [[], TO_THE_END]
    attempt = stage.place.attempt("b", 0)
    JobFile(arm="b", jobs=["7"], state="running", started="x").write(attempt.job_file)
    attempt.interrupt_dir.mkdir()
    attempt.interrupt(0).write_text(json.dumps({"kind": "hold", "step": 4, "microbatch": 0, "moment": "end"}))
    shutil.copytree(attempt.path, stage.root / "kept")
    (stage.checkpoints() / "step-4").mkdir(parents=True)
    shutil.copyfile(stage.template, stage.checkpoints() / "step-4" / "rank0.pt")
    jobs = stage.run(stage.segment(0, script, interrupt=how), stage.segment(1, script))
    assert not (attempt.path / "seen-0.json").exists()
    assert jobs["b", 0].state == "interrupted" and jobs["b", 0].interruption is not None
    assert (jobs["b", 0].interruption.kind, jobs["b", 0].interruption.step) == ("requeue", 4)
    assert jobs["b", 1].state == "done"


def test_a_job_that_was_started_again_unasked_ends_there(stage: Stage) -> None:
    script = [[], TO_THE_END]
    JobFile(arm="b", jobs=["7"], state="running", started="x").write(stage.place.attempt("b", 0).job_file)
    jobs = stage.run(stage.segment(0, script), stage.segment(1, script))
    assert (jobs["b", 0].state, jobs["b", 1].state) == ("failed", "cancelled")
    assert "started again by the scheduler" in str(jobs["b", 0].reason)


@pytest.mark.parametrize(("kind", "state"), [("timeout", "interrupted"), ("kill", "failed")])
def test_an_attempt_whose_driver_was_killed_with_it_is_closed_by_the_next_job(
    stage: Stage, kind: str, state: str
) -> None:
    script: list[list[list[Any]]] = [[], TO_THE_END]
    first = stage.segment(0, script, interrupt={"kind": kind, "at_step": None})
    replace(stage.spec(first), job="x-earlier").write()
    attempt = stage.place.attempt("b", 0)
    JobFile(arm="b", jobs=["7"], state="running", started="x").write(attempt.job_file)
    (stage.checkpoints() / "step-4").mkdir(parents=True)
    shutil.copyfile(stage.template, stage.checkpoints() / "step-4" / "rank0.pt")
    jobs = stage.run(stage.segment(1, script))
    assert JobFile.read(attempt.job_file).state == state
    assert jobs["b", 1].state == ("done" if state == "interrupted" else "cancelled")


def finished(stage: Stage, microbatches: list[int]) -> str:
    attempt = stage.place.attempt("a", 0)
    JobFile(arm="a", state="done", exit_code=0).write(attempt.job_file)
    attempt.metrics_dir.mkdir()
    lines = [{"v": 1, "step": n, "metrics": {}, "microbatches": count} for n, count in enumerate(microbatches, 1)]
    attempt.metrics(0).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(attempt.path)


def test_a_recipe_that_counts_micro_batches_is_interrupted_by_their_number(stage: Stage) -> None:
    reference = finished(stage, [2, 2, 2])
    assert microbatches_by_step(stage.place.attempt("a", 0), 1, 6) == [0, 2, 4, 6]
    script = [KILLED, TO_THE_END]
    asked = start_of(stage.spec(reference=reference), stage.segment(0, script)).env["DETRUN_INTERRUPT"]
    assert json.loads(asked)["at_microbatch"] == 4


@pytest.mark.parametrize("microbatches", [[1] * 6, [2, 2], [2, 2, 3], [6] * 6])
def test_any_other_is_interrupted_by_its_steps(stage: Stage, microbatches: list[int]) -> None:
    reference = finished(stage, microbatches)
    asked = start_of(stage.spec(reference=reference), stage.segment(0, [KILLED, TO_THE_END])).env["DETRUN_INTERRUPT"]
    assert json.loads(asked)["at_microbatch"] is None


def test_which_ranks_are_hit(stage: Stage) -> None:
    two_nodes = replace(stage.segment(0, [[], []]), nodes=2, ranks_per_node=2)
    for how, ranks in (
        ({}, [0, 1, 2, 3]),
        ({"ranks": 3}, [3]),
        ({"ranks": [2, 1]}, [1, 2]),
        ({"node": 1}, [2, 3]),
        ({"node": 1, "kind": "node-failure"}, [0, 1, 2, 3]),
    ):
        assert ranks_of(replace(two_nodes, interrupt={**KILL, **how})) == ranks
    asked = for_the_recorder(replace(two_nodes, interrupt={**KILL, "kind": "requeue"}), None)
    assert asked is not None and (asked["kind"], asked["ranks"]) == ("hold", "all")
    assert for_the_recorder(replace(two_nodes, interrupt={"kind": "timeout", "at_step": None}), None) is None


def test_the_rest_of_a_step_is_ended_once_all_its_ranks_are_killed_or_long_after_the_first(stage: Stage) -> None:
    segment = replace(stage.segment(0, [[], []]), ranks_per_node=2)
    folder = stage.place.attempt("b", 0)
    folder.interrupt_dir.mkdir(parents=True)
    ending = Ending(segment, folder)
    assert ending.look(0.0) is None and not ending.began
    folder.interrupt(0).touch()
    assert ending.look(1.0) is None and ending.began
    assert ending.look(5.0) is None
    folder.interrupt(1).touch()
    assert ending.look(6.0) is None
    assert ending.look(8.1) == "end"
    late = Ending(segment, folder)
    folder.interrupt(1).unlink()
    assert [late.look(when) for when in (0.0, 7.0, 8.0, 10.0)] == [None, None, None, "end"]


def test_the_scheduler_is_asked_once_all_ranks_are_held(stage: Stage) -> None:
    segment = stage.segment(0, [[], []], interrupt={**KILL, "kind": "requeue"})
    folder = stage.place.attempt("b", 0)
    folder.interrupt_dir.mkdir(parents=True)
    ending = Ending(segment, folder)
    assert ending.look(0.0) is None
    folder.interrupt(0).touch()
    assert [ending.look(1.0), ending.look(2.0), ending.look(60.0)] == ["ask", None, None]


def test_an_interruption_that_the_scheduler_refuses_ends_the_attempt_with_its_words(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 'Access/permission denied' >&2\nexit 1\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), os.environ["PATH"]]))
    script = [[["interrupted", "hold", 4], ["hang"]], TO_THE_END]
    jobs = stage.run(stage.segment(0, script, interrupt={**KILL, "kind": "requeue"}), stage.segment(1, script))
    assert jobs["b", 0].state == "failed"
    assert "it could not be interrupted: scontrol exited with code 1: Access/permission denied" in str(
        jobs["b", 0].reason
    )
    assert jobs["b", 1].state == "cancelled"
