"""Running the real `detrun` command from a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

TRAINERS = Path(__file__).parent / "trainers"
DETRUN = [sys.executable, "-m", "detrun"]


@dataclass(frozen=True)
class Ran:
    """What a command left: exit code, both streams, and its JSON document if it printed one."""

    code: int
    out: str
    err: str

    @property
    def verdict(self) -> dict[str, Any]:
        document = json.loads(self.out)
        assert isinstance(document, dict)
        return document

    def explain(self) -> str:
        return f"exit {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


def detrun(*arguments: str, cwd: Path, timeout: float = 240, env: dict[str, str] | None = None) -> Ran:
    """Runs `detrun ARGUMENTS` and waits for it."""
    done = subprocess.run(
        [*DETRUN, *arguments],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def write_recipe(folder: Path, name: str = "plain", args: list[str] | None = None, **keys: Any) -> Path:
    """A recipe for the plain trainer; further keys are merged in, section by section."""
    recipe: dict[str, Any] = {
        "name": name,
        "cluster": "local",
        "launch": {
            "launcher": "torchrun",
            "command": [
                sys.executable,
                str(TRAINERS / "plain.py"),
                "--steps",
                "{steps}",
                "--seed",
                "{seed}",
                "--out",
                "{out}",
            ],
            "args": args or [],
            "ranks_per_node": 2,
            "env": {"OMP_NUM_THREADS": "1"},
        },
        "steps": 6,
        "metrics": {"required": ["loss", "grad_norm"]},
    }
    for key, value in keys.items():
        recipe[key] = {**recipe.get(key, {}), **value} if isinstance(value, dict) else value
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path
