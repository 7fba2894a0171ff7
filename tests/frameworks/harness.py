"""Recipes for the drivers beside this file, and what detrun says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.frameworks import environment
from tests.running import Ran, detrun

HERE = Path(__file__).parent
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

    path: folders for PYTHONPATH, before tests/frameworks. nudge: see nudge.py; armed in arm b. more: further keys.
    """
    python_path = ":".join(str(part) for part in (*path, HERE))
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
    return detrun("pair", str(file), "--resume", "--json", cwd=file.parent, timeout=600, **more)


def origin_of(file: Path) -> dict[str, Any]:
    """`detrun localize`: the culprit."""
    ran = detrun("localize", str(file), "--json", cwd=file.parent, timeout=800)
    assert ran.code == 1, ran.explain()
    culprit = ran.verdict["culprit"]
    assert culprit is not None, ran.explain()
    return culprit
