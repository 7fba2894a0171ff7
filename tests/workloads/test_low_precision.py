"""Low-precision layers: one conversion path from the masters, delayed scales, gradients to the masters."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from detrun.workloads.hybrid import low_precision
from detrun.workloads.hybrid.low_precision import AMAX_HISTORY, E4M3_MAX, LAYERS, Fp8Linear, requantize
from detrun.workloads.hybrid.model import HybridModel
from detrun.workloads.hybrid.parallel import Ranks
from detrun.workloads.hybrid.settings import ModelSettings, SettingsError

from .conftest import Run

ALONE = Ranks(0, 1, torch.device("cpu"))
STATE_OF_FP8 = {f"{kind}_scaling.{name}" for kind in ("weight", "input") for name in ("amax_history", "scale")}


def bits(packed: Tensor) -> list[bytes]:
    flat = (
        [getattr(packed, name) for name in packed.__tensor_flatten__()[0]]
        if packed.dtype == torch.float32
        else [packed]
    )
    return [part.reshape(-1).view(torch.uint8).numpy().tobytes() for part in flat]


@pytest.mark.parametrize("precision", LAYERS)
def test_a_layer_computes_with_its_copy_and_trains_its_master(precision: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[precision](64, 16)
    for _ in range(2):
        layer.requantize()
    low = layer.dequantized()
    assert (low != layer.weight).any()
    torch.testing.assert_close(low, layer.weight.detach(), atol=0.025, rtol=0.0)  # half of E2M1's widest step
    x = (torch.randint(-8, 8, (5, 64)) / 4).requires_grad_()  # exact in E4M3 too
    upstream = torch.randn(5, 16)
    result = layer(x)
    assert torch.equal(result, functional.linear(x, low))
    (result * upstream).sum().backward()
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, upstream.T @ x.detach())
    assert x.grad is not None
    torch.testing.assert_close(x.grad, upstream @ low)


@pytest.mark.parametrize("precision", LAYERS)
def test_a_copy_is_not_saved_and_is_rebuilt_to_the_same_bits(precision: str) -> None:
    torch.manual_seed(0)
    layer, other = LAYERS[precision](64, 16), LAYERS[precision](64, 16)
    for _ in range(3):
        layer.requantize()
        with torch.no_grad():
            layer.weight.mul_(0.9)
    layer.requantize()
    saved = layer.state_dict()
    assert saved.keys() - {"weight"} == (STATE_OF_FP8 if precision == "fp8" else set())
    other.load_state_dict(saved)
    other.rebuild()
    assert bits(other.quantized) == bits(layer.quantized)


def test_a_copy_stays_as_it_was_made_until_the_step_ends() -> None:
    layer = LAYERS["mxfp8"](64, 16)
    layer.requantize()
    before = layer.dequantized()
    with torch.no_grad():
        layer.weight.zero_()
    assert torch.equal(layer.dequantized(), before)


def test_fp8_scales_follow_the_greatest_magnitude_of_eight_steps() -> None:
    layer = Fp8Linear(4, 4)
    layer.weight.data = torch.full((4, 4), 2.0)
    layer.requantize()
    assert layer.weight_scaling.scale == 1.0  # nothing was seen before
    layer.weight.data = torch.full((4, 4), 0.5)
    for _ in range(AMAX_HISTORY):
        layer.requantize()
        assert layer.weight_scaling.scale == E4M3_MAX / 2.0
    layer.requantize()
    assert layer.weight_scaling.scale == E4M3_MAX / 0.5


def test_fp8_inputs_are_scaled_by_steps_before_and_saturate() -> None:
    layer = Fp8Linear(4, 4)
    layer.weight.data = torch.eye(4)
    layer.requantize()
    x = torch.full((1, 4), 1000.0)
    assert torch.equal(layer(x), torch.full((1, 4), E4M3_MAX))
    layer.requantize()
    assert layer.input_scaling.scale == E4M3_MAX / 1000.0
    assert layer.input_amax == 0.0
    torch.testing.assert_close(layer(x), x)


def test_ranks_agree_on_input_magnitudes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = HybridModel(ModelSettings(pattern="*", width=32, head_size=16, low_precision="fp8"))
    layers = [layer for _, layer in low_precision.layers_of(model)]
    assert len(layers) == 5  # two of attention, the multi-token head's projection and its two of attention
    monkeypatch.setattr(Ranks, "maximum", lambda _, values: values + 7.0)
    requantize(model, ALONE)
    for layer in layers:
        assert isinstance(layer, Fp8Linear)
        assert layer.input_scaling.amax_history[0] == 7.0


def test_training_in_low_precision_is_close_and_not_the_same(run: Run) -> None:
    exact = run(steps=3)[3]["metric:loss"]
    for precision in LAYERS:
        low = run("--low-precision", precision, steps=3)[3]["metric:loss"]
        values = torch.tensor([list(bytes.fromhex(text)) for text in (exact, low)], dtype=torch.uint8).view(
            torch.float32
        )
        assert low != exact
        assert abs(values[0] - values[1]) < 0.05


def test_without_torchao_the_remedy_is_named(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    low_precision.torchao_formats.cache_clear()
    monkeypatch.setattr(importlib, "import_module", fail)
    assert run("--low-precision", "nvfp4") == {}
    error = capsys.readouterr().err
    assert "need torchao" in error
    assert "pip install 'detrun[low-precision]'" in error
    assert len(run("--low-precision", "fp8", steps=1)) == 1


def test_blocks_must_fit_the_width() -> None:
    with pytest.raises(SettingsError, match=r"--width 48: must be a multiple of 32 with --low-precision mxfp8"):
        ModelSettings(width=48, head_size=16, low_precision="mxfp8")
