"""Recipes for the drivers beside this file, and what detrun says of them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.frameworks import environment
from tests.running import Ran, detrun

HERE = Path(__file__).parent
TOOLS = HERE / "tools"
"""On every driver's path: nudge.py and census.py."""
STEPS, SAVED, KILLED = 6, 3, 4


def recipe(
    folder: Path,
    name: str,
    command: Sequence[str],
    *,
    ranks: int = 2,
    path: Sequence[Path] = (),
    env: Mapping[str, str] | None = None,
    nudge: str = "",
    **more: Any,
) -> Path:
    """Writes a recipe into `folder`. command: the driver and its arguments, behind the frameworks' interpreter.

    path: folders for PYTHONPATH, before the tools'. nudge: see nudge.py; armed in arm b. more: further keys.
    """
    python_path = ":".join(str(part) for part in (*path, TOOLS))
    surroundings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path, "PYTHONWARNINGS": "ignore", **(env or {})}
    document: dict[str, Any] = {
        "name": name,
        "cluster": "local",
        "launch": {
            "launcher": "torchrun" if ranks > 1 else "none",
            "ranks_per_node": ranks,
            "command": [str(environment.PYTHON), *command],
            "env": surroundings | ({"NUDGE": nudge} if nudge else {}),
        },
        "steps": STEPS,
        "seed": 1234,
        "interrupt": {"kind": "kill", "at_step": KILLED},
        # The end of a process group of gloo's can wait for the interpreter, which waits for it: not to be waited for.
        "watchdog": {"start": 150.0},
        **more,
    }
    if nudge:
        document["arms"] = {"b": {"env": {"NUDGE_ARMED": "1"}}}
        document.pop("interrupt")
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    return file


def pair_and_resume(file: Path, **more: Any) -> Ran:
    """`detrun pair --resume`: both experiments, with one reference. The verdict is the resume check's, or the pair's
    where that is not identical."""
    return detrun("pair", str(file), "--resume", "--json", cwd=file.parent, timeout=800, **more)


def origin_of(file: Path) -> dict[str, Any]:
    """`detrun localize`: the culprit."""
    ran = detrun("localize", str(file), "--json", cwd=file.parent, timeout=800)
    assert ran.code == 1, ran.explain()
    culprit = ran.verdict["culprit"]
    assert culprit is not None, ran.explain()
    return culprit


def recorded_and_bare(file: Path, last: str) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """Runs a recipe's program twice under detrun and once by itself. last: the checkpoint of its last step, below the
    program's own folder.

    Returns the names of what differs in that checkpoint, and how many collectives each rank began in each group, of the
    recorded and of the bare run.
    """
    folder = file.parent
    document = yaml.safe_load(file.read_text())
    document["determinism"] = "none"
    document["launch"]["env"]["CENSUS"] = str(folder / "census")
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    ran = detrun("pair", str(file), "--json", cwd=folder, timeout=600)
    assert ran.code == 0, ran.explain()
    (pair,) = folder.glob(".detrun/*-pair-*")

    launch, out = document["launch"], folder / "bare"
    out.mkdir()
    save_every = document["checkpoint"]["save_every"]
    given = {"steps": document["steps"], "seed": document["seed"], "out": out, "save_every": save_every}
    command = [part.format(**given) for part in (*launch["command"], *document["checkpoint"]["save_args"])]
    if launch["launcher"] == "torchrun":
        torchrun = [command[0], "-m", "torch.distributed.run", "--nproc-per-node", str(launch["ranks_per_node"])]
        command = [*torchrun, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *command[1:]]
    env = {**os.environ, "PYTHONHASHSEED": "0", **launch["env"], "CENSUS": str(folder / "bare-census")}
    subprocess.run(command, check=True, env=env, cwd=folder, stdout=subprocess.DEVNULL, timeout=300)

    compared = detrun("checkpoint", "diff", str(pair / "arms/a/work" / last), str(out / last), "--json", cwd=folder)
    assert compared.code in (0, 1), compared.explain()
    differing = [row["name"] for row in json.loads(compared.out)["differences"]]
    return differing, _counts(folder / "census"), _counts(folder / "bare-census")


def _counts(folder: Path) -> dict[str, dict[str, int]]:
    found = {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))}
    assert found and all(sum(groups.values()) > 0 for groups in found.values())
    return found
