"""The small parts of comparing: folding, chance, distances, environments, replicas."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detrun.compare.bits import distance, hexadecimal, ulp_distance
from detrun.compare.chance import bound_of_clean_pairs, pairs_for_bound
from detrun.compare.completeness import ArmEnd, Asked, gaps_of_arm, survey_rank
from detrun.compare.environment import (
    ArmContext,
    EnvironmentTally,
    compare_environments,
    templates_of,
)
from detrun.compare.environment_rules import RULES, effect_of
from detrun.compare.folding import hosts, ranges, ranks_in_words, steps_in_words
from detrun.compare.replicas import find_drift
from detrun.fingerprint import scalar
from detrun.records.environment_reader import RankEnvironment
from detrun.records.metrics_reader import Problem, RankMetrics


def test_ranks_and_steps_are_told_briefly() -> None:
    assert ranges([3, 1, 2, 7, 9, 10]) == "1-3, 7, 9-10"
    assert ranges(range(0, 40, 2), most=3) == "0, 2, 4 and 17 more"
    assert ranks_in_words([5]) == "rank 5"
    assert ranks_in_words([0, 1, 2, 7]) == "ranks 0-2, 7"
    assert ranks_in_words([0, 1], of=2) == "every rank"
    assert ranks_in_words([0], of=1) == "rank 0"
    assert steps_in_words([4]) == "at step 4"
    assert steps_in_words([1, 2], of=2) == "in every step"


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["node1", "node2", "node4", "node3"], "node[1-4]"),
        (["node1"], "node1"),
        (["node01", "node02", "node10"], "node[01-02,10]"),
        (["n9", "n10", "n11"], "n[9-11]"),
        (["n09", "n10", "n8"], "n[8,09-10]"),
        (["a1", "a2", "a4", "login"], "a[1-2,4], login"),
        (["gpu-1.example.org", "gpu-2.example.org"], "gpu-[1-2].example.org"),
        ([], ""),
    ],
)
def test_hosts_fold_as_slurm_writes_them(names: list[str], folded: str) -> None:
    assert hosts(names) == folded


def test_what_clean_pairs_say() -> None:
    assert bound_of_clean_pairs(1) == pytest.approx(0.95)
    assert bound_of_clean_pairs(59) < 0.05 < bound_of_clean_pairs(58)
    assert pairs_for_bound(0.05) == 59


def test_distances_and_how_they_look() -> None:
    near = distance("0x3f800000", "0x3f800001", "float32")
    assert (near.ulp, near.equal_to_decimals) == (1, 6)
    assert distance("0x7fc00000", "0x3f800001", "float32").ulp is None
    assert distance("0x00000000", "0x80000000", "float32").relative == 0.0
    assert distance("0x3f800000", "0x40000000", "float32").equal_to_decimals is None
    assert hexadecimal(1.0) == "0x1p+0"
    assert hexadecimal(0.8012649) == (0.8012649).hex()
    assert hexadecimal(float("inf")) == "inf"


@given(st.sampled_from(["float64", "float32", "bfloat16", "float16", "int32", "uint8"]), st.data())
def test_the_quick_distance_is_the_exact_one(dtype: str, data: st.DataObject) -> None:
    bits = st.integers(0, (1 << scalar.width(dtype)) - 1)
    x, y = data.draw(bits), data.draw(bits)
    a, b = scalar.format_bits(x, dtype), scalar.format_bits(y, dtype)
    assert ulp_distance(a, b, dtype) == scalar.ulp_distance(x, y, dtype)


# Environments


def environment(host: str = "node1", **sections: Any) -> RankEnvironment:
    document = {"schema_version": 1, "rank": 0, "world_size": 1, "host": host, **sections}
    return RankEnvironment(document, 0, 1, host)


def differing(
    a: RankEnvironment, b: RankEnvironment, context_a: ArmContext | None = None, context_b: ArmContext | None = None
) -> dict[str, str]:
    tally = EnvironmentTally("a", "b")
    compare_environments(
        tally, 0, a, b, context_a or ArmContext("a", "x-pair-1"), context_b or ArmContext("b", "x-pair-1")
    )
    return {difference.path: difference.effect for difference in tally.differences.values()}


def clear(**values: str) -> dict[str, Any]:
    return {"clear": values, "digest": {}}


def test_an_arms_own_folders_jobs_and_host_are_no_difference() -> None:
    a = environment(
        "node1",
        env=clear(
            OUT="/scratch/archive/x-pair-1/arms/a/work/x",
            DETRUN_LOG="/scratch/archive/x-pair-1/arms/a/attempt-0/log",
            TORCH_NAME="run-4182.log",
            NCCL_HOST="node1",
        ),
    )
    b = environment(
        "node2",
        env=clear(
            OUT="/scratch/archive/x-pair-1/arms/b/work/x",
            DETRUN_LOG="/scratch/archive/x-pair-1/arms/b/attempt-0/log",
            TORCH_NAME="run-4183.log",
            NCCL_HOST="node2",
        ),
    )
    found = differing(a, b, ArmContext("a", "x-pair-1", jobs=("4182",)), ArmContext("b", "x-pair-1", jobs=("4183",)))
    assert found == {}


def test_a_bare_number_is_never_taken_for_a_job() -> None:
    a, b = environment(env=clear(OMP_NUM_THREADS="16")), environment(env=clear(OMP_NUM_THREADS="17"))
    contexts = ArmContext("a", "x", jobs=("16",)), ArmContext("b", "x", jobs=("17",))
    assert differing(a, b, *contexts) == {"env.clear.OMP_NUM_THREADS": "matter"}


def test_paths_that_are_not_the_arms_own_are_a_difference() -> None:
    a = environment(env=clear(LD_LIBRARY_PATH="/opt/x-pair-1/arms/ab/lib"))
    b = environment(env=clear(LD_LIBRARY_PATH="/opt/x-pair-1/arms/abc/lib"))
    assert differing(a, b) == {"env.clear.LD_LIBRARY_PATH": "matter"}


def test_declared_arguments_and_variables_are_no_difference() -> None:
    argv = ["train.py", "--steps", "5"]
    a = environment(python={"argv": argv}, env=clear())
    b = environment(python={"argv": [*argv, "--fault", "x", "--out", "/w/1"]}, env=clear(NCCL_ALGO="Ring"))
    assert differing(a, b) == {"python.argv": "matter", "env.clear.NCCL_ALGO": "matter"}
    declared = ArmContext("b", declared_args=("--fault", "x", "--out", "{out}/1"), declared_env={"NCCL_ALGO": "Ring"})
    assert differing(a, b, None, declared) == {}


def test_arguments_that_name_the_arm_by_the_recipes_word_are_no_difference() -> None:
    recipe = {"launch": {"command": ["python", "train.py", "--name={arm}-{seed}"], "args": ["--lr", "{lr}"]}}
    templates = templates_of(recipe)
    assert templates == ("--name={arm}-{seed}",)
    a, b = environment(python={"argv": ["--name=a-7"]}), environment(python={"argv": ["--name=b-7"]})
    contexts = [ArmContext(arm, templates=templates) for arm in "ab"]
    assert differing(a, b, *contexts) == {}
    b = environment(python={"argv": ["--name=c-7"]})
    assert differing(a, b, *contexts) == {"python.argv": "matter"}


def test_an_argument_that_is_the_output_folder_alone_stands_for_no_other_word() -> None:
    def arguments(arm: str, rate: str) -> RankEnvironment:
        return environment(python={"argv": ["--out", f"/r/x-pair-1/arms/{arm}/work", "--lr", rate]})

    contexts = [ArmContext(arm, "x-pair-1", templates=("{out}",)) for arm in "ab"]
    assert differing(arguments("a", "1"), arguments("b", "1"), *contexts) == {}
    assert differing(arguments("a", "1"), arguments("b", "2"), *contexts) == {"python.argv": "matter"}


def test_folders_of_the_process_alone_do_not_forbid_a_verdict() -> None:
    a, b = (
        environment(python={"cwd": f"/tmp/{x}"}, env=clear(TORCHINDUCTOR_CACHE_DIR=f"/tmp/{x}", TORCH_HOME=f"/tmp/{x}"))
        for x in ("k3v", "q9w")
    )
    assert set(differing(a, b).values()) == {"inform"}


def test_a_setting_that_only_one_arm_has_is_a_difference() -> None:
    a, b = environment(torch={"x": None}), environment(torch={})
    tally = EnvironmentTally("a", "b")
    compare_environments(tally, 3, a, b, ArmContext("a"), ArmContext("b"))
    found = next(iter(tally.differences.values()))
    assert (found.path, found.a, found.b, found.ranks) == ("torch.x", "None", "(not set)", [3])


@pytest.mark.parametrize(
    ("path", "effect"),
    [
        ("env.clear.DETRUN_ARM", "ignore"),
        ("env.clear.DETRUN_SEED", "matter"),
        ("env.clear.SLURM_JOB_ID", "ignore"),
        ("env.clear.SLURM_CPUS_PER_TASK", "matter"),
        ("env.clear.SLURM_JOB_NODELIST", "placement"),
        ("env.digest.MASTER_PORT", "ignore"),
        ("env.digest.HOME", "inform"),
        ("env.clear.OMP_NUM_THREADS", "matter"),
        ("devices.0.uuid", "placement"),
        ("devices.0.name", "matter"),
        ("cpu.capability", "matter"),
        ("cpu.affinity", "placement"),
        ("packages.torch", "matter"),
        ("replicas", "matter"),
        ("something_new", "inform"),
    ],
)
def test_rules(path: str, effect: str) -> None:
    assert effect_of(path) == effect


def test_the_last_rule_takes_everything() -> None:
    assert RULES[-1][0] == "*"
    assert len({pattern for pattern, _ in RULES}) == len(RULES)


def test_hostile_environments_do_not_fail() -> None:
    deep: Any = "x"
    for _ in range(100):
        deep = {"<script>": [deep]}
    a, b = environment(torch=deep), environment(torch={"a\0": "x" * 200_000})
    assert set(differing(a, b).values()) == {"matter"}
    json.dumps(differing(a, b))


# Replicas


def trail(*digests: int) -> bytes:
    return b"".join(digest.to_bytes(16, "big") for digest in digests)


def test_replicas_part_at_the_first_unequal_step() -> None:
    trails = {0: trail(1, 2, 3), 1: trail(1, 2, 3), 2: trail(1, 9, 3), 3: trail(5, 5, 5)}
    found = find_drift("a", trails, {0: (0, 1, 2), 1: (0, 1, 2), 2: (0, 1, 2), 3: None})
    assert [(drift.step, drift.apart, drift.declared) for drift in found] == [(2, (2,), True)]


def test_steps_without_a_digest_are_no_drift() -> None:
    trails = {0: trail(1, 0, 3), 1: trail(1, 2, 3)}
    assert find_drift("a", trails, {0: (0, 1), 1: (0, 1)}) == []


def test_replicas_of_different_length_are_held_up_to_the_shorter() -> None:
    assert find_drift("a", {0: trail(1, 2), 1: trail(1)}, {0: (0, 1), 1: (0, 1)}) == []


@pytest.mark.parametrize(("code", "said"), [(0, True), (1, False)])
def test_a_program_that_ended_well_without_a_step_is_told_what_a_step_is(code: int, said: bool) -> None:
    asked = Asked(steps=6, ranks=1)
    survey = survey_rank("a", 0, RankMetrics(problems=[Problem("missing", "the metrics file is missing")]), asked)
    (gap,) = gaps_of_arm([survey], asked, ArmEnd(code, clean=True))
    assert gap.what.startswith("the metrics file is missing")
    assert ("detrun.record" in gap.what) == said
