"""From a resume check's folder to its verdict, with the folder spoiled: never identical by omission, never a crash."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from detrun.errors import RecordError
from detrun.experiments.judge import judge
from detrun.records.jobs import JobFile
from detrun.records.state_row import StateRow
from detrun.records.verdict import Verdict, verdict_schema
from tests.records_factory import Line, digest, flip_metric, make_experiment
from tests.resume_factory import MadeResume, altered, make_resume, tear, without

Spoil = Callable[[MadeResume], Any]
RESTORED = "begin-00000004"


def judged(made: MadeResume) -> Verdict:
    verdict = judge(made.folder, report=False, processes=1)
    jsonschema.validate(json.loads(verdict.to_json()), verdict_schema())
    return verdict


def not_verified(made: MadeResume, *says: str) -> Verdict:
    verdict = judged(made)
    assert verdict.verdict == "not-verified", verdict.findings
    for text in says:
        assert any(text in reason for reason in verdict.not_verified), verdict.not_verified
    return verdict


@pytest.fixture
def made(tmp_path: Path) -> MadeResume:
    return make_resume(tmp_path)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"stops": (5, 7)},
        {"stops": (4, 7, 8), "steps": 12},
        {"controls": ("observer", "self-test:rng")},
        {"state_every": 0},
        {"ranks": 1},
    ],
    ids=str,
)
def test_a_clean_check_is_identical(tmp_path: Path, how: dict[str, Any]) -> None:
    verdict = judged(make_resume(tmp_path, **how))
    assert (verdict.verdict, verdict.exit_code, verdict.not_verified) == ("identical", 0, [])


@pytest.mark.parametrize("component", ["optimizer", "rng", "parameters", "hyperparameters"])
def test_state_that_was_not_restored_is_named_where_nothing_else_tells(tmp_path: Path, component: str) -> None:
    made = make_resume(tmp_path, state_every=0)
    made.rewrite("b", 1, RESTORED, 1, altered(component))
    verdict = judged(made)
    assert verdict.verdict == "diverged"
    assert verdict.culprit is not None
    assert (verdict.culprit["component"], verdict.culprit["ranks"]) == (component, [1])


@pytest.mark.parametrize(("arm", "number"), [("a", 0), ("b", 1)])
def test_a_difference_counts_by_the_stricter_of_both_sides_words(tmp_path: Path, arm: str, number: int) -> None:
    made = make_resume(tmp_path, state_every=0)
    made.rewrite(arm, number, RESTORED, 0, altered("optimizer", standing="soft"))
    assert judged(made).verdict == "diverged"


# State files


def swap_ranks(path: Path) -> None:
    shutil.copy(path.with_name("rank00000.arrow"), path)


def link(path: Path) -> None:
    path.symlink_to(path.rename(path.with_suffix(".there")))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def enlarge(path: Path) -> None:
    os.truncate(path, 80 << 30)


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (Path.unlink, "is missing"),
    "empty": (lambda path: os.truncate(path, 0), "is empty"),
    "torn": (lambda path: tear(path, 9), "cannot be read"),
    "of another rank": (swap_ranks, "speaks of"),
    "a link": (link, "symbolic link"),
    "a pipe": (pipe, "not a plain file"),
    "huge": (enlarge, "too large"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "is a folder"),
}


@pytest.mark.parametrize(("arm", "number"), [("a", 0), ("b", 1)])
@pytest.mark.parametrize("how", FILES)
def test_a_state_file_that_is_not_to_be_trusted(made: MadeResume, arm: str, number: int, how: str) -> None:
    spoil, says = FILES[how]
    spoil(made.folder.attempt(arm, number).state(RESTORED, 1))
    not_verified(made, says)


@pytest.mark.parametrize(("arm", "number"), [("a", 0), ("b", 1)])
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"step": 9}, "speaks of step 9"),
        ({"scope": "light"}, "a part of it only"),
        ({"missing": ["parameters"]}, "parameters at the begin of step 4 were not captured"),
        ({"missing": ["hyperparameters"]}, "hyperparameters at the begin of step 4 were not captured"),
    ],
)
def test_a_state_file_that_describes_itself_otherwise(
    made: MadeResume, arm: str, number: int, fields: dict[str, Any], says: str
) -> None:
    made.rewrite(arm, number, RESTORED, 1, lambda rows: rows, **fields)
    not_verified(made, says)


@pytest.mark.parametrize("component", ["parameters", "optimizer", "rng"])
def test_what_both_runs_lack_is_not_equal(made: MadeResume, component: str) -> None:
    for arm, number in (("a", 0), ("b", 1)):
        for rank in (0, 1):
            made.rewrite(arm, number, RESTORED, rank, without(component))
    not_verified(made, f"the state at the begin of step 4 has no {component}")


def test_what_the_program_does_not_have_by_the_recipe_s_word_is_not_missed(tmp_path: Path) -> None:
    made = make_resume(tmp_path, state_every=0)
    made.edit_raw_experiment(recipe={**made.file.recipe, "metrics": {"absent": ["rng"], "state_every": 0}})
    for arm, number, boundary in (("a", 0, RESTORED), ("b", 1, RESTORED), ("a", 0, "end-00000003")):
        for rank in (0, 1):
            made.rewrite(arm, number, boundary, rank, without("rng"))
    assert judged(made).verdict == "identical"


@pytest.mark.parametrize("lost", ["end-00000003", "begin-00000005"])
def test_a_module_s_own_variable_of_which_nothing_tells_whether_it_was_lost(made: MadeResume, lost: str) -> None:
    def history(value: str) -> Callable[[list[StateRow]], list[StateRow]]:
        return lambda rows: [*rows, StateRow("module-state", "amax", standing="surviving", digest=digest(value))]

    for arm, number, boundary, value in (
        ("a", 0, "end-00000003", "kept"),
        ("b", 0, "end-00000003", "kept"),
        ("a", 0, RESTORED, "kept"),
        ("b", 0, RESTORED, "kept"),
        ("b", 1, RESTORED, "lost"),
        ("a", 0, "begin-00000005", "kept"),
        ("b", 1, "begin-00000005", "lost"),
    ):
        made.rewrite(arm, number, boundary, 1, history(value))
    assert judged(made).verdict == "diverged"
    for arm, number in (("a", 0), ("b", 0), ("b", 1)):
        made.folder.attempt(arm, number).state(lost, 1).unlink(missing_ok=True)
    if lost.startswith("end"):  # the begin that the interrupted run came to before it was killed tells as well
        assert judged(made).verdict == "diverged"
        made.folder.attempt("b", 0).state(RESTORED, 1).unlink()
    not_verified(made, "nothing tells whether it was lost")


# Attempts and arms


def lose(arm: str, number: int) -> Spoil:
    return lambda made: shutil.rmtree(made.folder.attempt(arm, number).path)


def copy_attempt(number: int) -> Spoil:
    return lambda made: shutil.copytree(made.folder.attempt("b", 1).path, made.folder.attempt("b", number).path)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lose("b", 0), "attempt 0 left no record at all"),
        (lose("b", 1), "attempt 1 left no record at all"),
        (lose("b", 2), "attempt 2 left no record at all"),
        (lose("c", 0), "arm c (observer) left no record at all"),
        (lose("d", 1), "arm d (self-test:rng) left no record at all"),
        (copy_attempt(7), "attempt 7, never planned"),
        (lambda made: made.folder.attempt("b", 3).path.mkdir(), "attempt 3, never planned"),
    ],
)
def test_an_attempt_or_an_arm_of_which_nothing_is_left(tmp_path: Path, spoil: Spoil, says: str) -> None:
    made = make_resume(tmp_path, stops=(5, 7), controls=("observer", "self-test:rng"))
    spoil(made)
    not_verified(made, says)


@pytest.mark.parametrize(
    ("arm", "number", "fields", "says"),
    [
        ("a", 0, {"state": "interrupted"}, "the reference has none"),
        ("a", 0, {"state": "running"}, "still running"),
        ("b", 0, {"state": "done"}, "metrics end at step"),
        ("b", 0, {"interruption": None}, "does not tell how it was interrupted"),
        ("b", 0, {"interruption": {"kind": "kill", "step": 8, "ranks": [0, 1]}}, "interrupted after step 8"),
        ("b", 1, {"state": "interrupted"}, "does not tell how it was interrupted"),
        ("b", 1, {"resumed_from": None}, "came back from step 3"),
        ("b", 1, {"resumed_from": {"path": "/x", "step": 2}}, "came back from step 3, not from step 2"),
        ("b", 1, {"resumed_from": {"path": "/x", "step": -5}}, "is not a valid job.json"),
        ("b", 1, {"resumed_from": {"path": "/x", "step": 10**18}}, "it was to go on from step"),
        ("b", 1, {"arm": "c"}, "speaks of arm c"),
        ("b", 1, {"attempt": 5}, "attempt 5"),
        ("b", 1, {"schema_version": 9}, "schema version 9"),
    ],
)
def test_a_job_that_says_otherwise(made: MadeResume, arm: str, number: int, fields: dict[str, Any], says: str) -> None:
    made.edit_raw_job(arm, number, fields)
    not_verified(made, says)


def test_a_job_that_was_cancelled_is_no_resume_that_failed(made: MadeResume) -> None:
    made.edit_raw_job("b", 0, {"state": "cancelled", "reason": "the job was cancelled", "interruption": None})
    made.edit_raw_job(
        "b",
        1,
        {"state": "cancelled", "reason": "the job was cancelled before this arm began", "resumed_from": None},
    )
    for part in ("metrics", "environment", "state"):
        shutil.rmtree(made.folder.attempt("b", 1).path / part)
    verdict = not_verified(made, "was cancelled")
    assert verdict.exit_code == 4


def test_a_job_that_claims_a_later_checkpoint_than_it_began_with(made: MadeResume) -> None:
    made.edit_raw_job("b", 1, {"resumed_from": {"path": "/x", "step": 6}})
    verdict = judged(made)
    assert verdict.verdict != "identical"
    assert any("it was to go on from step 6" in reason for reason in verdict.not_verified)


def test_a_last_attempt_that_claims_to_be_interrupted_has_to_have_all_steps(made: MadeResume) -> None:
    made.edit_raw_job("b", 1, {"state": "interrupted", "interruption": {"kind": "kill", "step": 6, "ranks": [0, 1]}})
    for rank in (0, 1):
        made.at("b", 1).drop("b", rank, 7, 8)
    not_verified(made, "metrics end at step 5 of 8")


def test_a_checkpoint_s_impossible_name_costs_nothing_but_the_look_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = make_resume(tmp_path, state_every=0)
    made.rewrite("b", 1, RESTORED, 1, altered("optimizer"))
    for path in ("/x\0y", "/x" * 5000, ".", "/dev/zero"):
        made.edit_raw_job("b", 1, {"resumed_from": {"path": path, "step": 3}})
        assert judged(made).verdict == "diverged"


# Metrics


def renumbered(by: int) -> Callable[[Line], None]:
    return lambda line: line.update(step=line["step"] + by)


@pytest.mark.parametrize(
    ("number", "dropped", "says"),
    [
        (0, (2,), "step 2 is missing"),
        (0, (3, 4, 5), "metrics end at step"),
        (1, (4,), "step 4 is missing"),
        (1, (5,), "step 5 is missing"),
        (1, (8,), "metrics end at step 7 of 8"),
        (1, (4, 5, 6, 7, 8), "is empty"),
    ],
)
def test_steps_of_an_attempt_that_are_missing(
    made: MadeResume, number: int, dropped: tuple[int, ...], says: str
) -> None:
    made.at("b", number).drop("b", 1, *dropped)
    not_verified(made, says)


@pytest.mark.parametrize("by", [1, -1, 10**15])
@pytest.mark.parametrize("number", [0, 1])
def test_renumbered_steps_are_never_taken_for_others(made: MadeResume, number: int, by: int) -> None:
    for rank in (0, 1):
        made.at("b", number).edit_every("b", rank, renumbered(by))
    assert judged(made).verdict != "identical"


def test_a_bit_after_the_restore(made: MadeResume) -> None:
    made.at("b", 1).edit("b", 1, 6, flip_metric("loss"))
    verdict = judged(made)
    assert verdict.verdict == "diverged"
    assert verdict.first_divergence is not None and verdict.first_divergence.step == 6


def test_a_bit_before_the_interruption_says_nothing_of_resuming(made: MadeResume) -> None:
    made.at("b", 0).edit("b", 1, 2, flip_metric("loss"))
    not_verified(made, "the two runs differ before anything was restored")


@pytest.mark.parametrize("number", [0, 1])
def test_other_packages_in_an_attempt(made: MadeResume, number: int) -> None:
    made.at("b", number).edit_environment("b", 1, lambda document: document["packages"].update(torch="9.9"))
    not_verified(made, "torch differs between the arms")


# The reference of another experiment


@pytest.fixture
def reused(tmp_path: Path) -> MadeResume:
    """A check whose reference is a pair's arm."""
    pair = make_resume(tmp_path / "pair")
    made = make_resume(tmp_path / "check")
    shutil.rmtree(made.folder.arm_dir("a"))
    reference = {"experiment": pair.folder.id, "path": str(pair.folder.path), "arm": "a"}
    made.edit_raw_experiment(reference=reference)
    return made


