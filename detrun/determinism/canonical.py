"""The canonical environment and the torch settings of `determinism: strict`, and what is in force.

The variables must be set before the process starts (CUBLAS_WORKSPACE_CONFIG is read when the context is made, NCCL's
when a communicator is), so the launcher sets them and the recorder applies torch's settings as soon as torch is
imported. The table follows Megatron-LM's `--deterministic-mode` (megatron/training/determinism.py).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """One environment variable: what detrun sets where the user set nothing, and what it lets stand."""

    name: str
    value: str
    accepts: Callable[[str], bool]
    accepted: str
    why: str


def _only(*values: str) -> Callable[[str], bool]:
    return lambda text: text in values


def _nccl_algorithms(text: str) -> bool:
    fixed = {"ring", "collnetdirect", "collnetchain", "^nvls"}
    tokens = [token.strip().lower() for token in text.split(",")]
    return all(token in fixed for token in tokens)


RULES = (
    Rule(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8", _only(":4096:8", ":16:8"), ":4096:8 or :16:8",
        "with other workspaces cuBLAS may choose another reduction in the same process",
    ),
    Rule(
        "NCCL_ALGO", "Ring", _nccl_algorithms, "Ring, CollnetDirect, CollnetChain or ^NVLS",
        "NCCL's own choice depends on message size and topology, and trees reduce in another order",
    ),
    Rule(
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0", _only("0"), "0",
        "attention's backward otherwise adds with atomics",
    ),
    Rule(
        "MAMBA_DETERMINISTIC", "1", lambda text: text.startswith("1"), "1",
        "the selective scan's backward otherwise adds with atomics",
    ),
    Rule(
        "CAUSAL_CONV1D_DETERMINISTIC", "1", lambda text: text.startswith("1"), "1",
        "the convolution's backward otherwise adds with atomics",
    ),
)  # fmt: skip


def canonical_environment() -> dict[str, str]:
    """The variables of `determinism: strict`; a value the user set that `check_environment` accepts stands."""
    return {rule.name: rule.value for rule in RULES}


def check_environment(env: Mapping[str, str]) -> list[str]:
    """A sentence for each variable in `env` whose value forbids a repeatable run; empty if all may stand.

    What is not set is no problem: it will be set.
    """
    return [
        f"{rule.name}={env[rule.name]} cannot be repeated bit for bit ({rule.why}): "
        f"unset it or set it to {rule.accepted}, or use `determinism: observe`"
        for rule in RULES
        if rule.name in env and not rule.accepts(env[rule.name])
    ]


def apply_torch_settings(*, fill: bool = True) -> None:
    """Switch torch to deterministic algorithms; an operation that has none raises when it is used.

    fill: whether this also fills memory that nothing has written, as torch does by itself. Called right after torch
    was imported. A program may still switch it off: `torch_settings_in_force` tells.
    """
    import torch

    torch.use_deterministic_algorithms(True)
    if not fill:
        vars(torch.utils)["deterministic"].fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.mkldnn.deterministic = True  # type: ignore[assignment]


def torch_settings_in_force() -> dict[str, Any]:
    """Every torch switch that may change bits, as it is now: flag → bool, number, or string. Initializes no device."""
    import torch

    backends: Any = torch.backends
    cuda, cudnn, mkldnn, matmul = backends.cuda, backends.cudnn, backends.mkldnn, backends.cuda.matmul
    flags: dict[str, Callable[[], Any]] = {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled,
        "fill_uninitialized_memory": lambda: vars(torch.utils)["deterministic"].fill_uninitialized_memory,
        "default_dtype": lambda: str(torch.get_default_dtype()).removeprefix("torch."),
        "float32_matmul_precision": torch.get_float32_matmul_precision,
        "num_threads": torch.get_num_threads,
        "num_interop_threads": torch.get_num_interop_threads,
        "flush_denormal": _flushes_denormals,
        "cudnn.benchmark": lambda: cudnn.benchmark,
        "cudnn.benchmark_limit": lambda: cudnn.benchmark_limit,
        "cudnn.deterministic": lambda: cudnn.deterministic,
        "cudnn.enabled": lambda: cudnn.enabled,
        "cudnn.allow_tf32": lambda: cudnn.allow_tf32,
        "cuda.matmul.allow_tf32": lambda: matmul.allow_tf32,
        "cuda.matmul.allow_fp16_reduced_precision_reduction":
            lambda: matmul.allow_fp16_reduced_precision_reduction,
        "cuda.matmul.allow_bf16_reduced_precision_reduction":
            lambda: matmul.allow_bf16_reduced_precision_reduction,
        "cuda.matmul.allow_fp16_accumulation": lambda: matmul.allow_fp16_accumulation,
        "cuda.matmul.fp32_precision": lambda: matmul.fp32_precision,
        "cudnn.conv.fp32_precision": lambda: cudnn.conv.fp32_precision,
        "cudnn.rnn.fp32_precision": lambda: cudnn.rnn.fp32_precision,
        "mkldnn.matmul.fp32_precision": lambda: mkldnn.matmul.fp32_precision,
        "mkldnn.conv.fp32_precision": lambda: mkldnn.conv.fp32_precision,
        "mkldnn.rnn.fp32_precision": lambda: mkldnn.rnn.fp32_precision,
        "cuda.flash_sdp": lambda: cuda.flash_sdp_enabled(),
        "cuda.mem_efficient_sdp": lambda: cuda.mem_efficient_sdp_enabled(),
        "cuda.math_sdp": lambda: cuda.math_sdp_enabled(),
        "cuda.cudnn_sdp": lambda: cuda.cudnn_sdp_enabled(),
        "cuda.fp16_bf16_reduction_math_sdp": lambda: cuda.fp16_bf16_reduction_math_sdp_allowed(),
        "cuda.preferred_blas_library": lambda: str(cuda.preferred_blas_library()) if _has_cuda() else None,
        "mkldnn.enabled": lambda: mkldnn.enabled,
        "mkldnn.deterministic": lambda: mkldnn.deterministic,
        "inductor.deterministic": lambda: _inductor("deterministic"),
        "inductor.batch_invariant": lambda: _inductor("batch_invariant"),
    }  # fmt: skip
    with warnings.catch_warnings():
        # Some versions warn that a switch has a newer name; the program did not ask for it.
        warnings.simplefilter("ignore")
        return {name: _read(read) for name, read in flags.items()}


def _read(read: Callable[[], Any]) -> Any:
    try:
        value = read()
    except (AttributeError, KeyError, RuntimeError, ImportError):
        return None  # this build or version of torch has no such switch
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _has_cuda() -> bool:
    import torch

    return bool(torch.version.cuda or torch.version.hip)


def _flushes_denormals() -> bool:
    # The smallest normal number halved is subnormal; it reads as zero where denormals are flushed.
    import torch

    return bool(torch.full((1,), 2.0**-126, dtype=torch.float32, device="cpu").div_(2).item() == 0.0)


def _inductor(name: str) -> Any:
    # Looked up only where it is imported already: the compiler takes seconds to import.
    config = sys.modules.get("torch._inductor.config")
    return getattr(config, name, None) if config is not None else None
