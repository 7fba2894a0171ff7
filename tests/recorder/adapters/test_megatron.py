"""The adapter of Megatron with a stand-in: what it records, and that a renamed part of Megatron's inside is told."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from detrun.recorder.adapters.megatron.checkpoints import scales
from tests.recorder.adapters import stand_in_megatron as stand_in
from tests.recorder.harness import Run, run


def recorded(
    folder: Path,
    program: Any = stand_in.with_its_loop,
    rename: tuple[str, str] = ("", ""),
    *,
    state: bool = False,
    **keys: Any,
) -> Run:
    stand_in.write(folder, *rename)
    if program is stand_in.with_its_loop:
        keys["names"] = {rename[0]: rename[1]} if rename[0] else {}
    env = {"DETRUN_STATE_AT": ""} if state else {}
    return run(partial(program, folder, **keys), folder / "attempt", **env)


def lacks(ran: Run) -> list[str]:
    (facts,) = ran.cost()["adapters"]
    return facts["lacks"]


def metrics(ran: Run) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for line in ran.lines():
        found.setdefault(line["step"], {}).update(line["metrics"])
    return found


def test_its_own_loop_is_recorded_as_it_logs(tmp_path: Path) -> None:
    ran = recorded(tmp_path)
    assert lacks(ran) == []
    (facts,) = ran.cost()["adapters"]
    assert facts["name"] == "megatron" and facts["version"] == "0.19.2"
    steps, told = ran.steps(), metrics(ran)
    assert sorted(steps) == [1, 2, 3, 4]
    assert [bool(steps[step].get("skipped")) for step in sorted(steps)] == [False, False, True, False]
    first = told[1]
    assert {"lm_loss", "loss", "loss[0]", "loss[1]", "grad_norm", "learning_rate", "consumed_samples"} <= set(first)
    assert {"load_balancing_loss", "load_balancing_loss/layer_2", "mtp_loss", "mtp_1_loss", "mtp_loss/layer_1"} <= set(
        first
    )
    assert first["loss[0]"]["dtype"] == "float32"
    own = [first[f"loss[{part}]"]["value"] for part in (0, 1)]
    assert first["lm_loss"]["value"] == pytest.approx(sum(own) / 2), "losses are told before they are scaled"
    # A layer's own is told before the ranks reduce it, the plain name is what is logged.
    assert first["load_balancing_loss/layer_2"]["value"] == pytest.approx(3 * sum(own))
    assert first["load_balancing_loss"]["value"] == pytest.approx(3 * sum(own) / 2)
    assert "load_balancing_loss/layer_1" not in first
    assert [told[step]["consumed_samples"]["value"] for step in sorted(told)] == [8, 16, 24, 32]
    assert told[3]["grad_norm"]["value"] is None or math.isnan(float(told[3]["grad_norm"]["value"]))


def test_a_rate_that_restarts_is_derived(tmp_path: Path) -> None:
    told = metrics(recorded(tmp_path))
    sources = {name.split(" ")[0]: value["source"] for name, value in told[2].items()}
    assert sources["mtp_1_cumulative_acceptance_rate"] == "derived"
    assert sources["mtp_loss"] == "adapter"


def test_the_state_has_masters_streams_and_places_by_name(tmp_path: Path) -> None:
    ran = recorded(tmp_path, state=True)
    environment = ran.environment()
    assert environment["coordinates"] == {"pp": 0, "tp": 0, "cp": 0, "dp": 0, "ep": 0}
    assert environment["replicas"] == [0]
    names = rows(ran, "begin-00000003")
    assert {("parameters", "0.weight.master"), ("optimizer", "0.weight.master.exp_avg")} <= names
    assert {("rng", "model-parallel-rng"), ("rng", "expert-parallel-rng")} <= names
    saves = (ran.attempt / "saves" / "rank00000.jsonl").read_text().splitlines()
    assert [(json.loads(line)["event"], json.loads(line)["step"]) for line in saves] == [("begin", 2), ("end", 2)]
    assert json.loads(saves[0])["path"] == str(tmp_path)


def rows(ran: Run, boundary: str) -> set[tuple[str, str]]:
    from detrun.records.layout import AttemptFolder
    from detrun.records.state_reader import read_state

    return {(row.component, row.name) for row in read_state(AttemptFolder(ran.attempt, "a", 0), boundary, 0).rows}


def test_a_step_that_is_passed_over_counts(tmp_path: Path) -> None:
    ran = recorded(tmp_path, skip=(1,))
    steps = ran.steps()
    assert sorted(steps) == [1, 2, 3, 4] and steps[2]["skipped"]
    assert "lm_loss" in metrics(ran)[3] and "lm_loss" not in metrics(ran).get(2, {})


def test_a_step_inside_a_restore_is_none(tmp_path: Path) -> None:
    ran = recorded(tmp_path, restore=True)
    assert sorted(ran.steps()) == [1, 2, 3, 4]
    assert lacks(ran) == []


def test_a_loop_of_its_own_is_left_to_torchs_optimizers(tmp_path: Path) -> None:
    ran = recorded(tmp_path, stand_in.with_a_loop_of_its_own)
    assert lacks(ran) == []
    steps, told = ran.steps(), metrics(ran)
    assert sorted(steps) == [1, 2, 3, 4] and steps[3]["skipped"]
    assert {"loss", "loss[1]", "grad_norm", "load_balancing_loss/layer_2"} <= set(told[4])


def test_sums_over_several_steps_are_derived_and_each_step_has_its_own(tmp_path: Path) -> None:
    told = metrics(recorded(tmp_path, stand_in.with_a_loop_of_its_own, report_every=2))
    sources = {name.split(" ")[0]: value["source"] for name, value in told[2].items()}
    assert sources["load_balancing_loss"] == "derived" and sources["load_balancing_loss/layer_2"] == "adapter"
    for step in (1, 2):
        own = sum(told[step][f"loss[{part}]"]["value"] for part in (0, 1))
        assert told[step]["load_balancing_loss/layer_2"]["value"] == pytest.approx(3 * own)


def test_scales_of_low_precision_are_found_by_module() -> None:
    class Meta:  # as Transformer Engine's, whose attributes no walk through Python objects sees
        scale, amax_history = torch.ones(3), torch.zeros(4, 3)

    inner = torch.nn.Linear(2, 2)
    inner.fp8_meta = {"scaling_fwd": Meta(), "recipe": "delayed"}
    known = SimpleNamespace(
        adapter=SimpleNamespace(
            observer=SimpleNamespace(models=SimpleNamespace(live=lambda: [torch.nn.Sequential(inner)]))
        )
    )
    found = scales(known)  # type: ignore[arg-type]
    assert sorted(found) == ["0.scaling_fwd.amax_history", "0.scaling_fwd.scale"]


RENAMED = {
    # a word of Megatron's inside: what must be told where it has another name
    "schedules": "module megatron.core.pipeline_parallel.schedules",
    "custom_backward": "custom_backward",
    "grad_output": "parameter grad_output",
    "parallel_state": "module megatron.core.parallel_state",
    "initialize_model_parallel": "initialize_model_parallel",
    "get_pipeline_model_parallel_rank": "get_pipeline_model_parallel_rank",
    "get_expert_model_parallel_rank": "get_expert_model_parallel_rank",
    "get_data_parallel_group": "get_data_parallel_group",
    "get_expert_data_parallel_group": "get_expert_data_parallel_group",
    "with_context_parallel": "parameter with_context_parallel",
    "random": "module megatron.core.tensor_parallel.random",
    "CudaRNGStatesTracker": "CudaRNGStatesTracker",
    "get_cuda_rng_tracker": "get_cuda_rng_tracker",
    "get_states": "get_states",
    "model_parallel_cuda_manual_seed": "model_parallel_cuda_manual_seed",
    "moe_utils": "module megatron.core.transformer.moe.moe_utils",
    "moe_logging": "MoEMetricsTracker",
    "MoEMetricsTracker": "MoEMetricsTracker",
    "record": "record",
    "report": "report",
    "layer_number": "parameter layer_number",
    "value": "parameter value",
    "writer": "parameter writer",
    "multi_token_prediction": "module megatron.core.transformer.multi_token_prediction",
    "MTPLossLoggingHelper": "MTPLossLoggingHelper",
    "save_metrics_to_tracker": "save_metrics_to_tracker",
    "track_mtp_metrics": "track_mtp_metrics",
    "clip_grads": "module megatron.core.optimizer.clip_grads",
    "clip_grad_by_total_norm_fp32": "clip_grad_by_total_norm_fp32",
    "parameters": "parameter parameters",
    "MegatronOptimizer": "MegatronOptimizer",
    "scale_loss": "scale_loss",
    "ChainedOptimizer": "ChainedOptimizer",
    "MixedPrecisionOptimizer": "MixedPrecisionOptimizer",
    "FP32Optimizer": "FP32Optimizer",
    "Float16OptimizerWithFloat16Params": "Float16OptimizerWithFloat16Params",
    "float16_groups": "float16_groups",
    "fp32_from_float16_groups": "fp32_from_float16_groups",
    "DistributedOptimizer": "DistributedOptimizer",
    "_get_model_param_range_map": "_get_model_param_range_map",
    "shard_fp32_from_float16_groups": "shard_fp32_from_float16_groups",
    "serialization": "module megatron.core.dist_checkpointing.serialization",
    "save": "serialization.save",
    "checkpoint_dir": "parameter checkpoint_dir",
    "async_sharded_save": "parameter async_sharded_save",
    "checkpointing": "module megatron.training.checkpointing",
    "load_checkpoint": "load_checkpoint",
    "train_step": "train_step",
    "training_log": "training_log",
    "loss_dict": "parameter loss_dict",
    "skipped_iter": "parameter skipped_iter",
    "grad_norm": "parameter grad_norm",
    "get_args": "get_args",
    "consumed_train_samples": "consumed_train_samples",
    "skipped_train_samples": "skipped_train_samples",
}


@pytest.mark.parametrize("word", sorted(RENAMED))
def test_what_has_another_name_is_told(word: str, tmp_path: Path) -> None:
    ran = recorded(tmp_path, rename=(word, f"{word}_renamed"))
    assert any(RENAMED[word] in text for text in lacks(ran)), lacks(ran)
    assert len(ran.steps()) == 4, "and the program runs as it would"


def test_the_number_of_an_iteration_may_come_from_the_arguments(tmp_path: Path) -> None:
    ran = recorded(tmp_path, rename=("iteration", "done"))
    assert lacks(ran) == [] and sorted(ran.steps()) == [1, 2, 3, 4]
