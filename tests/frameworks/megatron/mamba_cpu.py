"""Mamba-2 on the CPU for Megatron's HybridModel: plain-torch stand-ins for the CUDA/Triton
kernels of the package mamba_ssm, and a layer spec without Transformer Engine
(`--spec mamba_cpu local_hybrid_spec`). install() must run before
megatron is imported; mcore_train.py then sets local_hybrid_spec = make_spec()."""

import sys
import types

import torch
import torch.nn.functional as F


class RMSNorm(torch.nn.Module):
    def __init__(self, hidden, eps=1e-5, group_size=None, norm_before_gate=True, device=None, dtype=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden, dtype=dtype))
        self.eps, self.group = eps, group_size or hidden

    def forward(self, x, z=None):
        if z is not None:
            x = x * F.silu(z)
        g = x.float().unflatten(-1, (-1, self.group))
        g = g * torch.rsqrt(g.pow(2).mean(-1, keepdim=True) + self.eps)
        return (g.flatten(-2) * self.weight).to(x.dtype)


def _scan(x, dt, A, B, C, D):
    """x (b l h p), dt (b l h), A (h), B C (b l g n), D (h): the quadratic form of the SSD scan."""
    h, g = x.shape[2], B.shape[2]
    B, C = (t.repeat_interleave(h // g, dim=2).float() for t in (B, C))
    s = torch.cumsum(dt * A, dim=1)
    decay = (s[:, :, None] - s[:, None]).permute(0, 3, 1, 2)  # b h i j
    keep = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    m = torch.einsum("bihn,bjhn->bhij", C, B) * decay.masked_fill(~keep, float("-inf")).exp()
    y = torch.einsum("bhij,bjhp->bihp", m, x.float() * dt[..., None])
    return y + x.float() * D.reshape(h, -1)


def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, dt_softplus=False, **k):
    dt = dt.float() + (dt_bias if dt_bias is not None else 0)
    y = _scan(x, F.softplus(dt) if dt_softplus else dt, A, B, C, D)
    return (y if z is None else y * F.silu(z.float())).to(x.dtype)


def mamba_split_conv1d_scan_combined(
    zxbcdt,
    conv1d_weight,
    conv1d_bias,
    dt_bias,
    A,
    D,
    chunk_size,
    seq_idx=None,
    activation="silu",
    headdim=None,
    ngroups=1,
    norm_before_gate=False,
    **k,
):
    heads, width = A.shape[0], conv1d_weight.shape[-1]
    di = heads * headdim
    n = (conv1d_weight.shape[0] - di) // (2 * ngroups)
    z, xbc, dt = zxbcdt.split([di, di + 2 * ngroups * n, heads], dim=-1)
    c = F.conv1d(
        xbc.transpose(1, 2), conv1d_weight.unsqueeze(1), conv1d_bias, padding=width - 1, groups=conv1d_weight.shape[0]
    )[..., : xbc.shape[1]]
    x, B, C = F.silu(c).transpose(1, 2).split([di, ngroups * n, ngroups * n], dim=-1)
    y = _scan(
        x.unflatten(-1, (heads, headdim)),
        F.softplus(dt.float() + dt_bias),
        A,
        B.unflatten(-1, (ngroups, n)),
        C.unflatten(-1, (ngroups, n)),
        D,
    )
    return (y.flatten(-2) * F.silu(z.float())).to(zxbcdt.dtype)


def install():
    for name, attrs in {
        "mamba_ssm": {},
        "mamba_ssm.ops": {},
        "mamba_ssm.ops.triton": {},
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNorm},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": mamba_chunk_scan_combined,
            "mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
        },
    }.items():
        m = types.ModuleType(name)
        m.__path__ = []
        m.__dict__.update(attrs)
        sys.modules[name] = m


def make_spec():
    from functools import partial

    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
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

    hybrid_block.TENorm = Norm  # HybridStack asks for Transformer Engine's norm by name
    bda = get_bias_dropout_add
    return ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            mamba_layer=ModuleSpec(
                module=MambaLayer,
                submodules=MambaLayerSubmodules(
                    norm=Norm,
                    mixer=ModuleSpec(
                        module=MambaMixer,
                        submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
                    ),
                    mamba_bda=bda,
                ),
            ),
            attention_layer=ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=Norm,
                    self_attention=ModuleSpec(
                        module=SelfAttention,
                        params={"attn_mask_type": AttnMaskType.causal},
                        submodules=SelfAttentionSubmodules(
                            linear_qkv=ColumnParallelLinear,
                            core_attention=DotProductAttention,
                            linear_proj=RowParallelLinear,
                        ),
                    ),
                    self_attn_bda=bda,
                ),
            ),
            mlp_layer=ModuleSpec(
                module=MLPLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=Norm,
                    mlp=partial(
                        MLP.as_mlp_submodule,
                        submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
                    ),
                    mlp_bda=bda,
                ),
            ),
            moe_layer=ModuleSpec(
                module=MoETransformerLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=Norm,
                    mlp=get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=False),
                    mlp_bda=bda,
                ),
            ),
            mtp_block_spec=ModuleSpec(
                module=MultiTokenPredictionBlock,
                submodules=MultiTokenPredictionBlockSubmodules(
                    layer_specs=[
                        ModuleSpec(
                            module=MultiTokenPredictionLayer,
                            submodules=MultiTokenPredictionLayerSubmodules(
                                enorm=Norm,
                                hnorm=Norm,
                                eh_proj=ColumnParallelLinear,
                                mtp_model_layer=None,
                                layer_norm=Norm,
                            ),
                        )
                    ]
                ),
            ),
        ),
    )
