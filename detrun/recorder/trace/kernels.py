"""Level 5: what an operation launched: its sub-operators and, on a device, its kernels, in order, and the settings that
choose between them."""

from __future__ import annotations

import sys
from typing import Any

import torch

_MOST = 500
"""Entries that are kept of one operation."""


class Kernels:
    """From its construction to `end`, one operation is watched by torch's profiler. Where a profiler of the program's
    own runs, it is left alone, and only the settings are told."""

    def __init__(self) -> None:
        self._profiler: Any = None
        autograd: Any = torch.autograd
        if autograd._profiler_enabled():
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if _on_device():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(activities=activities, record_shapes=False, acc_events=False)
        profiler.start()
        self._profiler = profiler

    def end(self) -> list[dict[str, Any]]:
        """[{"kind": "op" | "kernel" | "setting", "name": …, …}], what was launched in the order of its beginning."""
        found: list[dict[str, Any]] = []
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            autograd: Any = torch.autograd
            profiler.stop()
            for event in sorted(profiler.events(), key=lambda event: (event.time_range.start, -event.time_range.end)):
                on_device = event.device_type != autograd.DeviceType.CPU
                if event.name.startswith(_OWN) or len(found) >= _MOST:
                    continue
                found.append({"kind": "kernel" if on_device else "op", "name": event.name})
        return found + [{"kind": "setting", "name": name, "value": value} for name, value in settings()]


_OWN = ("ProfilerStep", "[memory]", "[pytorch|profiler", "Activity Buffer Request", "cudaDeviceSynchronize")


def settings() -> list[tuple[str, str]]:
    """What decides which kernel is taken, as far as it can be read here; and the configurations that Triton's
    autotuners have picked in this process."""
    backends = torch.backends
    found = [
        ("cudnn.benchmark", backends.cudnn.benchmark),
        ("cudnn.deterministic", backends.cudnn.deterministic),
        ("cudnn.allow_tf32", backends.cudnn.allow_tf32),
        ("matmul.precision", torch.get_float32_matmul_precision()),
        ("mkldnn.enabled", backends.mkldnn.enabled),
        ("threads", torch.get_num_threads()),
        ("cpu.capability", backends.cpu.get_cpu_capability()),
    ]
    if _on_device():
        matmul = backends.cuda.matmul
        found += [
            ("blas", backends.cuda.preferred_blas_library()),
            ("matmul.bf16_reduction", matmul.allow_bf16_reduced_precision_reduction),
            ("matmul.fp16_reduction", matmul.allow_fp16_reduced_precision_reduction),
            ("tunable.enabled", torch.cuda.tunable.is_enabled()),
        ]
        if torch.cuda.tunable.is_enabled():
            results: Any = torch.cuda.tunable.get_results()
            found += [(f"tunable.{entry[0]}.{entry[1]}", entry[2]) for entry in results]
    return [(name, str(value)) for name, value in found] + triton_picks()


def _on_device() -> bool:
    cuda: Any = torch.cuda
    return bool(cuda.is_available() and cuda.is_initialized())


def triton_picks() -> list[tuple[str, str]]:
    """(autotuned function and key, configuration) of every Triton autotuner that the program's modules hold."""
    autotuner = sys.modules.get("triton.runtime.autotuner")
    kind = getattr(autotuner, "Autotuner", None)
    if kind is None:
        return []
    picks = []
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if isinstance(value, kind):
                picks += [(f"triton.{name}{key}", str(config)) for key, config in getattr(value, "cache", {}).items()]
    return sorted(set(picks))
