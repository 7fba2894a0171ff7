"""From an experiment's folder to its verdict: what must be found, and what must never be called identical."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from detrun.errors import RecordError
from detrun.experiments.judge import judge
from detrun.records.jobs import JobFile
from detrun.records.metrics_writer import MetricValue, encode_supplement
from detrun.records.verdict import Verdict, verdict_schema
from tests.records_factory import (
    METRICS,
    Line,
    MadeExperiment,
    digest,
    flip_metric,
    flip_state,
    flip_stream,
    float32_bits,
    make_experiment,
)


def judged(made: MadeExperiment) -> Verdict:
    verdict = judge(made.folder, report=False)
    jsonschema.validate(json.loads(verdict.to_json()), verdict_schema())
    assert Verdict.read(made.folder.verdict_file) == verdict
    return verdict


def not_verified(made: MadeExperiment, *says: str) -> Verdict:
    verdict = judged(made)
    assert (verdict.verdict, verdict.exit_code) == ("not-verified", 3), verdict.not_verified
    for text in says:
        assert any(text in reason for reason in verdict.not_verified), verdict.not_verified
    return verdict


def diverged(made: MadeExperiment, step: int, stream: str, ranks: list[int]) -> Verdict:
    verdict = judged(made)
    assert (verdict.verdict, verdict.exit_code) == ("diverged", 1), verdict.not_verified
    first = verdict.first_divergence
    assert first is not None
    assert (first.step, first.stream, first.ranks) == (step, stream, ranks)
    return verdict


@pytest.fixture
def made(tmp_path: Path) -> MadeExperiment:
    return make_experiment(tmp_path)


def test_a_clean_pair_is_identical(made: MadeExperiment) -> None:
    verdict = judged(made)
    assert (verdict.verdict, verdict.exit_code) == ("identical", 0)
    assert verdict.not_verified == []
    assert verdict.figures["divergence_chance_bound"].value == pytest.approx(0.95)
    assert verdict.arms[1].attempts[0].last_step == 6
    assert not verdict.of_severity("divergence", "infrastructure", "not-verified", "warning")


# What must be found, and where


@pytest.mark.parametrize("name", METRICS)
def test_one_bit_of_a_metric(made: MadeExperiment, name: str) -> None:
    made.edit("b", 1, 4, flip_metric(name))
    verdict = diverged(made, 4, name, [1])
    first = verdict.first_divergence
    assert first and list(first.metrics) == [name]
    difference = first.metrics[name]
    assert difference.ulp == 1
    assert int(difference.a.bits, 16) ^ int(difference.b.bits, 16) == 1
    assert difference.relative and difference.relative < 1e-6


@pytest.mark.parametrize("component", ["parameters", "gradients", "optimizer"])
def test_a_difference_only_in_state_says_that_metrics_do_not_show_it(made: MadeExperiment, component: str) -> None:
    made.edit("b", 0, 3, flip_state(component))
    verdict = diverged(made, 3, component, [0])
    assert verdict.of_kind("invisible")[0].what == "invisible in the metrics: equal in all 6 steps compared"
    assert verdict.of_kind("agrees-later")[0].evidence == {"agree": 3, "later": 3}


@pytest.mark.parametrize(("stream", "label"), [("batch", "batch"), ("rng", "RNG")])
def test_batches_and_rng_streams(made: MadeExperiment, stream: str, label: str) -> None:
    made.edit("b", 1, 6, flip_stream(stream))
    verdict = diverged(made, 6, label, [1])
    assert bool(verdict.of_kind("input-data")) == (stream == "batch")


def test_within_a_step_the_cause_comes_first(made: MadeExperiment) -> None:
    for change in (flip_metric("loss"), flip_state("optimizer"), flip_state("parameters"), flip_state("gradients")):
        made.edit("b", 0, 2, change)
    made.edit("b", 1, 2, flip_state("parameters"))
    verdict = diverged(made, 2, "gradients", [0])
    assert verdict.first_divergence
    assert [item.component for item in verdict.first_divergence.state] == ["gradients", "parameters", "optimizer"]
    made.edit("b", 1, 2, flip_stream("batch"))
    diverged(made, 2, "batch", [1])


def test_the_growth_of_a_difference_is_told(made: MadeExperiment) -> None:
    for step, bit in [(2, 1), (3, 2), (4, 8), (6, 4)]:
        made.edit("b", 0, step, flip_metric("loss", bit))
    finding = diverged(made, 2, "loss", [0]).of_kind("metric")[0]
    assert finding.evidence["later_ulp"]["steps"] == 3
    assert finding.evidence["later_ulp"]["max"] == 8
    assert [step for step, _ in finding.evidence["ulp_by_step"]] == [2, 3, 4, 6]
    assert finding.evidence["later_steps_equal"] == 1


def test_what_a_log_would_have_shown(made: MadeExperiment) -> None:
    made.edit("b", 0, 3, flip_metric("loss", 1))
    made.edit("b", 0, 5, flip_metric("loss", 1 << 12))
    finding = diverged(made, 3, "loss", [0]).of_kind("metric")[0]
    assert finding.evidence["equal_to_decimals"] == 6
    assert finding.evidence["visible_with_decimals"] == {"4": 5, "6": 5}


def test_nan_equals_the_same_nan_and_zeros_have_signs(made: MadeExperiment) -> None:
    def put(bits: str, value: object) -> Any:
        return lambda line: line["metrics"].__setitem__(
            "loss", {"bits": bits, "dtype": "float32", "value": value, "source": "backward"}
        )

    for arm in "ab":
        made.edit(arm, 0, 2, put("0x7fc00000", "nan"))
        made.edit(arm, 0, 3, put("0x80000000", -0.0))
    assert judged(made).verdict == "identical"
    made.edit("b", 0, 3, put("0x00000000", 0.0))
    verdict = diverged(made, 3, "loss", [0])
    assert verdict.first_divergence and verdict.first_divergence.metrics["loss"].relative == 0.0
    made.edit("b", 0, 2, put("0x7fc00001", "nan"))
    verdict = diverged(made, 2, "loss", [0])
    assert verdict.first_divergence and verdict.first_divergence.metrics["loss"].ulp is None


def test_another_dtype_is_a_difference(made: MadeExperiment) -> None:
    def widen(line: dict[str, Any]) -> None:
        line["metrics"]["loss"] |= {"dtype": "float64", "bits": "0x4012cccccccccccd"}

    made.edit("b", 0, 2, widen)
    assert "as float32 in arm a and float64 in arm b" in diverged(made, 2, "loss", [0]).of_kind("metric")[0].what


def test_skipped_steps_and_micro_batches_are_compared(made: MadeExperiment) -> None:
    made.edit("b", 0, 4, lambda line: line.__setitem__("skipped", True))
    diverged(made, 4, "skipped", [0])
    made.edit("b", 0, 2, lambda line: line.__setitem__("microbatches", 2))
    diverged(made, 2, "micro-batches", [0])


def test_parameters_that_differ_before_the_first_step(made: MadeExperiment) -> None:
    made.edit_environment("b", 1, lambda d: d["initial"].__setitem__("parameters", digest("other")))
    made.edit("b", 1, 1, flip_state("parameters"))
    verdict = diverged(made, 1, "parameters", [1])
    assert verdict.first_divergence and verdict.first_divergence.boundary == "begin"
    what = "the parameters already differ before the first step (rank 1)"
    assert verdict.of_severity("divergence")[0].what == what


def test_an_rng_stream_that_differs_before_the_first_step_has_its_name(made: MadeExperiment) -> None:
    made.edit_environment("b", 0, lambda d: d["initial"]["rng"].__setitem__("numpy", digest("other")))
    diverged(made, 1, "rng.numpy", [0])


def test_ignored_metrics_may_differ(made: MadeExperiment) -> None:
    made.edit("b", 0, 4, flip_metric("loss"))
    rules = made.file.recipe["metrics"]
    made.edit_experiment(recipe={**made.file.recipe, "metrics": {**rules, "ignore": ["loss"]}})
    verdict = judged(made)
    assert verdict.verdict == "identical"
    assert verdict.of_kind("coverage")[0].evidence["ignored"] == ["loss"]


def test_repeats_are_each_held_against_the_first_arm(tmp_path: Path) -> None:
    made = make_experiment(tmp_path, arms=("a", "b", "c", "d"))
    assert judged(made).figures["divergence_chance_bound"].value == pytest.approx(1 - 0.05 ** (1 / 3))
    made.edit("c", 0, 5, flip_metric("loss"))
    made.edit("d", 1, 3, flip_state("gradients"))
    verdict = diverged(made, 3, "gradients", [1])
    assert verdict.first_divergence and verdict.first_divergence.arms == ["a", "d"]
    assert verdict.figures["pairs_diverged"].value == 2


# What must never be called identical


def test_a_line_cut_off(made: MadeExperiment) -> None:
    size = made.metrics_path("b", 1).stat().st_size
    made.cut("b", 1, size - 100)
    not_verified(made, "arm b, rank 1: metrics end at step 5 of 6 (line 6 is cut off)")


def test_a_cut_behind_the_last_line_counts_too(made: MadeExperiment) -> None:
    path = made.metrics_path("b", 1)
    path.write_bytes(path.read_bytes() + b'{"v":1,"st')
    not_verified(made, "arm b, rank 1: line 7 is cut off")


def test_garbage_in_place_of_a_line(made: MadeExperiment) -> None:
    lines = made.metrics_path("a", 0).read_bytes().splitlines(keepends=True)
    made.metrics_path("a", 0).write_bytes(b"".join([*lines[:3], b"\x00\xffgarbage\n", *lines[4:]]))
    not_verified(made, "arm a, rank 0: step 4 is missing (line 4 is not valid JSON")


def test_a_missing_file(made: MadeExperiment) -> None:
    made.metrics_path("b", 1).unlink()
    not_verified(made, "arm b, rank 1: the metrics file is missing")


def test_a_missing_arm(made: MadeExperiment) -> None:
    shutil.rmtree(made.folder.arm_dir("b"))
    verdict = not_verified(made, "arm b, every rank: the metrics file is missing", "arm b: arms/b/attempt-0/job.json")
    assert verdict.of_kind("nothing-compared")


def test_missing_steps_in_the_middle_and_at_the_end(made: MadeExperiment) -> None:
    made.drop("b", 0, 2)
    made.drop("b", 1, 2, 3, 6)
    not_verified(
        made,
        "arm b, rank 0: step 2 is missing",
        "arm b, rank 1: steps 2-3 are missing",
        "arm b, rank 1: metrics end at step 5 of 6 though it ended with exit code 0",
    )


def test_both_arms_short_alike(made: MadeExperiment) -> None:
    for arm in "ab":
        for rank in (0, 1):
            made.drop(arm, rank, 5, 6)
    not_verified(made, "both arms, every rank: metrics end at step 4 of 6 though it ended with exit code 0")


def test_steps_twice_and_out_of_order(made: MadeExperiment) -> None:
    lines = made.lines("b", 0)
    made.write_lines("b", 0, [*lines[:3], lines[2], *lines[3:]])
    not_verified(made, "arm b, rank 0: line 4 repeats step 3")
    made.write_lines("b", 0, [lines[0], lines[2], lines[1], *lines[3:]])
    not_verified(made, "arm b, rank 0: line 3 holds step 2 after step 3")


def test_more_steps_than_asked_for(made: MadeExperiment) -> None:
    made.edit_experiment(steps=5)
    not_verified(made, "both arms, every rank: metrics go on to step 6, 5 steps were asked for")


def test_more_ranks_than_asked_for(made: MadeExperiment) -> None:
    shutil.copy(made.metrics_path("b", 1), made.metrics_path("b", 2))
    not_verified(made, "arm b, rank 2: metrics of a rank beyond the 2 asked for")


def test_another_world_size(made: MadeExperiment) -> None:
    made.edit_environment("b", 0, lambda document: document.__setitem__("world_size", 4))
    not_verified(made, "arm b, rank 0: ran with 4 ranks, 2 were asked for", "world_size differs between the arms")


def test_another_schema_version(made: MadeExperiment) -> None:
    made.edit_every("b", 0, lambda line: line.__setitem__("v", 2))
    not_verified(made, "arm b, rank 0: line 1 has schema version 2, this detrun reads 1")


def test_a_required_metric_that_both_arms_lack_names_the_recipes_line(made: MadeExperiment) -> None:
    for arm in "ab":
        for rank in (0, 1):
            made.edit_every(arm, rank, lambda line: line["metrics"].pop("load_balancing_loss"))
    wanted = "both arms, every rank: load_balancing_loss is missing (required by the recipe, line 14; recorded were "
    wanted += "loss, lm_loss, mtp_loss, grad_norm)"
    assert wanted in not_verified(made).not_verified


def test_a_metric_in_one_arm_only(tmp_path: Path) -> None:
    made = make_experiment(tmp_path, required=("loss",))
    made.edit_every("b", 1, lambda line: line["metrics"].pop("mtp_loss"))
    verdict = not_verified(made)
    assert verdict.not_verified == ["arm b, rank 1: mtp_loss is missing in every step, arm a has it"]


def test_a_metric_missing_in_one_step(made: MadeExperiment) -> None:
    made.edit("a", 0, 3, lambda line: line["metrics"].pop("loss"))
    wanted = "arm a, rank 0: loss is missing at step 3 (required by the recipe, line 14)"
    assert not_verified(made).not_verified == [wanted]


@pytest.mark.parametrize("component", ["parameters", "gradients", "optimizer"])
@pytest.mark.parametrize("arms", ["b", "ab"])
def test_state_that_was_asked_for_and_is_not_there(made: MadeExperiment, component: str, arms: str) -> None:
    for arm in arms:
        made.edit_every(arm, 0, lambda line: line["state"].pop(component))
    not_verified(made, "missing in every step (metrics.state_every is 1)")


@pytest.mark.parametrize("stream", ["batch", "rng", "state"])
@pytest.mark.parametrize("arms", ["b", "ab"])
def test_streams_that_are_not_there(made: MadeExperiment, stream: str, arms: str) -> None:
    for arm in arms:
        made.edit_every(arm, 0, lambda line: line.pop(stream))
    not_verified(made, "missing in every step")


def test_state_is_asked_for_only_every_so_many_steps(tmp_path: Path) -> None:
    made = make_experiment(tmp_path, state_every=3)
    assert judged(made).verdict == "identical"
    made.edit("b", 0, 6, lambda line: line.pop("state"))
    not_verified(made, "arm b, rank 0: parameters are missing at step 6 (metrics.state_every is 3)")


def test_a_program_without_batches_may_say_so(made: MadeExperiment) -> None:
    for arm in "ab":
        for rank in (0, 1):
            made.edit_every(arm, rank, lambda line: line.pop("batch"))
    rules = made.file.recipe["metrics"]
    made.edit_experiment(recipe={**made.file.recipe, "metrics": {**rules, "absent": ["batch"]}})
    verdict = judged(made)
    assert verdict.verdict == "identical"
    assert not verdict.of_severity("warning")
    assert verdict.of_kind("coverage")[0].evidence["batch"] is False


def test_a_last_step_of_which_only_supplements_are_there_is_not_a_step(made: MadeExperiment) -> None:
    rules = made.file.recipe["metrics"]
    changed = {**rules, "required": ["loss"], "state_every": 0, "absent": ["batch"]}
    made.edit_experiment(recipe={**made.file.recipe, "metrics": changed})
    for arm in "ab":
        for rank in (0, 1):
            for step in range(1, 7):
                made.edit(arm, rank, step, lambda line: [line.pop(key) for key in ("batch", "state", "rng")])
            made.edit(arm, rank, 6, lambda line: line.pop("microbatches"))
    not_verified(made, "both arms, every rank: step 6 was not finished")


def test_a_metric_that_should_not_exist_is_a_warning(made: MadeExperiment) -> None:
    rules = made.file.recipe["metrics"]
    changed = {**rules, "required": ["loss"], "absent": ["mtp_loss"]}
    made.edit_experiment(recipe={**made.file.recipe, "metrics": changed})
    verdict = judged(made)
    assert verdict.verdict == "identical"
    wanted = [f"arm {arm}, every rank: mtp_loss was recorded; metrics.absent denies it" for arm in "ab"]
    assert [finding.what for finding in verdict.of_severity("warning")] == wanted


def test_digests_of_different_algorithms(made: MadeExperiment) -> None:
    def other(line: dict[str, Any]) -> None:
        line["state"]["parameters"] = line["state"]["parameters"].replace("xxh3:", "blake2b:")

    made.edit_every("b", 1, other)
    wanted = "rank 1: digests of parameters by different algorithms (xxh3 in arm a, blake2b in arm b)"
    not_verified(made, wanted)


def test_metrics_from_different_places(made: MadeExperiment) -> None:
    made.edit("b", 0, 2, lambda line: line["metrics"]["loss"].__setitem__("source", "record"))
    not_verified(made, "loss comes from different places (backward in arm a, record in arm b)")


def test_a_value_that_contradicts_its_bits(made: MadeExperiment) -> None:
    made.edit("b", 0, 2, lambda line: line["metrics"]["loss"].__setitem__("value", 7.0))
    not_verified(made, "loss: the same bits are given with different values")


def test_a_rank_that_was_claimed_twice(made: MadeExperiment) -> None:
    (made.attempt("b").metrics_dir / "rank00001.conflict-4711").write_text("process 4711 also ran as rank 1\n")
    not_verified(made, "arm b, rank 1: another process claimed the same rank (metrics/rank00001.conflict-4711)")


def test_a_helper_that_trained_as_its_rank_is_told_and_changes_nothing(made: MadeExperiment) -> None:
    for arm in "ab":
        (made.attempt(arm).recorder(1).parent / f"rank00001.helper-{ord(arm)}").write_text("process 4711\n")
    verdict = judged(made)
    assert verdict.verdict == "identical"
    assert [f.severity for f in verdict.findings if "a process that the rank started trained too" in f.what] == [
        "warning",
        "warning",
    ]


@pytest.mark.parametrize("what", ["symlink", "folder", "fifo"])
def test_what_is_no_plain_file(made: MadeExperiment, what: str) -> None:
    path = made.metrics_path("b", 0)
    if what == "symlink":
        path.rename(path.with_name(".moved"))
        path.symlink_to(".moved")
    else:
        path.unlink()
        (os.mkfifo if what == "fifo" else Path.mkdir)(path)
    not_verified(made, "arm b, rank 0: the metrics file is")


def test_a_folder_that_is_a_link_to_the_other_arms(made: MadeExperiment) -> None:
    folder = made.attempt("b").metrics_dir
    shutil.rmtree(folder)
    folder.symlink_to(made.attempt("a").metrics_dir)
    not_verified(made, "arm b: metrics is a symbolic link, which no record is")


def test_environments_that_are_missing_or_unreadable(made: MadeExperiment) -> None:
    made.attempt("b").environment(0).unlink()
    made.attempt("b").environment(1).write_bytes(b"{\x00")
    not_verified(
        made,
        "arm b, rank 0: the environment file is missing",
        "arm b, rank 1: the environment file is not valid JSON",
    )


@pytest.mark.parametrize(
    ("section", "key", "value", "says"),
    [
        ("torch", "num_threads", 2, "torch.num_threads differs between the arms, undeclared (rank 1): 1 in arm a, 2"),
        ("packages", "numpy", "1.26", "numpy differs between the arms"),
        ("cpu", "model", "Model Y", "cpu.model differs"),
        ("seeds", "torch_initial_seed", 1, "seeds.torch_initial_seed differs"),
    ],
)
def test_settings_that_matter_and_were_not_declared(
    made: MadeExperiment, section: str, key: str, value: object, says: str
) -> None:
    made.edit_environment("b", 1, lambda document: document[section].__setitem__(key, value))
    not_verified(made, says)


def test_a_divergence_wins_over_everything_that_is_missing(made: MadeExperiment) -> None:
    made.edit("b", 0, 2, flip_state("gradients"))
    made.metrics_path("b", 1).unlink()
    made.drop("b", 0, 5, 6)
    made.edit_job("b", state="failed", exit_code=1)
    verdict = diverged(made, 2, "gradients", [0])
    assert verdict.not_verified


# Jobs


@pytest.mark.parametrize("state", ["failed", "stalled", "cancelled", "lost"])
def test_an_arm_that_died(made: MadeExperiment, state: str) -> None:
    made.drop("b", 0, 4, 5, 6)
    made.drop("b", 1, 4, 5, 6)
    made.edit_job(
        "b", state=state, exit_code=1, failed_rank=1, reason="RuntimeError", log="arms/b/log", log_tail=["boom"]
    )
    verdict = judged(made)
    assert (verdict.verdict, verdict.exit_code) == ("not-verified", 4)
    finding = verdict.of_severity("infrastructure")[0]
    assert finding.where == {"arm": "b", "attempt": 0, "rank": 1, "path": "arms/b/log"}
    assert finding.evidence["log_tail"] == ["boom"]
    assert "arm b, rank 1" in finding.what and "RuntimeError" in finding.what and "3 of 6" in finding.what


def test_an_arm_that_died_on_its_way_out_is_complete(made: MadeExperiment) -> None:
    made.edit_job("b", state="failed", exit_code=139, reason="SIGSEGV")
    verdict = judged(made)
    assert verdict.verdict == "identical"
    assert "every step recorded, then failed with exit code 139" in (verdict.arms[1].attempts[0].remark or "")
    assert verdict.of_kind("late-exit")


def test_an_arm_that_still_runs_is_not_judged(made: MadeExperiment) -> None:
    made.edit_job("b", state="running", exit_code=None)
    not_verified(made, "arm b: its job was still running when the records were read")


def test_the_last_attempt_counts(made: MadeExperiment) -> None:
    shutil.copytree(made.attempt("b").path, made.folder.attempt("b", 1).path)
    job = JobFile.read(made.folder.attempt("b", 1).job_file)
    job.attempt = 1
    job.write(made.folder.attempt("b", 1).job_file)
    made.metrics_path("b", 0).write_bytes(b"")
    verdict = judged(made)
    assert verdict.verdict == "identical"
    assert verdict.arms[1].attempts[0].n == 1


def test_a_program_that_counts_micro_batches_is_complete(tmp_path: Path) -> None:
    made = make_experiment(tmp_path, steps=18, recorded_steps=6, microbatches=3)
    verdict = judged(made)
    assert verdict.verdict == "identical"
    assert "18 micro-batches in 6 optimizer steps" in verdict.of_kind("micro-batches")[0].what
    made.edit_job("b", exit_code=1, state="failed")
    assert judged(made).exit_code == 4
    made.edit_job("b", exit_code=0, state="done")
    made.drop("b", 1, 6)
    not_verified(made, "arm b, rank 1: metrics end at step 5 of 18")


# Within an arm


def test_replicas_that_part_are_a_warning(made: MadeExperiment) -> None:
    for arm in "ab":
        made.edit_every(arm, 1, flip_state("parameters"), range(4, 7))
    verdict = judged(made)
    assert verdict.verdict == "identical"
    warning = verdict.of_kind("replicas")[0]
    assert warning.what == "arm a: ranks 0-1 hold copies of the same parameters, which part at step 4"


def test_undeclared_replicas_are_taken_for_such_if_they_start_alike(tmp_path: Path) -> None:
    made = make_experiment(tmp_path, replicas=False)
    assert not judged(made).of_kind("replicas")
    for arm in "ab":
        made.edit_every(arm, 1, flip_state("parameters"), range(4, 7))
    assert "started from the same parameters" in judged(made).of_kind("replicas")[0].what
    for arm in "ab":
        made.edit_every(arm, 1, flip_state("parameters"), range(1, 7))
        made.edit_every(arm, 1, flip_state("parameters"), range(4, 7))
    assert not judged(made).of_kind("replicas")


def test_a_stage_of_a_pipeline_may_lack_a_metric(made: MadeExperiment) -> None:
    for arm in "ab":
        made.edit_every(arm, 0, lambda line: line["metrics"].pop("loss"))
        for rank in (0, 1):
            made.edit_environment(arm, rank, lambda d, rank=rank: d.__setitem__("coordinates", {"pp": rank}))
    assert judged(made).verdict == "identical"
    made.edit_every("b", 1, lambda line: line["metrics"].pop("loss"))
    not_verified(made, "loss is missing")


def test_supplements_are_compared_too(made: MadeExperiment) -> None:
    for arm, bits in (("a", 1), ("b", 2)):
        path = made.metrics_path(arm, 0)
        line = encode_supplement(5, [MetricValue("aux", "record", bits, "float32")])
        path.write_bytes(path.read_bytes() + line)
    diverged(made, 5, "aux", [0])


# Around


def test_a_step_number_out_of_all_proportion_is_no_reason_to_count_that_far(made: MadeExperiment) -> None:
    made.edit("b", 0, 6, lambda line: line.__setitem__("step", 10**18))
    not_verified(made, "arm b, rank 0: metrics go on to step 1000000000000000000, 6 steps were asked for")


def test_hostile_names_reach_the_verdict_as_text(made: MadeExperiment) -> None:
    names = ["<script>", "\x1b[2J", "nul\0", "x" * 100_000, "../../etc", "loss[0]", "\u202e"]
    metric = {"bits": "0x3f800000", "dtype": "float32", "value": 1.0, "source": "record"}
    for arm in "ab":
        made.edit_every(arm, 0, lambda line: line["metrics"].update({name: dict(metric) for name in names}))
    assert judge(made.folder).verdict == "identical"
    for name in names:
        made.edit("b", 0, 4, flip_metric(name))
    verdict = judge(made.folder)
    assert verdict.first_divergence and set(verdict.first_divergence.metrics) == set(names)
    assert all(len(finding.what) < 1000 and finding.what.isprintable() for finding in verdict.findings)


def test_without_experiment_json_nothing_can_be_judged(made: MadeExperiment) -> None:
    made.folder.experiment_file.unlink()
    with pytest.raises(RecordError, match="is missing"):
        judge(made.folder)


def test_many_processes_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("detrun.experiments.slices.PARALLEL_FROM_BYTES", 0)
    made = make_experiment(tmp_path, ranks=40, steps=3)
    made.edit("b", 39, 2, flip_state("gradients"))
    made.edit("b", 17, 2, flip_metric("loss"))
    alone = judge(made.folder, processes=1, report=False)
    assert judge(made.folder, processes=2, report=False) == alone
    assert alone.first_divergence and alone.first_divergence.ranks == [39]


def test_a_verdict_needs_neither_torch_nor_pandas(made: MadeExperiment) -> None:
    script = (
        "import sys; from detrun.experiments.judge import judge\n"
        "judge(sys.argv[1]); print([m for m in ('torch', 'pandas', 'plotly') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(made.folder)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_a_job_file_of_another_arm_or_attempt_proves_nothing(made: MadeExperiment) -> None:
    path = made.attempt("b").job_file
    path.write_bytes(made.attempt("a").job_file.read_bytes())
    not_verified(made, "arm b: job.json speaks of arm a, attempt 0")
    made.attempt("b").path.rename(made.attempt("b").path.with_name("attempt-1"))
    made.attempt_number = 1
    path = made.attempt("b").job_file
    path.write_text(path.read_text().replace('"arm": "a"', '"arm": "b"'))
    not_verified(made, "arm b: job.json speaks of arm b, attempt 0")


def test_an_arm_held_against_itself_is_refused(made: MadeExperiment) -> None:
    document = json.loads(made.folder.experiment_file.read_text())
    document["arms"][1]["id"] = document["arms"][0]["id"]
    made.folder.experiment_file.write_text(json.dumps(document))
    with pytest.raises(RecordError, match="named twice"):
        judge(made.folder, report=False)


def test_where_everything_is_ignored_nothing_is_identical(made: MadeExperiment) -> None:
    document = json.loads(made.folder.experiment_file.read_text())
    document["recipe"]["metrics"] |= {"ignore": list(METRICS), "state_every": 0}
    made.folder.experiment_file.write_text(json.dumps(document))
    for arm in "ab":
        for rank in range(document["ranks"]):
            made.edit_every(arm, rank, lambda line: [line.pop(key, None) for key in ("state", "rng", "batch")] and None)
    not_verified(made, "nothing is compared")


def test_costs_beyond_all_bounds_and_settings_of_odd_shape_cost_no_verdict(made: MadeExperiment) -> None:
    path = made.attempt("b").recorder(0)
    document = json.loads(path.read_text())
    document |= {"cpu_seconds": {"a": 1e308, "b": 1e308}, "process_cpu_seconds": 1e-308}
    path.write_text(json.dumps(document))
    made.edit_environment("b", 0, lambda environment: environment["env"].update(FOO="x"))
    verdict = judged(made)
    assert "recorder_cpu_share" not in verdict.figures


def test_a_recorder_that_could_not_start_gives_the_missing_records_a_reason(made: MadeExperiment) -> None:
    made.metrics_path("b", 1).unlink()
    note = made.attempt("b").recorder_dir / "failed-4711.txt"
    note.write_text("Traceback (most recent call last):\n  …\nImportError: no \x1b[31mnumpy\n", encoding="utf-8")
    not_verified(made, "the recorder could not start in one process: ImportError: no")


def lack(path: Path, what: str) -> None:
    """In a rank's recorder file, an adapter that did not find something."""
    document = json.loads(path.read_text())
    document["adapters"] = [{"name": "toy", "version": "2.0", "tried": ["1.0", "1.1"], "lacks": [what]}]
    path.write_text(json.dumps(document))


