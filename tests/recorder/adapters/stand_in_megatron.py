"""As much of Megatron's inside as the adapter relies on, in few lines: the text of its modules, and programs that train
with it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

FILES = {
    "core/__init__.py": '__version__ = "0.19.2"\n',
    "core/parallel_state.py": """
import torch.distributed as dist

def initialize_model_parallel():
    pass

def get_pipeline_model_parallel_rank():
    return 0

get_tensor_model_parallel_rank = get_context_parallel_rank = get_pipeline_model_parallel_rank
get_data_parallel_rank = get_expert_model_parallel_rank = get_pipeline_model_parallel_rank

def get_data_parallel_group(with_context_parallel=False):
    return dist.group.WORLD

def get_expert_data_parallel_group():
    return dist.group.WORLD
""",
    "core/tensor_parallel/random.py": """
import torch

class CudaRNGStatesTracker:
    def __init__(self):
        self.states_ = {}

    def get_states(self):
        return dict(self.states_)

    def add(self, name, seed):
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

TRACKER = CudaRNGStatesTracker()

def get_cuda_rng_tracker():
    return TRACKER

def model_parallel_cuda_manual_seed(seed):
    TRACKER.add("model-parallel-rng", seed)
    TRACKER.states_["expert-parallel-rng"] = torch.Generator().manual_seed(seed + 1).get_state()
""",
    "core/pipeline_parallel/schedules.py": """
import torch

def custom_backward(output, grad_output):
    gradient = torch.ones_like(output) if grad_output is None else grad_output
    torch.autograd.Variable._execution_engine.run_backward(
        (output,), (gradient,), False, False, (), True, accumulate_grad=True
    )
""",
    "core/transformer/moe/moe_logging.py": """
import types
import torch

class MoEMetricsTracker:
    def __init__(self):
        self._metrics = {}

    @property
    def metrics(self):
        return self._metrics

    def record(self, name, value, layer_number, num_layers):
        entry = self._metrics.setdefault(name, types.SimpleNamespace(values=torch.zeros(num_layers)))
        entry.values[layer_number - 1] += value.detach()

    def report(self, loss_scale, iteration, writer=None):
        for name, entry in self._metrics.items():
            entry.values *= 2  # what the ranks make of it together
            if writer is not None:
                writer.add_scalar(name, (entry.values * loss_scale).sum() / len(entry.values), iteration)
            entry.values.zero_()

TRACKER = MoEMetricsTracker()
""",
    "core/transformer/moe/moe_utils.py": "from .moe_logging import TRACKER\n",
    "core/transformer/multi_token_prediction.py": """
import torch

class MTPLossLoggingHelper:
    tracker = {"loss_values": torch.zeros(1)}
    total = 0

    @staticmethod
    def save_metrics_to_tracker(loss, layer_number):
        MTPLossLoggingHelper.tracker["loss_values"][layer_number] += loss.detach()

    @staticmethod
    def track_mtp_metrics(loss_scale, iteration, writer, total_loss_dict=None):
        values = MTPLossLoggingHelper.tracker["loss_values"]
        MTPLossLoggingHelper.total += 1
        if writer is not None:
            writer.add_scalar("mtp_1 loss", values[0] * loss_scale, iteration)
            writer.add_scalar("mtp_1_cumulative_acceptance_rate", 1.0 * MTPLossLoggingHelper.total, iteration)
        values.zero_()
""",
    "core/optimizer/clip_grads.py": """
def clip_grad_by_total_norm_fp32(parameters, max_norm, total_norm):
    for parameter in parameters:
        parameter.grad.mul_(max_norm / (total_norm + 1e-6))
""",
    "core/optimizer/optimizer.py": """
import types
import torch
from .clip_grads import clip_grad_by_total_norm_fp32

class MegatronOptimizer:
    def __init__(self, optimizer, clip):
        self.optimizer = optimizer
        self.config = types.SimpleNamespace(clip_grad=clip)

    def scale_loss(self, loss):
        return 1024.0 * loss

