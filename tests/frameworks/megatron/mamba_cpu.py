"""Mamba-2 on the CPU for Megatron's hybrid model: plain-torch stand-ins for the kernels of the package mamba_ssm, and a
layer specification without Transformer Engine (`--spec mamba_cpu local_hybrid_spec`)."""

from __future__ import annotations

import sys
import types
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNorm(torch.nn.Module):
    def __init__(self, hidden: int, eps: float = 1e-5, group_size: int | None = None, **options: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden, dtype=options.get("dtype")))
        self.eps, self.group = eps, group_size or hidden

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        if z is not None:
            x = x * F.silu(z)
        grouped = x.float().unflatten(-1, (-1, self.group))
        grouped = grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + self.eps)
        return (grouped.flatten(-2) * self.weight).to(x.dtype)


def _scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """x (batch length heads width), dt (batch length heads), a (heads), b and c (batch length groups states), d
    (heads): the quadratic form of the scan."""
    heads, groups = x.shape[2], b.shape[2]
    b, c = (part.repeat_interleave(heads // groups, dim=2).float() for part in (b, c))
    total = torch.cumsum(dt * a, dim=1)
    decay = (total[:, :, None] - total[:, None]).permute(0, 3, 1, 2)
    keep = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    mixed = torch.einsum("bihn,bjhn->bhij", c, b) * decay.masked_fill(~keep, float("-inf")).exp()
    return torch.einsum("bhij,bjhp->bihp", mixed, x.float() * dt[..., None]) + x.float() * d.reshape(heads, -1)


def mamba_chunk_scan_combined(*args: Any, **kwargs: Any) -> Tensor:
    raise NotImplementedError("only in inference")


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    dt_bias: Tensor,
    a: Tensor,
    D: Tensor,
    chunk_size: int,
    **options: Any,
) -> Tensor:
    heads, width, groups = a.shape[0], conv1d_weight.shape[-1], options["ngroups"]
    inner = heads * options["headdim"]
    states = (conv1d_weight.shape[0] - inner) // (2 * groups)
    z, xbc, dt = zxbcdt.split([inner, inner + 2 * groups * states, heads], dim=-1)
    weight = conv1d_weight.unsqueeze(1)
    mixed = F.conv1d(xbc.transpose(1, 2), weight, conv1d_bias, padding=width - 1, groups=len(weight))
    mixed = F.silu(mixed[..., : xbc.shape[1]]).transpose(1, 2)
    x, b, c = mixed.split([inner, groups * states, groups * states], dim=-1)
    parts = (x.unflatten(-1, (heads, -1)), F.softplus(dt.float() + dt_bias), a)
    y = _scan(*parts, b.unflatten(-1, (groups, states)), c.unflatten(-1, (groups, states)), D)
    return (y.flatten(-2) * F.silu(z.float())).to(zxbcdt.dtype)


def install() -> None:
    """Before megatron is imported."""
    scans = {function.__name__: function for function in (mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined)}
    names: dict[str, dict[str, Any]] = {
        "mamba_ssm": {},
        "mamba_ssm.ops": {},
        "mamba_ssm.ops.triton": {},
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNorm},
        "mamba_ssm.ops.triton.ssd_combined": scans,
    }
    for name, contents in names.items():
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(contents)
        sys.modules[name] = module


def specify() -> None:
    """Once megatron was imported: makes what `--spec` asks for."""
    globals()["local_hybrid_spec"] = _specification()


def _specification() -> Any:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add as add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlock,
        MultiTokenPredictionBlockSubmodules,
        MultiTokenPredictionLayer,
        MultiTokenPredictionLayerSubmodules,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm as Norm
    from megatron.core.transformer.transformer_layer import (
        MoETransformerLayer,
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    hybrid_block.TENorm = Norm  # which names Transformer Engine's, whatever the specification says
    mixer = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    mamba = MambaLayerSubmodules(norm=Norm, mixer=ModuleSpec(module=MambaMixer, submodules=mixer), mamba_bda=add)
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
        ),
    )
    dense = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    experts = get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=False)
    depth = MultiTokenPredictionLayerSubmodules(
        enorm=Norm, hnorm=Norm, eh_proj=ColumnParallelLinear, mtp_model_layer=None, layer_norm=Norm
    )
    depths = MultiTokenPredictionBlockSubmodules(
        layer_specs=[ModuleSpec(module=MultiTokenPredictionLayer, submodules=depth)]
    )

    def layer(module: Any, **parts: Any) -> Any:
        return ModuleSpec(module=module, submodules=TransformerLayerSubmodules(**parts))

    return ModuleSpec(
        module=hybrid_block.HybridStack,
        submodules=hybrid_block.HybridStackSubmodules(
            mamba_layer=ModuleSpec(module=MambaLayer, submodules=mamba),
            attention_layer=layer(TransformerLayer, input_layernorm=Norm, self_attention=attention, self_attn_bda=add),
            mlp_layer=layer(
                MLPLayer, pre_mlp_layernorm=Norm, mlp=partial(MLP.as_mlp_submodule, submodules=dense), mlp_bda=add
            ),
            moe_layer=layer(MoETransformerLayer, pre_mlp_layernorm=Norm, mlp=experts, mlp_bda=add),
            mtp_block_spec=ModuleSpec(module=MultiTokenPredictionBlock, submodules=depths),
        ),
    )