def test_a_reference_that_is_there(reused: MadeResume) -> None:
    assert judged(reused).verdict == "identical"


def test_a_reference_that_is_gone(reused: MadeResume, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "pair")
    not_verified(reused, "cannot be read: its experiment.json is missing")


def test_a_reference_that_is_another_one(reused: MadeResume, tmp_path: Path) -> None:
    other = make_experiment(tmp_path / "other", steps=8, id="other")
    reference = {"experiment": "some-pair", "path": str(other.folder.path), "arm": "a"}
    reused.edit_raw_experiment(reference=reference)
    not_verified(reused, "its records are those of other, not of some-pair")


def test_the_interrupted_arm_itself_is_no_reference(made: MadeResume) -> None:
    made.edit_raw_experiment(reference={"experiment": made.folder.id, "path": str(made.folder.path), "arm": "b"})
    verdict = judged(made)
    assert (verdict.verdict, verdict.exit_code) == ("not-verified", 4)


@pytest.mark.parametrize(
    "fields",
    [
        {"reference": {"experiment": "x", "path": "/x\0", "arm": "a"}},
        {"reference": {"experiment": "x", "path": "/x", "arm": "../x"}},
        {"arms": [{"id": "a", "role": "repeat"}, {"id": "b", "role": "interrupted"}]},
    ],
)
def test_an_experiment_that_cannot_be_one_is_said_to_be_none(made: MadeResume, fields: dict[str, Any]) -> None:
    made.edit_raw_experiment(**fields)
    with pytest.raises(RecordError):
        judged(made)


