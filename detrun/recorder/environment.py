"""What this process really saw: versions, variables, switches, devices, seeds. Written once, at the first step."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from detrun.fingerprint.byte_digest import ALGORITHM, digest_bytes

if TYPE_CHECKING:
    from torch import nn

_CLEAR = re.compile(
    r"(PYTHON|OMP_|MKL_|KMP_|GOMP_|OPENBLAS_|NCCL_|GLOO_|TORCH|PYTORCH_|CUDA_|CUBLAS|CUDNN|NVTE_|NVIDIA_|TRITON_|MAMBA_"
    r"|CAUSAL_|XLA_|TF_|SLURM_|DETRUN_)|(LD_LIBRARY_PATH|LD_PRELOAD|RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE)$"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CRED|AUTH|COOKIE|URL", re.IGNORECASE)
_USERINFO = re.compile(r"://[^/\s]*@")


def redacted(env: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Split an environment into `clear` (name → value, what matters for the numbers) and `digest` (name → digest of
    its value). A name that sounds like a secret, or a value with a password in an address, is never in clear."""
    clear: dict[str, str] = {}
    digest: dict[str, str] = {}
    for name in sorted(env):
        value = env[name]
        if _CLEAR.match(name) and not _SECRET.search(name) and not _USERINFO.search(value):
            clear[name] = value
        else:
            digest[name] = digest_bytes(value.encode("utf-8", "surrogateescape"))
    return {"clear": clear, "digest": digest}


def packages() -> dict[str, str]:
    """Installed distributions by name, as the names of their metadata folders say; the first on the path counts. Not
    what a package brings along for itself and puts on the path once it is imported."""
    found: dict[str, str] = {}
    for folder in sys.path:
        if os.path.basename(folder) == "_vendor":  # noqa: PTH119 - this runs by itself elsewhere, with `os` alone
            continue
        try:
            names = sorted(os.listdir(folder or "."))  # noqa: PTH208 - names only, thousands of them
        except OSError:
            continue
        for name in names:
            stem, suffix = os.path.splitext(name)  # noqa: PTH122 - thousands of names, in a training process
            if suffix in (".dist-info", ".egg-info") and "-" in stem:
                distribution, version = stem.split("-")[:2]
                found.setdefault(distribution.replace("_", "-").lower(), version)
    return dict(sorted(found.items()))


def describe_process(rank: int) -> dict[str, Any]:
    """Everything of `environment/rank<r>.json` but `initial`, `coordinates`, `replicas` and `recorder`."""
    torch = sys.modules.get("torch")
    return {
        "schema_version": 1,
        "rank": rank,
        "world_size": world_size(),
        "local_rank": _env_int("LOCAL_RANK", 0),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": {
            "version": platform.python_version(),
            "executable": sys.executable,
            "argv": list(sys.argv),
            "cwd": _working_folder(),
        },
        "packages": packages(),
        "env": redacted(os.environ),
        "torch": _torch_settings(),
        "cpu": {
            "model": _cpu_model(),
            "capability": torch.backends.cpu.get_cpu_capability() if torch is not None else None,
            "affinity": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
            "count": os.cpu_count(),
        },
        "devices": _devices(),
        "driver": _driver(),
        "seeds": {
            "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED"),
            "DETRUN_SEED": os.environ.get("DETRUN_SEED"),
            "torch_initial_seed": torch.initial_seed() if torch is not None else None,
        },
    }


def recorder_settings(settings: Mapping[str, Any], version: str) -> dict[str, Any]:
    digest = {"xxh3": "xxh3-128", "blake2b": "blake2b-128"}[ALGORITHM]
    return {"version": version, "digest": digest, "settings": dict(settings)}


def current_rank() -> int:
    """The global rank: the process group's if there is one, else RANK, else 0."""
    group = _process_group()
    return int(group.get_rank()) if group is not None else _env_int("RANK", 0)


def world_size() -> int:
    group = _process_group()
    return int(group.get_world_size()) if group is not None else _env_int("WORLD_SIZE", 1)


def has_process_group() -> bool:
    return _process_group() is not None


def replicas(roots: list[nn.Module]) -> list[int] | None:
    """Global ranks that hold copies of these modules' parameters, or None if nothing says so.

    Read from the wrapper or the device mesh; no collective is added.
    """
    for root in roots:
        for module in (root, getattr(root, "_orig_mod", None)):
            if module is None:
                continue
            group = getattr(module, "process_group", None)
            if type(module).__name__ == "DistributedDataParallel" and group is not None:
                import torch.distributed as dist

                return sorted(dist.get_process_group_ranks(group))
            found = _mesh_replicas(module)
            if found is not None:
                return found
    return None


def _mesh_replicas(module: nn.Module) -> list[int] | None:
    """Of fully sharded parameters: the ranks along the mesh dimensions that only replicate, if all agree on them."""
    seen: set[tuple[int, ...]] = set()
    for parameter in module.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        placements = getattr(parameter, "placements", None)
        if mesh is None or placements is None:
            return None
        place = mesh.get_coordinate()
        if place is None:
            return None
        index = tuple(
            slice(None) if placement.is_replicate() else place[dim] for dim, placement in enumerate(placements)
        )
        seen.add(tuple(sorted(mesh.mesh[index].flatten().tolist())))
        if len(seen) > 1:
            return None
    ranks = next(iter(seen), ())
    return list(ranks) if len(ranks) > 1 else None


def _process_group() -> Any:
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist


def _env_int(name: str, default: int) -> int:
    try:
        return int(os.environ.get(name, "") or default)
    except ValueError:
        return default


def _working_folder() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        return "(deleted)"


def _torch_settings() -> dict[str, Any]:
    if "torch" not in sys.modules:
        return {}
    from detrun.determinism.canonical import torch_settings_in_force

    return torch_settings_in_force()


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _driver() -> str | None:
    """The version of the kernel's driver for its devices, as the kernel tells it."""
    for path, pattern in (
        (Path("/proc/driver/nvidia/version"), r"[0-9]{3,}[0-9.]+"),
        (Path("/sys/module/amdgpu/version"), r"\S+"),
    ):
        with contextlib.suppress(OSError):
            found = re.search(pattern, path.read_text(encoding="utf-8", errors="replace"))
            if found:
                return found[0]
    return None


def _devices() -> list[dict[str, Any]]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "index": index,
                "name": properties.name,
                "uuid": str(getattr(properties, "uuid", "")),
                "capability": f"{properties.major}.{properties.minor}",
            }
        )
    return found
