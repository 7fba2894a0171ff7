"""Where a rank stands among the others, and the named random number streams of tensor and expert parallelism."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from detrun.recorder.adapters.megatron.known import Arguments, Known

COORDINATES = {
    "pp": "get_pipeline_model_parallel_rank",
    "tp": "get_tensor_model_parallel_rank",
    "dp": "get_data_parallel_rank",
    "cp": "get_context_parallel_rank",
    "ep": "get_expert_model_parallel_rank",
}


def places(module: ModuleType, known: Known) -> None:
    """`megatron.core.parallel_state`. Copies of all of a rank's parameters have the ranks that share both the dense
    ones and the experts with it."""
    adapter = known.adapter
    group, experts = (
        adapter.needs(module, name) for name in ("get_data_parallel_group", "get_expert_data_parallel_group")
    )
    if group is not None:
        adapter.takes(group, "with_context_parallel")
    ranks = {name: adapter.needs(module, function) for name, function in COORDINATES.items()}

    def tell() -> None:
        import torch.distributed as dist

        adapter.coordinates(**{name: int(rank()) for name, rank in ranks.items() if rank is not None})
        if group is not None and experts is not None:
            dense = set(dist.get_process_group_ranks(group(with_context_parallel=True)))
            adapter.replicas(sorted(dense & set(dist.get_process_group_ranks(experts()))))

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def initialize(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            adapter.run(tell)
            return result

        return initialize

    adapter.wrap(module, "initialize_model_parallel", around)


def streams(module: ModuleType, known: Known) -> None:
    """`megatron.core.tensor_parallel.random`. A stream's state is looked up by its name whenever it is read: a restore
    puts other states in their place."""
    adapter = known.adapter
    tracker = adapter.needs(module, "get_cuda_rng_tracker")

    def read(name: str) -> Any:
        return tracker().get_states().get(name)

    def tell(name: str) -> None:
        adapter.stream(name, lambda: read(name))

    def tell_all() -> None:
        for name in tracker().get_states():
            tell(name)

    def seeding(original: Callable[..., Any]) -> Callable[..., Any]:
        def seed(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            adapter.run(tell_all)
            return result

        return seed

    def adding(original: Callable[..., Any]) -> Callable[..., Any]:
        arguments = Arguments(original)

        def add(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            adapter.run(tell, arguments.read("name", args, kwargs))
            return result

        return add

    if tracker is None or adapter.needs(module, "CudaRNGStatesTracker.get_states") is None:
        return
    adapter.wrap(module, "model_parallel_cuda_manual_seed", seeding)  # also where the tracker is another library's
    function = adapter.needs(module, "CudaRNGStatesTracker.add")
    if function is not None and adapter.takes(function, "name"):
        adapter.wrap(module, "CudaRNGStatesTracker.add", adding)
