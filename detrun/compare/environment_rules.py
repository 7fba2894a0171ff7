"""Which differences between two arms' environments matter, as data.

Each rule is a pattern over a setting's path in the environment file (`env.clear.NCCL_ALGO`, `packages.numpy`)
and what a difference there means. The first rule that matches decides.

    ignore     differs between any two runs and says nothing
    placement  where the arm ran; told, and no reason to doubt a verdict
    inform     told in one line; its effect on the bits is unknown
    matter     may change the bits: forbids `identical` unless the recipe declares it
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal

Effect = Literal["ignore", "placement", "inform", "matter"]

RULES: tuple[tuple[str, Effect], ...] = (
    ("schema_version", "ignore"),
    ("rank", "ignore"),
    ("pid", "ignore"),
    ("initial.*", "ignore"),  # held against each other as state, not as a setting
    ("host", "placement"),
    # Rendezvous and bookkeeping of launchers: fresh in every start.
    ("env.*.MASTER_PORT", "ignore"),
    ("env.*.MASTER_ADDR", "placement"),
    ("env.*.*_PORT", "ignore"),
    ("env.*.TORCHELASTIC_RUN_ID", "ignore"),
    ("env.*.TORCHELASTIC_ERROR_FILE", "ignore"),
    ("env.*.DETRUN_ARM*", "ignore"),
    ("env.*.DETRUN_ATTEMPT*", "ignore"),
    ("env.*.DETRUN_*_DIR", "ignore"),
    # What makes an arm of a resume check the arm it is: said by its role.
    ("env.*.DETRUN_STEPS_DONE", "ignore"),
    ("env.*.DETRUN_MICROBATCHES_DONE", "ignore"),
    ("env.*.DETRUN_INTERRUPT", "ignore"),
    ("env.*.DETRUN_SABOTAGE", "ignore"),
    ("env.*.DETRUN_TRACE", "ignore"),
    ("env.*.DETRUN_STATE_AT", "ignore"),
    ("env.*.DETRUN_STATE_BYTES", "ignore"),
    ("env.*.DETRUN_JOB*", "ignore"),
    ("env.*.DETRUN_NODES", "placement"),
    # The scheduler's description of the job: the shape matters, the rest is its own affair.
    ("env.*.SLURM_NTASKS*", "matter"),
    ("env.*.SLURM_NPROCS", "matter"),
    ("env.*.SLURM_NNODES", "matter"),
    ("env.*.SLURM_CPUS_PER_TASK", "matter"),
    ("env.*.SLURM_GPUS*", "matter"),
    ("env.*.SLURM_*NODELIST", "placement"),
    ("env.*.SLURMD_NODENAME", "placement"),
    ("env.*.SLURM_*", "ignore"),
    # Which of several equal devices: the device's model is compared by itself.
    ("env.*.CUDA_VISIBLE_DEVICES", "placement"),
    ("env.*.NVIDIA_VISIBLE_DEVICES", "placement"),
    ("devices.*.uuid", "placement"),
    ("devices.*.index", "placement"),
    ("devices.*", "matter"),
    ("cpu.affinity", "placement"),
    ("cpu.affinity.*", "placement"),
    ("cpu.count", "inform"),
    ("cpu.*", "matter"),
    ("env.digest._", "ignore"),
    ("env.digest.OLDPWD", "ignore"),
    ("env.digest.PWD", "ignore"),
    ("env.digest.SHLVL", "ignore"),
    ("env.digest.TMPDIR", "ignore"),
    ("env.digest.RANDOM", "ignore"),
    ("env.digest.SSH_*", "ignore"),
    ("env.digest.XDG_*", "ignore"),
    ("env.digest.INVOCATION_ID", "ignore"),
    ("env.digest.JOURNAL_STREAM", "ignore"),
    ("env.digest.CONTAINER_ID", "ignore"),
    ("env.digest.HOSTNAME", "placement"),
    ("env.digest.SUBMITIT_*", "ignore"),
    ("env.digest.*", "inform"),
    # Where caches lie and reports go: often a folder of the process's own, made anew in every start.
    ("env.clear.*CACHE_DIR", "inform"),
    ("env.clear.*CACHE_PATH", "inform"),
    ("env.clear.PYTHONPYCACHEPREFIX", "inform"),
    ("env.clear.TORCH_HOME", "inform"),
    ("env.clear.TRITON_HOME", "inform"),
    ("env.clear.TORCH_EXTENSIONS_DIR", "inform"),
    ("env.clear.*_DUMP_DIR", "inform"),
    ("env.clear.*_DEBUG_FILE", "inform"),
    ("env.clear.*", "matter"),
    ("python.cwd", "inform"),
    ("python.*", "matter"),
    ("packages.*", "matter"),
    ("torch.*", "matter"),
    ("seeds.*", "matter"),
    ("recorder.*", "matter"),
    ("world_size", "matter"),
    ("local_rank", "matter"),
    ("coordinates.*", "matter"),
    ("replicas", "matter"),
    ("replicas.*", "matter"),
    ("*", "inform"),
)


@lru_cache(maxsize=4096)
def effect_of(path: str) -> Effect:
    """What a difference at `path` means."""
    return next(effect for pattern, effect in RULES if fnmatchcase(path, pattern))
