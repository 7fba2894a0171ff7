"""What a user's own pretrain script has (data, loss, configuration) around megatron-core's loop, for a tiny GPT, a
mixture of experts or a hybrid.

MEGATRON_REPAIR=load lets the distributed optimizer be restored without Transformer Engine; MEGATRON_REPAIR=step also
gives Adam its own step back (see `repair_distributed_optimizer`).
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

import megatron.core.datasets.utils as datasets_utils
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import (
    gpt_config_from_args,
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args


def loss_func(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The sum of the losses, the number of tokens, and what Megatron reports: both in one tensor."""
    loss = torch.sum(output.view(-1).float() * mask.view(-1))
    tokens = mask.sum().clone().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), tokens.view(1)])}


def forward_step(batches: Any, model: Any) -> Any:
    batch = next(batches)
    mask = batch["loss_mask"].float()
    attention = batch.get("attention_mask")
    output = model(batch["tokens"], batch["position_ids"], attention, labels=batch["labels"], loss_mask=mask)
    return output, partial(loss_func, mask)


def datasets(counts: Any, vp_stage: int | None = None) -> Any:
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None,
        blend_per_split=None,
        split=args.split,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, counts, lambda: True, config).build()


datasets.is_distributed = True  # type: ignore[attr-defined]


def embedding_ranks(pipeline: list[int]) -> list[int]:
    args, ranks = get_args(), {pipeline[0]}
    if len(pipeline) > 1:
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pipeline[-1])
        ranks.update(get_mtp_ranks(pipeline, core_transformer_config_from_args(args)))
    return sorted(ranks)


def repair_distributed_optimizer(*, step: bool) -> None:
    """Without Transformer Engine or Apex, `DistributedOptimizer.state_dict()` insists on one common step of Adam, which
    a fresh torch Adam has none of, and loading copies into leaves with gradients on: a resume fails. Give it a first
    step and `no_grad`. Then all parameters share one tensor as their step, the dummy's; `step` gives each the saved
    one."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    save, load = DistributedOptimizer.sharded_state_dict, torch.no_grad()(DistributedOptimizer.load_state_dict)

    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.optimizer.state:
            self._init_optimizer_states_with_dummy_values()
        return save(self, *args, **kwargs)

    def load_state_dict(self: Any, saved: Any) -> None:
        load(self, saved)
        if step:
            for state in self.optimizer.state.values():
                state["step"] = torch.tensor(float(saved["optimizer"]["param_groups"][0]["step"]))

    DistributedOptimizer.sharded_state_dict, DistributedOptimizer.load_state_dict = sharded_state_dict, load_state_dict


def main() -> None:
    datasets_utils.compile_helpers = lambda: (
        None
    )  # the wheel has no Makefile; the helper was built when it was installed
    if repair := os.environ.get("MEGATRON_REPAIR"):
        repair_distributed_optimizer(step=repair == "step")
    if "mamba_cpu" in sys.modules:
        sys.modules["mamba_cpu"].specify()
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    config = (hybrid_config_from_args if args.hybrid_layer_pattern else gpt_config_from_args)(args)
    container = pretrain_cfg_container_from_args(args, config)
    pretrain(container, datasets, ModelType.encoder_or_decoder, forward_step, get_embedding_ranks=embedding_ranks)
