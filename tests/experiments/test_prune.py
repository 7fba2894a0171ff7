"""What prune takes and what it never takes, whatever lies in its way."""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from pathlib import Path

import pytest

from detrun.experiments.judge import judge
from detrun.experiments.prune import PrunePlan, PruneRules, apply_prune, plan_prune
from detrun.records.archive import Archive
from detrun.records.index_cache import CACHE
from detrun.records.jobs import ArmPlan, ExperimentFile, JobFile, Reference
from detrun.records.layout import MARKER, ExperimentFolder
from detrun.records.pruned import read_pruned
from detrun.records.verdict import Verdict
from tests.records_factory import MadeExperiment, flip_metric, make_experiment

NOW = datetime(2026, 12, 31, tzinfo=timezone.utc)
ALL = PruneRules(logs=30, keep=0)


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "archive")


def fill(folder: ExperimentFolder) -> None:
    """What an experiment may leave in every place that there is."""
    for arm in "ab":
        attempt = folder.attempt(arm, 0)
        for path in (
            folder.work_dir(arm) / "checkpoints" / "step-10" / "model.pt",
            attempt.log(0),
            attempt.trace(0),
            attempt.trace_index(0),
            attempt.kept_bytes(0),
            attempt.state("end-00000010", 0),
            attempt.state_bytes("end-00000010", 0),
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x" * 5000)


def pair(archive: Archive, number: int, *, diverged: bool = False, verdict: bool = True) -> MadeExperiment:
    made = make_experiment(archive.root, id=f"hybrid-cpu-pair-202611{number:02}T023000-{number:04x}")
    made.edit_experiment(created=f"2026-11-{number:02}T02:30:00+00:00")
    if diverged:
        made.edit("b", 1, 4, flip_metric("loss"))
    if verdict:
        judge(made.folder, report=False)
    fill(made.folder)
    return made


def gone(plan: PrunePlan, made: MadeExperiment) -> set[str]:
    """What goes of an experiment, by its paths."""
    return {item.path for each in plan.experiments if each.id == made.folder.id for item in each.candidates}


def prune(archive: Archive, rules: PruneRules = ALL) -> PrunePlan:
    return apply_prune(archive, plan_prune(archive, rules, NOW), NOW)


def of_arms(*names: str) -> set[str]:
    return {f"arms/{arm}/{name}" for arm in "ab" for name in names}


EVERYTHING = of_arms(
    "work", "attempt-0/log", "attempt-0/trace", "attempt-0/kept", "attempt-0/state/end-00000010/rank00000.bytes"
)


def test_fingerprints_stay_and_the_rest_goes(archive: Archive) -> None:
    old, last_good = pair(archive, 1), pair(archive, 2)
    before = Verdict.read(old.folder.verdict_file)
    plan = plan_prune(archive, ALL, NOW)
    assert gone(plan, old) == EVERYTHING
    assert (old.folder.work_dir("a") / "checkpoints" / "step-10" / "model.pt").exists()  # a plan removes nothing
    done = apply_prune(archive, plan, NOW)
    assert gone(done, old) == EVERYTHING
    assert done.failed == []
    assert done.bytes == plan.bytes > 0
    attempt = old.attempt("a")
    left = {path.name for path in attempt.path.iterdir()}
    assert {"job.json", "metrics", "environment", "recorder", "state"} <= left
    assert not {"log", "trace", "kept"} & left
    assert attempt.state("end-00000010", 0).exists()
    assert not old.folder.work_dir("a").exists()
    assert (last_good.folder.work_dir("a") / "checkpoints").exists()
    note = read_pruned(old.folder)
    assert note is not None
    assert {each.path for each in note.removed} == EVERYTHING
    again = judge(old.folder)
    assert (again.verdict, again.exit_code) == ("identical", 0)
    assert again.of_kind("pruned")[0].what.startswith(
        "checkpoints and outputs, logs, traces and kept bytes were pruned (2026-12-31)"
    )
    assert Verdict.read(old.folder.verdict_file) == before
    assert gone(prune(archive), old) == set()
    assert len(read_pruned(old.folder).removed) == len(EVERYTHING)  # type: ignore[union-attr]


def test_a_pruned_experiment_is_not_judged_by_what_is_left(archive: Archive) -> None:
    old = pair(archive, 1)
    pair(archive, 2)
    prune(archive)
    old.drop("b", 1, 5, 6)
    assert judge(old.folder).verdict == "identical"


def test_failures_and_the_newest_keep_all_but_old_logs(archive: Archive) -> None:
    failed = pair(archive, 1, diverged=True)
    old, new, newest = (pair(archive, day) for day in (2, 3, 20))
    plan = plan_prune(archive, PruneRules(logs=30, keep=2), NOW)
    logs = of_arms("attempt-0/log")
    assert gone(plan, failed) == logs
    assert gone(plan, old) == EVERYTHING
    assert gone(plan, new) == logs
    assert gone(plan, newest) == set()  # the last good one
    assert gone(plan_prune(archive, PruneRules(logs=365, keep=2), NOW), new) == set()


def test_without_a_verdict_or_with_a_living_job_nothing_goes(archive: Archive) -> None:
    unfinished, running = pair(archive, 1, verdict=False), pair(archive, 2)
    running.edit_job("b", state="running")
    pair(archive, 3)
    torn = pair(archive, 4)
    torn.folder.verdict_file.write_text("{")
    plan = prune(archive)
    for made in (unfinished, running, torn):
        assert gone(plan, made) == set()
    assert plan.kept["without a verdict"] == 2
    assert plan.kept["running"] == 1


def test_baselines_stay_whole(archive: Archive) -> None:
    used, marked, plain = (pair(archive, day) for day in (1, 2, 3))
    pair(archive, 4)
    marked.edit_experiment(labels={"keep": "before the upgrade"})
    judge(marked.folder, report=False)
    reference = Reference(experiment=used.folder.id, path=str(used.folder.path), arm="a")
    checked = make_experiment(archive.root, id="hybrid-cpu-resume-check-20261105T023000-0005")
    checked.edit_experiment(experiment="resume-check", reference=reference, arms=[ArmPlan(id="a", role="reference")])
    Verdict.read(used.folder.verdict_file).model_copy(
        update={"id": checked.folder.id, "experiment": "resume-check", "created": "2026-11-05T02:30:00+00:00"}
    ).write(checked.folder.verdict_file)
    plan = prune(archive)
    assert gone(plan, used) == {path for path in EVERYTHING if path.startswith("arms/b/")}  # arm a is the baseline
    assert gone(plan, marked) == set()
    assert gone(plan, plain) == EVERYTHING


def test_metrics_that_lie_in_logs_and_outputs_stay(archive: Archive) -> None:
    made = pair(archive, 1)
    pair(archive, 2)
    recipe = {**made.file.recipe, "metrics": {"source": "log"}}
    made.edit_experiment(recipe=recipe)
    assert gone(plan_prune(archive, ALL, NOW), made) == EVERYTHING - of_arms("work", "attempt-0/log")


def test_passes_are_pruned_with_their_experiment(archive: Archive) -> None:
    made = pair(archive, 1)
    pair(archive, 2)
    fill(made.folder.pass_folder(1, "operators"))
    inner = {path for path in gone(plan_prune(archive, ALL, NOW), made) if path.startswith("passes/")}
    assert inner == {f"passes/1-operators/{path}" for path in EVERYTHING}
    JobFile(arm="a", state="running").write(made.folder.pass_folder(1, "operators").attempt("a", 0).job_file)
    assert gone(plan_prune(archive, ALL, NOW), made) == set()


def test_no_link_leads_out(archive: Archive, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    for name in ("log", "work", "attempt-0/trace"):
        (outside / name).mkdir(parents=True)
        (outside / name / "precious").write_text("mine")
    made = pair(archive, 1)
    pair(archive, 2)
    work = made.folder.work_dir("a")
    (work / "data").symlink_to(outside / "work")
    (work / "checkpoints" / "best").symlink_to(outside / "work" / "precious")
    log = made.attempt("b").log_dir
    for path in log.iterdir():
        path.unlink()
    log.rmdir()
    log.symlink_to(outside / "log")
    arm = made.folder.path / "arms" / "c"
    arm.symlink_to(outside)
    plan = prune(archive)
    assert not work.exists()
    assert log.is_symlink()
    assert arm.is_symlink()
    assert plan.left == [f"{made.folder.id}/arms/b/attempt-0/log: is a symbolic link"]
    assert sorted(path.read_text() for path in outside.rglob("precious")) == ["mine"] * 3


def test_a_link_put_there_between_plan_and_removal_is_not_followed(archive: Archive, tmp_path: Path) -> None:
    made = pair(archive, 1)
    pair(archive, 2)
    outside = tmp_path / "outside"
    (outside / "attempt-0" / "trace").mkdir(parents=True)
    (outside / "attempt-0" / "trace" / "precious").write_text("mine")
    plan = plan_prune(archive, ALL, NOW)
    os.rename(made.folder.arm_dir("a"), tmp_path / "arm")  # noqa: PTH104
    made.folder.arm_dir("a").symlink_to(outside)
    done = apply_prune(archive, plan, NOW)
    assert (outside / "attempt-0" / "trace" / "precious").read_text() == "mine"
    assert any("arms/a/" in text for text in done.failed)
    assert (tmp_path / "arm" / "work").exists()


def test_only_marked_folders_are_touched(archive: Archive, tmp_path: Path) -> None:
    made, foreign = pair(archive, 1), pair(archive, 2)
    pair(archive, 3)
    (foreign.folder.path / MARKER).unlink()
    linked = tmp_path / "elsewhere"
    os.rename(made.folder.path, linked)  # noqa: PTH104
    made.folder.path.symlink_to(linked)
    plan = prune(archive)
    assert plan.experiments == []
    assert foreign.folder.work_dir("a").exists()
    assert (linked / "arms" / "a" / "work").exists()


def test_a_marker_that_went_since_the_index_was_read(archive: Archive) -> None:
    made = pair(archive, 1)
    pair(archive, 2)
    for path in archive.root.glob("*/*.json"):
        os.utime(path, (1, 1))
    plan_prune(archive, ALL, NOW)
    assert (archive.root / CACHE).exists()
    (made.folder.path / MARKER).unlink()
    plan = prune(archive)
    assert plan.experiments == []
    assert made.folder.work_dir("a").exists()


def test_what_became_a_baseline_since_the_plan_stays(archive: Archive) -> None:
    made = pair(archive, 1)
    pair(archive, 2)
    plan = plan_prune(archive, ALL, NOW)
    made.edit_job("a", state="running")
    assert apply_prune(archive, plan, NOW).bytes == 0
    assert made.folder.work_dir("a").exists()
    assert read_pruned(made.folder) is None


def test_what_cannot_be_removed_is_told_and_the_rest_goes(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    made = pair(archive, 1)
    pair(archive, 2)
    real = os.unlink

    def refuse(path: str, *, dir_fd: int | None = None) -> None:
        if path == "model.pt":
            raise PermissionError(13, "Permission denied")
        real(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", refuse)
    plan = prune(archive)
    assert [text for text in plan.failed if "model.pt: Permission denied" in text]
    assert not made.attempt("a").log_dir.exists()
    assert (made.folder.work_dir("a") / "checkpoints" / "step-10" / "model.pt").exists()
    assert judge(made.folder).verdict == "identical"


def test_the_note_is_there_before_anything_goes(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    made = pair(archive, 1)
    pair(archive, 2)

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "unlink", die)
    with pytest.raises(KeyboardInterrupt):
        prune(archive)
    monkeypatch.undo()
    assert read_pruned(made.folder) is not None
    assert judge(made.folder).verdict == "identical"
    assert json.loads((made.folder.path / "pruned.json").read_text())["schema_version"] == 1
    assert ExperimentFile.read(made.folder.experiment_file).id == made.folder.id