class MixedPrecisionOptimizer(MegatronOptimizer):
    overflow = False

    def step(self):
        if self.overflow:
            return False, None, None
        for mine, theirs in zip(self.fp32_from_float16_groups, self.float16_groups):
            for master, parameter in zip(mine, theirs):
                master.grad = parameter.grad.float() / 1024.0
        masters = [master for group in self.fp32_from_float16_groups for master in group]
        norm = torch.stack([master.grad.norm() for master in masters]).norm().item()
        clip_grad_by_total_norm_fp32(masters, self.config.clip_grad, norm)
        self.optimizer.step()
        for mine, theirs in zip(self.fp32_from_float16_groups, self.float16_groups):
            for master, parameter in zip(mine, theirs):
                parameter.data.copy_(master.data)
                parameter.grad = None
        return True, norm, 3

class Float16OptimizerWithFloat16Params(MixedPrecisionOptimizer):
    def __init__(self, parameters, clip):
        self.float16_groups = [list(parameters)]
        self.fp32_from_float16_groups = [[p.detach().float().requires_grad_() for p in self.float16_groups[0]]]
        MixedPrecisionOptimizer.__init__(self, torch.optim.Adam(self.fp32_from_float16_groups[0], lr=0.01), clip)

class FP32Optimizer(MegatronOptimizer):
    def step(self):
        self.optimizer.step()
        return True, 0.0, None

class ChainedOptimizer(MegatronOptimizer):
    def __init__(self, chained_optimizers):
        self.chained_optimizers = chained_optimizers

    def step(self):
        return self.chained_optimizers[0].step()
""",
    "core/optimizer/distrib_optimizer.py": """
import types

class DistributedOptimizer:
    def __init__(self, parameter):
        self.model_float16_groups = [[parameter]]
        self.shard_float16_groups = [[None]]
        self.model_fp32_groups = [[]]
        self.shard_fp32_groups = [[]]
        self.shard_fp32_from_float16_groups = [[parameter.detach().float().view(-1)[3:7]]]
        self.optimizer = None

    def _get_model_param_range_map(self, parameter):
        return {"param": types.SimpleNamespace(start=3, end=7)}
""",
    "core/dist_checkpointing/serialization.py": """
import json
import pathlib

def save(sharded_state_dict, checkpoint_dir, async_sharded_save=False):
    pathlib.Path(checkpoint_dir, "common.json").write_text(json.dumps(sharded_state_dict))
""",
    "training/checkpointing.py": """
def load_checkpoint(optimizer):
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = parameter.detach() * 0 + 1
    optimizer.step()
""",
    "training/training.py": """
import types
import torch
from megatron.core.dist_checkpointing.serialization import save
from megatron.core.pipeline_parallel.schedules import custom_backward
from megatron.core.transformer.moe.moe_logging import TRACKER
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from .checkpointing import load_checkpoint

ARGS = types.SimpleNamespace(consumed_train_samples=0, skipped_train_samples=0, curr_iteration=0)

def get_args():
    return ARGS

def forward_backward(model, optimizer):
    losses = []
    for _ in range(2):
        loss = model(torch.randn(4, 4).bfloat16()).float().square().mean()
        TRACKER.record("load_balancing_loss", loss * 3, layer_number=2, num_layers=2)
        MTPLossLoggingHelper.save_metrics_to_tracker(loss * 5, 0)
        losses.append(loss.detach().clone())
        custom_backward(optimizer.scale_loss(loss), None)
    return losses

def train_step(model, optimizer, iteration=None):
    losses = forward_backward(model, optimizer)
    stepped, grad_norm, zeros = optimizer.step()
    return {"lm loss": torch.stack(losses).mean()}, int(not stepped), grad_norm

def dummy_train_step(batches):
    pass

def training_log(loss_dict, learning_rate, iteration, skipped_iter, grad_norm, writer=None):
    TRACKER.report(0.5, iteration, writer=writer)
    MTPLossLoggingHelper.track_mtp_metrics(0.5, iteration, writer)

def train(model, optimizer, folder, steps=4, skip=()):
    iteration = 0
    while iteration < steps:
        ARGS.curr_iteration = iteration
        if iteration in skip:
            dummy_train_step(None)
        else:
            optimizer.chained_optimizers[0].overflow = iteration == 2
            loss_dict, skipped_iter, grad_norm = train_step(model, optimizer, iteration=iteration)
        iteration += 1
        if iteration - 1 in skip:
            continue
        ARGS.consumed_train_samples += 8
        training_log(loss_dict, 0.01, iteration, skipped_iter, grad_norm)
        if iteration == 2:
            save({"iteration": iteration}, folder)
""",
}


def write(folder: Path, old: str = "", new: str = "") -> None:
    """Writes the package below `folder`, with a word of its text or the name of a file replaced everywhere."""
    word = re.compile(rf"\b{re.escape(old)}\b") if old else None
    for name, text in FILES.items():
        shown = word.sub(new, name) if word else name
        path = folder / "megatron" / shown
        for parent in [path.parent, *path.parent.parents]:
            if parent == folder:
                break
            parent.mkdir(parents=True, exist_ok=True)
            if not (parent / "__init__.py").exists():
                (parent / "__init__.py").write_text("")
        path.write_text(word.sub(new, text) if word else text)


def _made(folder: Path, names: dict[str, str]) -> tuple[Any, Any]:
    import torch
    import torch.distributed as dist
    from torch import nn

    sys.path.insert(0, str(folder))

    def found(module: str, name: str) -> Any:
        path = ".".join(names.get(part, part) for part in module.split("."))
        return getattr(__import__(path, fromlist=["x"]), names.get(name, name))

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found("megatron.core.parallel_state", "initialize_model_parallel")()
    found("megatron.core.tensor_parallel.random", "model_parallel_cuda_manual_seed")(5)
    found("megatron.core.transformer.moe.moe_utils", "TRACKER")
    found("megatron.core.transformer.multi_token_prediction", "MTPLossLoggingHelper")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).bfloat16()
    model.config = type("Config", (), {"num_moe_experts": 4, "mtp_num_layers": 1})  # type: ignore[assignment]
    mixed = found("megatron.core.optimizer.optimizer", "Float16OptimizerWithFloat16Params")(model.parameters(), 0.5)
    chained = found("megatron.core.optimizer.optimizer", "ChainedOptimizer")([mixed])
    chained.sharded = found("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer")(model[0].weight)
    return model, chained


def with_its_loop(folder: Path, names: dict[str, str], skip: tuple[int, ...] = (), restore: bool = False) -> None:
    """Trains four steps in the stand-in's own loop; the third overflows, and what was logged of it stays."""
    model, optimizer = _made(folder, names)
    path = ".".join(names.get(part, part) for part in ["megatron", "training", "training"])
    training = __import__(path, fromlist=["x"])
    if restore:
        training.load_checkpoint(optimizer.chained_optimizers[0].optimizer)
    training.train(model, optimizer, str(folder), skip=skip)


def with_a_loop_of_its_own(folder: Path, steps: int = 4, report_every: int = 1) -> None:
    """The same with Megatron Core alone."""
    import torch

    model, optimizer = _made(folder, {})
    from megatron.core.pipeline_parallel.schedules import custom_backward  # type: ignore[import-not-found]
    from megatron.core.transformer.moe.moe_logging import TRACKER  # type: ignore[import-not-found]

    for step in range(steps):
        for _ in range(2):
            loss = model(torch.randn(4, 4).bfloat16()).float().square().mean()
            TRACKER.record("load_balancing_loss", loss * 3, layer_number=2, num_layers=2)
            custom_backward(optimizer.scale_loss(loss), None)
        optimizer.chained_optimizers[0].overflow = step == 2
        optimizer.step()
        if (step + 1) % report_every == 0:
            TRACKER.report(0.5, step)
