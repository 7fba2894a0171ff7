"""How many collectives this process has begun, by process group: printed to a file when it ends.

`install()` is called by a driver before it trains; does nothing without CENSUS, a folder.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch.distributed as dist

_counts: dict[str, int] = {}


def install() -> None:
    """Counts at the end of every process group, whoever destroys it, and at the end of the process."""
    folder = os.environ.get("CENSUS")
    if not folder:
        return
    import atexit

    original = dist.destroy_process_group

    def destroy(*args: object, **kwargs: object) -> None:
        _write(Path(folder))
        original(*args, **kwargs)

    dist.destroy_process_group = destroy
    dist.distributed_c10d.destroy_process_group = destroy
    atexit.register(_write, Path(folder))


def _write(folder: Path) -> None:
    world = dist.distributed_c10d._world
    for group, name in list(world.pg_names.items()):
        if group is not None and hasattr(group, "_get_sequence_number_for_group"):
            try:
                count = group._get_sequence_number_for_group()
            except RuntimeError:  # a group that only others are made from does not count
                continue
            _counts[str(name)] = max(count, _counts.get(str(name), 0))
    folder.mkdir(parents=True, exist_ok=True)
    rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    (folder / f"rank{rank}.json").write_text(json.dumps(_counts, sort_keys=True))
