"""Makes Megatron, which asks for a GPU everywhere, run on a CPU build of torch: `install()` patches torch in this
process and edits no file of the framework.

Every request for a CUDA device is served by the CPU; streams and events do nothing; the CUDA generator is torch's CPU
generator. Callers whose module's name begins with one of `FRAMEWORK` see a machine with GPUs. torch itself and every
other library, the recorder too, go on seeing a machine without, so that loaders do not pin memory, Adam does not fuse,
and so on.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

FRAMEWORK = ("megatron", "__main__", "pretrain_", "gpt_builders", "hybrid_builders")

FACTORIES = [
    "tensor",
    "as_tensor",
    "empty",
    "zeros",
    "ones",
    "full",
    "arange",
    "rand",
    "randn",
    "randint",
    "randperm",
    "eye",
    "linspace",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "empty_strided",
    "scalar_tensor",
]
METHODS = ["new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"]


def install() -> None:
    """Before megatron is imported."""
    if not hasattr(typing, "override"):  # Python 3.11: megatron-core from 0.17 on imports it
        typing.override = lambda function: function  # type: ignore[attr-defined]
    import torch
    import torch._inductor.runtime.triton_compat

    if importlib.util.find_spec("triton") is None:
        sys.meta_path.append(_NoTriton())
    _tensors(torch)
    _devices(torch)
    _random(torch)


def _asked_by_framework() -> bool:
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith(FRAMEWORK)


def _tensors(torch: Any) -> None:
    cpu = torch.device("cpu")

    def here(device: Any) -> Any:
        if isinstance(device, bool) or device is None:
            return device
        if isinstance(device, int) or str(device).startswith("cuda"):
            return cpu
        return device

    def made_here(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def make(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("device") is not None:
                kwargs["device"] = here(kwargs["device"])
            return function(*args, **kwargs)

        return make

    def moved_here(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def to(self: Any, *args: Any, **kwargs: Any) -> Any:
            if args and not isinstance(args[0], (torch.Tensor, torch.dtype)):
                args = (here(args[0]), *args[1:])
            if "device" in kwargs:
                kwargs["device"] = here(kwargs["device"])
            return function(self, *args, **kwargs)

        return to

    for owner, names in ((torch, FACTORIES), (torch.Tensor, METHODS)):
        for name in names:
            setattr(owner, name, made_here(getattr(owner, name)))
    torch.Tensor.to, torch.nn.Module.to = moved_here(torch.Tensor.to), moved_here(torch.nn.Module.to)

    type_of, is_cuda, load = torch.Tensor.type, torch.Tensor.is_cuda, torch.load

    def type_(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return type_of(self, dtype, *args, **kwargs)
        name = type_of(self)
        return name.replace("torch.", "torch.cuda.", 1) if _asked_by_framework() else name

    torch.Tensor.type = type_  # the optimizer insists on torch.cuda.FloatTensor
    torch.Tensor.is_cuda = property(lambda self: _asked_by_framework() or is_cuda.__get__(self))
    torch.Tensor.cuda = torch.nn.Module.cuda = torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = lambda self, *args, **kwargs: None
    torch.load = lambda f, map_location=None, **kwargs: load(f, map_location=here(map_location), **kwargs)


def _devices(torch: Any) -> None:
    cuda, cpu = torch.cuda, torch.device("cpu")
    available, count = cuda.is_available, cuda.device_count

    class Nothing:
        """A stream or an event."""

        cuda_stream, device = 0, cpu

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        def wait_stream(self, *args: Any) -> None:
            pass

        wait_event = wait = synchronize = record = wait_stream

        def record_event(self, *args: Any) -> Nothing:
            return Nothing()

        def query(self) -> bool:
            return True

        def elapsed_time(self, other: Any) -> float:
            return 0.0

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return (0, 0)

        def __enter__(self) -> Nothing:
            return self

        def __exit__(self, *args: Any) -> None:
            pass

    class Zeros(dict[str, int]):
        def __missing__(self, key: str) -> int:
            return 0

    def nothing(*args: Any, **kwargs: Any) -> Any:
        return None

    def within(*args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext()

    cuda.is_available = lambda: _asked_by_framework() or available()
    cuda.device_count = lambda: 8 if _asked_by_framework() else count()
    cuda.current_device = lambda: cpu
    cuda.get_device_capability = lambda *args, **kwargs: (8, 0)
    cuda.get_device_name = lambda *args, **kwargs: "cpu"
    cuda.get_device_properties = lambda *args, **kwargs: types.SimpleNamespace(
        name="cpu", major=8, minor=0, total_memory=1 << 34, multi_processor_count=1
    )
    for name in [
        "set_device",
        "synchronize",
        "empty_cache",
        "set_stream",
        "reset_peak_memory_stats",
        "check_error",
        "_lazy_init",
    ]:
        setattr(cuda, name, nothing)
    for name in ["memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"]:
        setattr(cuda, name, lambda *args, **kwargs: 0)
    cuda.memory_stats = lambda *args, **kwargs: Zeros()
    cuda.is_current_stream_capturing = lambda: False
    cuda.Stream = cuda.Event = Nothing
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: Nothing()
    cuda.stream = cuda.device = cuda.nvtx.range = within
    cuda.nvtx.range_push = cuda.nvtx.range_pop = cuda.nvtx.mark = nothing
    cuda.cudart = lambda: types.SimpleNamespace(cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0)
    cuda._lazy_call = lambda function, **kwargs: function()


def _random(torch: Any) -> None:
    cuda = torch.cuda
    get_state, set_state = torch.get_rng_state, torch.set_rng_state
    cuda.manual_seed = torch.default_generator.manual_seed  # torch.manual_seed would call it again
    cuda.manual_seed_all = lambda seed: None
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *args, **kwargs: get_state()
        module.set_rng_state = lambda state, *args, **kwargs: set_state(state)
    cuda.default_generators = type("Generators", (), {"__getitem__": lambda self, index: torch.default_generator})()

    # On a GPU the seed that a loader draws leaves the CUDA generator alone. Here they are one: put it back.
    from torch.utils.data import dataloader

    make = dataloader._BaseDataLoaderIter.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        state = get_state()
        make(self, *args, **kwargs)
        set_state(state)

    dataloader._BaseDataLoaderIter.__init__ = init


class _Stub:
    """Anything of triton's: called, indexed and read, it is itself; as a decorator it leaves the function alone."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    def __getitem__(self, key: Any) -> _Stub:
        return self


class _StubModule(types.ModuleType):
    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():  # torch asks isinstance() of some of them
            setattr(self, name, type(name, (), {"__init__": _keep}))
            return self.__dict__[name]
        return _Stub()


def _keep(self: Any, settings: Any = None, *args: Any, **kwargs: Any) -> None:
    self.kwargs = settings or {}  # a kernel's configuration; in deterministic mode the cheapest is chosen
    vars(self).update(kwargs)


class _NoTriton(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """megatron-core imports triton at the top of some modules; on a CPU none of its kernels is ever launched."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] == "triton":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass
