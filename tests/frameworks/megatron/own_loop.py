"""Trains a tiny mixture of experts with Megatron Core and a loop of its own, which saves and loads by
`dist_checkpointing` and logs every second step."""

from __future__ import annotations

import argparse
import os
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import cuda_on_cpu

VOCABULARY, LENGTH = 128, 16


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--steps", "--seed", "--save-every"):
        parser.add_argument(name, type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--load", type=Path)
    parser.add_argument("--keep-streams", action="store_true", help="also those of tensor and expert parallelism")
    options = parser.parse_args()
    cuda_on_cpu.install()
    import torch
    from megatron.core import parallel_state, tensor_parallel

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    random.seed(options.seed)
    torch.manual_seed(options.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(options.seed)
    train(options)
    torch.distributed.destroy_process_group()


def model_of() -> Any:
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_aux_loss_coeff=0.01,
        moe_router_load_balancing_type="aux_loss",
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=2,
        add_bias_linear=False,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=False,
    )
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
    )
    return DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)


def loss_of(output: Any) -> Any:
    loss = output.float().mean()
    return loss, {"lm loss": loss.detach().clone().view(1)}


def forward(batches: Any, model: Any) -> Any:
    import torch

    tokens = next(batches)
    positions = torch.arange(LENGTH).expand_as(tokens)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    return model(tokens, positions, mask, labels=tokens.roll(-1, 1)), partial(loss_of)


def train(options: argparse.Namespace) -> None:
    import torch
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.transformer.moe.moe_utils import track_moe_metrics

    model = model_of()
    model.train()
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0), [model])
    config = model.module.config
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    data = torch.Generator().manual_seed(options.seed + parallel_state.get_data_parallel_rank())
    tracker, done = get_cuda_rng_tracker(), 0

    def state(*, loading: bool) -> dict[str, Any]:
        own = model.module.sharded_state_dict()
        rank = torch.distributed.get_rank()
        streams = {"torch": torch.get_rng_state(), "data": data.get_state(), "parallel": tracker.get_states()}
        kept = dist_checkpointing.mapping.ShardedObject("streams", streams, (2,), (rank,))
        return {
            "model": own,
            "optimizer": optimizer.sharded_state_dict(own, is_loading=loading),
            "streams": kept,
            "done": done,
        }

    if options.load:
        found = dist_checkpointing.load(state(loading=True), str(options.load))
        model.module.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        torch.set_rng_state(found["streams"]["torch"])
        data.set_state(found["streams"]["data"])
        if options.keep_streams:
            tracker.set_states(found["streams"]["parallel"])
        done = found["done"]

    def batches() -> Any:
        while True:
            yield torch.randint(0, VOCABULARY, (2, LENGTH), generator=data)

    source, run = batches(), get_forward_backward_func()
    while done < options.steps:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        run(
            forward_step_func=forward,
            data_iterator=source,
            model=[model],
            num_microbatches=2,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )
        optimizer.step()
        done += 1
        if done % 2 == 0:
            track_moe_metrics(loss_scale=0.5, iteration=done, num_layers=2)
        if options.save_every and done % options.save_every == 0:
            folder = options.out / f"step-{done}"
            if torch.distributed.get_rank() == 0:
                os.makedirs(folder)  # noqa: PTH103
            torch.distributed.barrier()
            dist_checkpointing.save(state(loading=False), str(folder))


if __name__ == "__main__":
    main()
