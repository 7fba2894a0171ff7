"""Runs the training program in a process of its own, plain or with the recorder and a trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from detrun.recorder.export import export_recorder

ROOT = Path(__file__).resolve().parents[2]
LEVELS = (2, 3, 4)


def trained(out: Path, *options: str, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """One run that writes into `out`; its steps. Raises RuntimeError with the end of its log if it fails."""
    command = [sys.executable, "-m", "benchmarks.peer_bench.train", "--out", str(out), *options]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DETRUN_")}
    done = subprocess.run(
        command, cwd=ROOT, env={**inherited, "OMP_NUM_THREADS": "1", **(env or {})}, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"the run ended with {done.returncode}:\n{done.stderr[-2000:]}")
    steps: list[dict[str, Any]] = json.loads((out / "steps.json").read_text(encoding="utf-8"))
    return steps


def traced(out: Path, level: int | None, count: int, *options: str, **asked: Any) -> list[dict[str, Any]]:
    """The same of `count` steps with the recorder, which takes `out` for an attempt's folder and traces all of them at
    a level (None: none). asked: what else, or what other window, the trace is asked for."""
    recorder = out / "recorder-code"
    export_recorder(recorder)
    env = {"PYTHONPATH": str(recorder), "DETRUN_ATTEMPT_DIR": str(out), "DETRUN_STATE_EVERY": "0"}
    if level is not None:
        env["DETRUN_TRACE"] = json.dumps({"level": level, "steps": [1, count], **asked})
    return trained(out, "--steps", str(count), *options, env=env)


def size_of(folder: Path, names: Sequence[str] = ("*",)) -> int:
    """Bytes of the files below a folder."""
    return sum(path.stat().st_size for name in names for path in folder.rglob(name) if path.is_file())
