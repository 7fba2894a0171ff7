"""`torchtitan.train` on the CPU with gloo: `titan_on_cpu.py ARGUMENTS OF TORCHTITAN`. No file of torchtitan is edited.

torchtitan asks torch for the accelerator and takes cuda where there is none; attention is FlexAttention, which has no
backward pass on the CPU; FSDP's scaled reduction is one that gloo has not; triton, which it imports, may be missing.
Each gets an answer here, before torchtitan is imported. Nothing is recorded here: that is detrun's part.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
import types
from typing import Any, ClassVar

import torch
import torch._utils
import torch.distributed

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


class _Cpu:
    """`torch.cpu`, and of `torch.cuda`'s interface what torchtitan calls."""

    _ANSWERS: ClassVar[dict[str, Any]] = {
        "current_device": lambda *_: 0,
        "get_device_name": lambda *_: "cpu",
        "get_device_properties": lambda *_: type("Properties", (), {"total_memory": 1 << 34, "name": "cpu"})(),
        "memory_stats": lambda *_: {},
    }

    def __getattr__(self, name: str) -> Any:
        if name in self._ANSWERS:
            return self._ANSWERS[name]
        return getattr(torch.cpu, name, lambda *_, **__: None)


def _be_the_accelerator() -> None:
    cpu, others = _Cpu(), torch._utils._get_device_module
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda kind: cpu if kind == "cpu" else others(kind)
    if not hasattr(torch.distributed, "set_timeout"):  # newer than torch 2.13
        torch.distributed.set_timeout = lambda *_, **__: None


class _Anything:
    """Stands for whatever a module of kernels names at its top; as a decorator it leaves the function alone."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _Anything()

    def __getitem__(self, key: Any) -> Any:
        return self


class _NoTriton:
    """Finds an empty `triton` with all its parts: its kernels are declared at import, and none runs on the CPU."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] == "triton":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return types.ModuleType(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__version__ = "0.0"
        module.__getattr__ = self._part

    @staticmethod
    def _part(name: str) -> Any:
        if name[0].isupper():  # torch asks whether something is a `JITFunction`
            return type(name, (), {})
        return _Anything().__getattr__(name)


def _do_without_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        import torch._inductor.runtime.triton_compat  # noqa: F401 - torch finds none, and remembers

        sys.meta_path.append(_NoTriton())


def _sum_gradients() -> None:
    from torch.distributed.fsdp import FSDPModule

    original = FSDPModule.set_gradient_divide_factor

    def set_gradient_divide_factor(self: Any, factor: float) -> None:
        self.set_force_sum_reduction_for_comms(True)
        original(self, factor)

    FSDPModule.set_gradient_divide_factor = set_gradient_divide_factor


def _attend_densely() -> None:
    from torch.nn.attention import flex_attention
    from torch.nn.functional import scaled_dot_product_attention
    from torchtitan.models.common.attention import FlexAttention

    def attend(
        q: Any, k: Any, v: Any, *, block_mask: Any, scale: Any = None, enable_gqa: bool = False, **_: Any
    ) -> Any:
        mask = flex_attention.create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device="cpu")
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
        return out, flex_attention.AuxOutput(lse=None)

    FlexAttention._compiled_flex_attn = staticmethod(attend)


if __name__ == "__main__":
    _be_the_accelerator()
    _do_without_triton()
    _sum_gradients()
    _attend_densely()
    for tool in ("nudge", "census"):  # tests/frameworks/tools is on the path
        if tool.upper() in os.environ:
            importlib.import_module(tool).install()
    from torchtitan.train import main

    main()
