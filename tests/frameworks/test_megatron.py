"""Megatron Core 0.19.2 through its own loop, unchanged: twice the same, resumed, and what its checkpoints lose."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks import environment
from tests.frameworks.harness import HERE, SAVED, origin_of, pair_and_resume, recipe

DRIVER = HERE / "megatron" / "train.py"
GIVEN = shlex.split("""
    --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --min-lr 1e-4 --lr-decay-iters 20 --lr-warmup-iters 2
    --tokenizer-type NullTokenizer --vocab-size 255 --mock-data --split 90,5,5
    --transformer-impl local --distributed-backend gloo --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion
    --log-interval 1 --eval-iters 0 --eval-interval 1000 --num-workers 0
    --position-embedding-type rope --disable-bias-linear --normalization RMSNorm
""")
PLACED = ["--train-iters", "{steps}", "--seed", "{seed}", "--data-cache-path", "{out}/data"]
LAYERS = ["--num-layers", "2"]
EXPERTS = shlex.split("""
    --num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --moe-z-loss-coeff 1e-3 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 --mtp-num-layers 1
""")
HYBRID = shlex.split("""
    --hybrid-layer-pattern MEM*/ME --spec mamba_cpu local_hybrid_spec
    --mamba-num-heads 8 --mamba-head-dim 16 --mamba-state-dim 16 --mamba-num-groups 2