# Control arms


def test_a_self_test_that_lies_is_not_believed(tmp_path: Path) -> None:
    made = make_resume(tmp_path, controls=("self-test:rng",))
    assert judged(made).verdict == "identical"
    for rank in (0, 1):
        source = made.folder.attempt("b", 1).state(RESTORED, rank)
        shutil.copy(source, made.folder.attempt("c", 1).state(RESTORED, rank))
    not_verified(made, "this check cannot be trusted with this recipe")


def test_a_self_test_that_died_has_seen_nothing(tmp_path: Path) -> None:
    made = make_resume(tmp_path, controls=("self-test:rng",))
    shutil.rmtree(made.folder.attempt("c", 1).state_dir)
    shutil.rmtree(made.folder.attempt("c", 1).metrics_dir)
    path = made.folder.attempt("c", 1).job_file
    JobFile.model_validate({**JobFile.read(path).model_dump(), "state": "failed", "exit_code": 1}).write(path)
    assert judged(made).verdict == "not-verified"


def test_a_stage_of_a_pipeline_may_lack_a_metric_in_every_attempt(made: MadeResume) -> None:
    for arm, number in (("a", 0), ("b", 0), ("b", 1)):
        attempt = made.at(arm, number)
        attempt.edit_every(arm, 0, lambda line: line["metrics"].pop("loss"))
        for rank in (0, 1):
            attempt.edit_environment(arm, rank, lambda d, rank=rank: d.__setitem__("coordinates", {"pp": rank}))
    assert judged(made).verdict == "identical"


def test_what_an_adapter_did_not_find_in_a_resumed_attempt_forbids_identical(made: MadeResume) -> None:
    path = made.folder.attempt("b", 1).recorder(0)
    document = json.loads(path.read_text())
    document["adapters"] = [{"name": "toy", "version": None, "tried": [], "lacks": ["toy.load"]}]
    path.write_text(json.dumps(document))
    not_verified(made, "adapter toy did not find toy.load (version unknown)")
