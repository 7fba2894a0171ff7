"""Linear layers that compute with low-precision weights, each made from a full-precision master along one path.

The optimizer updates the master (`weight`). After every step `requantize` makes the low-precision copy anew, and the
next step computes with that copy; the gradient goes straight through to the master. A checkpoint holds masters and
scaling state, never the copy: after a load `rebuild` makes it from them, along the same path, to the same bits.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Iterator
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from detrun.workloads.hybrid.parallel import Ranks
from detrun.workloads.hybrid.settings import ModelSettings, SettingsError

AMAX_HISTORY = 8
E4M3 = torch.float8_e4m3fn
E4M3_MAX = torch.finfo(E4M3).max
MX_BLOCK = 32


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, exact: Tensor, low: Tensor) -> Tensor:  # noqa: ARG004
        return low.view_as(low)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def straight_through(exact: Tensor, low: Tensor) -> Tensor:
    """Value of `low`, gradient to `exact` as if nothing had been rounded. Both of one shape and dtype."""
    result: Tensor = _StraightThrough.apply(exact, low)  # type: ignore[no-untyped-call]
    return result


class LowPrecisionLinear(nn.Linear):
    """`nn.Linear` without bias whose forward reads `quantized`; `weight` is the full-precision master."""

    quantized: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.register_buffer("quantized", torch.empty(0), persistent=False)

    def requantize(self) -> None:
        """Make the low-precision copy at the end of a step, from the master as it is now."""
        raise NotImplementedError

    def rebuild(self) -> None:
        """Make the copy again after a load: same master, same scaling state, same bits."""
        raise NotImplementedError

    def dequantized(self) -> Tensor:
        """The values of the copy: float32 [outputs, inputs]."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, straight_through(self.weight, self.dequantized()))


class DelayedScale(nn.Module):
    """Scale of an E4M3 tensor from the greatest magnitudes of the last steps (FP8-LM, arXiv:2310.18313, section 2).

    Its two buffers are training state: a scale recomputed from the tensor of the moment is another one.
    """

    amax_history: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("amax_history", torch.zeros(AMAX_HISTORY))  # newest first; 0: no such step yet
        self.register_buffer("scale", torch.ones(()))

    def advance(self) -> None:
        """Set the scale from the history as it stands."""
        peak = self.amax_history.amax()
        self.scale = torch.where(peak > 0, E4M3_MAX / peak, self.scale)

    def note(self, amax: Tensor) -> None:
        """Push a step's greatest magnitude, 0-dim; the oldest one drops out."""
        self.amax_history = torch.cat([amax.reshape(1), self.amax_history[:-1]])

    def cast(self, x: Tensor) -> Tensor:
        """`x` times the scale, saturated, as float8_e4m3fn of the same shape."""
        return (x * self.scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)

    def restore(self, cast: Tensor) -> Tensor:
        """Inverse of `cast` but for what was rounded away: float32."""
        return cast.float() / self.scale


class Fp8Linear(LowPrecisionLinear):
    """E4M3 weights and inputs, one delayed scale each."""

    input_amax: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.weight_scaling = DelayedScale()
        self.input_scaling = DelayedScale()
        # Greatest magnitude of the step under way; zero between steps, so no checkpoint needs it.
        self.register_buffer("input_amax", torch.zeros(()), persistent=False)

    def requantize(self) -> None:
        with torch.no_grad():
            self.weight_scaling.advance()
            self.quantized = self.weight_scaling.cast(self.weight)
            self.weight_scaling.note(self.weight.abs().amax())
            if self.input_amax.any():
                self.input_scaling.note(self.input_amax)
                self.input_scaling.advance()
            self.input_amax = torch.zeros_like(self.input_amax)

    def rebuild(self) -> None:
        with torch.no_grad():
            self.quantized = self.weight_scaling.cast(self.weight)

    def dequantized(self) -> Tensor:
        return self.weight_scaling.restore(self.quantized)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.training:
                self.input_amax = torch.maximum(self.input_amax, x.abs().amax())
            low = self.input_scaling.restore(self.input_scaling.cast(x))
        return super().forward(straight_through(x, low))