""")
TENSOR = ["--tensor-model-parallel-size", "2"]
PIPELINE = ["--pipeline-model-parallel-size", "2"]
SURROUNDINGS = {"TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
DENSE_METRICS = ["loss", "lm_loss", "grad_norm"]
EXPERT_METRICS = [*DENSE_METRICS, "load_balancing_loss", "z_loss", "mtp_loss"]
SAVES = {
    "directory": "{out}/checkpoints",
    "pattern": "iter_{step}",
    "save_every": SAVED,
    "save_args": ["--save", "{out}/checkpoints", "--save-interval", "{save_every}"],
    "resume_args": ["--load", "{out}/checkpoints"],
}


def megatron(folder: Path, name: str, *args: str, env: dict[str, str] | None = None, **more: Any) -> Path:
    required = EXPERT_METRICS if "--num-experts" in args else DENSE_METRICS
    return recipe(
        folder,
        f"megatron-{name}",
        [str(DRIVER), *GIVEN, *PLACED, *args],
        path=[environment.MEGATRON_HOME],
        env={**SURROUNDINGS, **(env or {})},
        **{"metrics": {"required": required}, "checkpoint": SAVES, **more},
    )


CONFIGURATIONS = {
    "data-parallel": (2, LAYERS),
    "tensor-parallel": (2, [*LAYERS, *TENSOR]),
    "pipeline-parallel": (2, [*LAYERS, *PIPELINE]),
    "tensor-and-pipeline-parallel": (4, [*LAYERS, *TENSOR, *PIPELINE]),
    # With tied embeddings, 0.19.2 cannot save multi-token prediction on a stage behind the first.
    "experts-and-pipeline-parallel": (4, [*LAYERS, *EXPERTS, *PIPELINE, "--untie-embeddings-and-output-weights"]),
    "hybrid": (2, [*EXPERTS, *HYBRID]),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_pair_is_identical_and_so_is_a_resumed_run(name: str, tmp_path: Path) -> None:
    ranks, args = CONFIGURATIONS[name]
    ran = pair_and_resume(megatron(tmp_path, name, *args, ranks=ranks))
    assert ran.code == 0, ran.explain()
    assert ran.verdict["verdict"] == "identical" and ran.verdict["experiment"] == "resume-check"
    # What expert-parallel peers draw from comes back as that of the first; here nobody does.
    lost = [finding["what"] for finding in ran.verdict["findings"] if finding["kind"] == "lost-variable"]
    assert [what for what in lost if "expert-parallel-rng" not in what] == []
    assert bool(lost) == ("--num-experts" in args), ran.explain()
    for path in tmp_path.glob(".detrun/*/arms/*/attempt-*/recorder/rank*.json"):
        (facts,) = json.loads(path.read_text())["adapters"]
        assert facts["version"].startswith("0.19.2") and facts["lacks"] == []


def test_experts_are_identical_and_agree_with_what_is_written_of_them(tmp_path: Path) -> None:
    """Twice and after a resume. TensorBoard and the printed lines say the same, behind the resume too, where the second
    line printed is a mean of two steps."""
    written = ["--tensorboard-dir", "{out}/tensorboard", "--tensorboard-log-interval", "1"]
    also = [
        {"source": "tensorboard", "path": "{out}/tensorboard", "pattern": "megatron"},
        {"source": "log", "pattern": "megatron"},
    ]
    metrics = {"required": EXPERT_METRICS, "also": also}
    ran = pair_and_resume(megatron(tmp_path, "written", *LAYERS, *EXPERTS, *written, metrics=metrics))
    assert ran.code == 0, ran.explain()
    held = [finding for finding in ran.verdict["findings"] if finding["kind"].startswith("source")]
    assert held and all(finding["severity"] == "info" for finding in held), ran.explain()


def test_the_distributed_optimizer_cannot_be_restored_without_transformer_engine(tmp_path: Path) -> None:
    ran = pair_and_resume(megatron(tmp_path, "distributed", *LAYERS, "--use-distributed-optimizer"))
    assert ran.code == 4, ran.explain()
    assert "attempt 1" in ran.out or "attempt-1" in ran.out


def test_the_distributed_optimizer_s_step_is_the_culprit_behind_half_a_repair(tmp_path: Path) -> None:
    args = [*LAYERS, "--use-distributed-optimizer"]
    ran = pair_and_resume(megatron(tmp_path, "half", *args, env={"MEGATRON_REPAIR": "load"}))
    assert ran.code == 1, ran.explain()
    culprit = ran.verdict["culprit"]
    assert culprit["kind"] == "optimizer" and "step" in json.dumps(culprit), ran.explain()


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_distributed_optimizer_is_restored_behind_a_whole_repair(precision: str, tmp_path: Path) -> None:
    args = [*LAYERS, "--use-distributed-optimizer", *(["--bf16"] if precision == "bf16" else [])]
    ran = pair_and_resume(megatron(tmp_path, f"whole-{precision}", *args, env={"MEGATRON_REPAIR": "step"}))
    assert ran.code == 0, ran.explain()


@pytest.mark.full
@pytest.mark.parametrize("keeps", [False, True])
def test_a_loop_of_its_own_around_megatron_core(keeps: bool, tmp_path: Path) -> None:
    given = ["--steps", "{steps}", "--seed", "{seed}", "--out", "{out}/checkpoints"]
    saves = {
        "directory": "{out}/checkpoints",
        "pattern": "step-{step}",
        "save_every": SAVED,
        "save_args": ["--save-every", "{save_every}"],
        "resume_args": ["--load", "{checkpoint}", *(["--keep-streams"] if keeps else [])],
    }
    file = recipe(
        tmp_path,
        "own-loop",
        [str(HERE / "megatron" / "own_loop.py"), *given],
        path=[environment.MEGATRON_HOME],
        env=SURROUNDINGS,
        metrics={"required": ["loss", "grad_norm", "load_balancing_loss/layer_1"]},
        checkpoint=saves,
    )
    ran = pair_and_resume(file)
    if keeps:
        assert ran.code == 0, ran.explain()
    else:
        assert ran.code == 1, ran.explain()
        assert ran.verdict["culprit"]["kind"] == "rng"
        assert "model-parallel-rng" in json.dumps(ran.verdict["culprit"])


def test_one_bit_of_one_module_is_traced_to_it(tmp_path: Path) -> None:
    # Two micro-batches a step: the seventh call is in step 4. One bit of what is added to larger numbers would be lost.
    file = megatron(tmp_path, "nudged", *LAYERS, nudge="decoder.layers.1.mlp.linear_fc1@call=7,rank=1")
    culprit = origin_of(file)
    assert culprit["step"] == 4 and culprit["rank"] == 1
    assert culprit["scope"].endswith("decoder.layers.1.mlp.linear_fc1")
