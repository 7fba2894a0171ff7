"""torchtitan as it comes from PyPI, unchanged: Llama 3 with FSDP 2, DeepSeek-V3 with experts on two ranks."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks import environment
from tests.frameworks.harness import HERE, SAVED, origin_of, pair_and_resume, recipe
from tests.frameworks.test_lightning import blamed, recorded
from tests.running import detrun

LLAMA = ("--module", "llama3", "--config", "llama3_debugmodel")
DEEPSEEK = ("--module", "deepseek_v3", "--config", "deepseek_v3_debugmodel_mtp")
DEEPSEEK += ("--parallelism.expert_parallel_degree", "2", "--training.disable_cuda_graphs")
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}


@pytest.fixture(scope="module")
def assets(frameworks: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a corpus."""
    folder = tmp_path_factory.mktemp("assets")
    subprocess.run([str(environment.PYTHON), str(HERE / "torchtitan" / "assets.py"), str(folder)], check=True)
    return folder


def trainer(folder: Path, assets: Path, name: str, *args: str, **more: Any) -> Path:
    given = f"""--hf-assets-path {assets}/tokenizer --dataloader.dataset_path {assets}/corpus --training.seq_len 64
        --training.local_batch_size 1 --training.steps {{steps}} --debug.seed {{seed}}
        --parallelism.spmd_backend partial_dtensor --dump_folder {{out}}"""
    checkpoint = {
        "directory": "{out}/checkpoint",
        "pattern": "step-{step}",
        "save_every": SAVED,
        # It resumes by itself from the newest complete checkpoint in its folder.
        "save_args": ["--checkpoint.enable", "--checkpoint.interval", "{save_every}"],
    }
    checkpoint["save_args"] += ["--checkpoint.no_last_save_model_only"]
    command = [str(HERE / "torchtitan" / "titan_on_cpu.py"), *args, *given.split()]
    env = {**OFFLINE, "HF_HOME": str(assets / "cache")}
    return recipe(folder, name, command, **{"checkpoint": checkpoint, "env": env, **more})


def test_llama_is_identical_and_resumes_with_another_random_number(tmp_path: Path, assets: Path) -> None:
    ran = pair_and_resume(trainer(tmp_path, assets, "llama", *LLAMA))
    assert ran.code == 1, ran.explain()
    assert ran.verdict["experiment"] == "resume-check", ran.explain()
    assert blamed(ran) == "the RNG stream torch_cpu"
    # Metrics, parameters and optimizer are exact: nothing draws after the initialization.
    assert ran.verdict["first_divergence"]["metrics"] == {}
    assert {each["component"] for each in ran.verdict["first_divergence"]["state"]} == {"rng"}
    told = [recorded(tmp_path, rank=rank) for rank in (0, 1)]
    for step, metrics in told[0].items():
        other = told[1][step]
        # Its own reduced loss is the sum of both ranks' local ones, in float32.
        both = metrics["loss"]["value"] + other["loss"]["value"]
        assert metrics["global_avg_loss"]["value"] == pytest.approx(both, rel=1e-6)
        assert metrics["grad_norm"] == other["grad_norm"]
        assert not any(name.startswith("loss[") for name in metrics)  # a chunk of the loss is no micro-batch


def test_experts_and_two_predictions(tmp_path: Path, assets: Path) -> None:
    required = {"required": ["loss", "lm_loss", "mtp_loss", "grad_norm"]}
    ran = pair_and_resume(trainer(tmp_path, assets, "deepseek", *DEEPSEEK, metrics=required))
    assert ran.code == 1, ran.explain()
    assert ran.verdict["experiment"] == "resume-check", ran.explain()
    assert blamed(ran) == "the RNG stream torch_cpu"
    assert {each["component"] for each in ran.verdict["first_divergence"]["state"]} == {"rng"}


@pytest.mark.full
def test_accumulation(tmp_path: Path, assets: Path) -> None:
    file = trainer(tmp_path, assets, "accumulated", *LLAMA, "--training.global_batch_size", "4")
    ran = detrun("pair", str(file), "--json", cwd=tmp_path, timeout=600)
    assert ran.code == 0, ran.explain()
    for metrics in recorded(tmp_path).values():
        parts = metrics["loss[0]"]["value"] + metrics["loss[1]"]["value"]
        assert metrics["loss"]["value"] == pytest.approx(parts, rel=1e-6)


def test_a_fault_of_one_bit_is_localized(tmp_path: Path, assets: Path) -> None:
    file = trainer(tmp_path, assets, "nudged", *LLAMA, nudge="layers.1.feed_forward@call=5,rank=1")
    culprit = origin_of(file)
    assert "layers.1.feed_forward" in str(culprit["scope"])
    assert culprit["step"] == 3
    assert culprit["rank"] == 1