class MxFp8Linear(LowPrecisionLinear):
    """E4M3 weights in blocks of 32 with power-of-two scales, rounded up so that no element saturates (RCEIL)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        torchao_formats("mx_tensor")  # now, not in the first step, if it is missing

    def convert(self, rounding: str = "RCEIL") -> Tensor:
        """The master as an MXTensor; `rounding` names a ScaleCalculationMode."""
        formats = torchao_formats("mx_tensor")
        mode = getattr(formats.ScaleCalculationMode, rounding)
        master = self.weight.detach()
        return cast(Tensor, formats.MXTensor.to_mx(master, E4M3, block_size=MX_BLOCK, scaling_mode=mode))

    def requantize(self) -> None:
        self.quantized = self.convert()

    rebuild = requantize

    def dequantized(self) -> Tensor:
        return cast(Any, self.quantized).dequantize(torch.float32)  # type: ignore[no-any-return]


class NvFp4Linear(LowPrecisionLinear):
    """E2M1 weights in blocks of 16 with E4M3 scales below one float32 scale for the tensor (two levels)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        torchao_formats("nvfp4_tensor")  # now, not in the first step, if it is missing

    def tensor_scale(self) -> Tensor:
        """The upper level: 0-dim float32."""
        amax = self.weight.detach().abs().amax()
        return cast(Tensor, torchao_formats("nvfp4_tensor").per_tensor_amax_to_scale(amax))

    def convert(self, tensor_scale: Tensor) -> Tensor:
        """The master as an NVFP4Tensor below the given upper scale."""
        master = self.weight.detach()
        formats = torchao_formats("nvfp4_tensor")
        return cast(Tensor, formats.NVFP4Tensor.to_nvfp4(master, per_tensor_scale=tensor_scale))

    def requantize(self) -> None:
        self.quantized = self.convert(self.tensor_scale())

    rebuild = requantize

    def dequantized(self) -> Tensor:
        return cast(Any, self.quantized).dequantize(torch.float32)  # type: ignore[no-any-return]


LAYERS: dict[str, type[LowPrecisionLinear]] = {"fp8": Fp8Linear, "mxfp8": MxFp8Linear, "nvfp4": NvFp4Linear}


def projection(settings: ModelSettings, inputs: int, outputs: int) -> nn.Linear:
    """A linear layer without bias in the precision that the settings ask for; weights are drawn alike in all."""
    layer = LAYERS.get(settings.low_precision)
    return nn.Linear(inputs, outputs, bias=False) if layer is None else layer(inputs, outputs)


def layers_of(model: nn.Module) -> Iterator[tuple[str, LowPrecisionLinear]]:
    """The low-precision layers with their names, in the model's order."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LowPrecisionLinear))


def requantize(model: nn.Module, ranks: Ranks) -> None:
    """End a step: agree on the inputs' magnitudes over all ranks, then make every low-precision copy anew.

    Every rank calls. Replicas see other inputs, yet must scale alike: a maximum has no order to depend on.
    """
    layers = [layer for _, layer in layers_of(model)]
    scaled = [layer for layer in layers if isinstance(layer, Fp8Linear)]
    if scaled:
        agreed = ranks.maximum(torch.stack([layer.input_amax for layer in scaled]))
        for fp8, amax in zip(scaled, agreed, strict=True):
            fp8.input_amax = amax.clone()
    for layer in layers:
        layer.requantize()


def rebuild(model: nn.Module) -> None:
    """Make every low-precision copy from what a checkpoint restored."""
    for _, layer in layers_of(model):
        layer.rebuild()


@functools.cache
def torchao_formats(module: str) -> ModuleType:
    """`torchao.prototype.mx_formats.<module>`. Raises SettingsError where torchao is missing or another one."""
    # It warns about kernels for GPUs that are not here; nothing here uses them.
    for chatty in ("torchao", "torch.utils._pytree"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    try:
        return importlib.import_module(f"torchao.prototype.mx_formats.{module}")
    except ImportError as error:
        raise SettingsError(
            f"--low-precision: mxfp8 and nvfp4 need torchao 0.18 ({error}): pip install 'detrun[low-precision]'"
        ) from error