def test_what_an_adapter_did_not_find_forbids_identical(made: MadeExperiment) -> None:
    lack(made.attempt("b").recorder(1), "toy.loop.train_step")
    says = "adapter toy did not find toy.loop.train_step (version 2.0, tried on 1.0 and 1.1)"
    verdict = not_verified(made, says)
    assert any("rank 1" in reason and "arm b" in reason for reason in verdict.not_verified if says in reason)


def test_what_an_adapter_did_not_find_does_not_hide_a_difference(made: MadeExperiment) -> None:
    lack(made.attempt("b").recorder(1), "toy.loop.train_step")
    made.edit("b", 0, 3, flip_metric("loss"))
    assert judged(made).verdict == "diverged"


def derived(value: float) -> Callable[[Line], None]:
    """Adds a metric that an adapter knows as bookkeeping."""
    metric = {"bits": f"0x{float32_bits(value):08x}", "dtype": "float32", "value": value, "source": "derived"}
    return lambda line: line["metrics"].update({"rate (derived)": metric})


def test_a_derived_metric_raises_no_alarm_and_counts_as_no_evidence(made: MadeExperiment) -> None:
    made.edit_every("a", 0, derived(0.5))
    made.edit_every("b", 0, derived(0.25), range(3, 5))
    verdict = judged(made)
    assert verdict.verdict == "identical", verdict.not_verified
    (coverage,) = verdict.of_kind("coverage")
    assert coverage.evidence["derived"] == ["rate (derived)"]
    assert "rate (derived)" not in coverage.evidence["metrics"]
