"""The process that waits for a detached command over there: it outlives the connection that started it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from detrun.records.files import write_atomically

TOUCH_EVERY = 5.0
NOT_STARTED = 70
_COMMAND = "import sys; sys.path[:] = [p for p in sys.path if p]; from detrun.cli import main; sys.exit(main())"


def main() -> None:
    """Runs what run.json of the folder in the arguments says, and writes its exit code down."""
    folder = Path(sys.argv[1])
    about = json.loads((folder / "run.json").read_bytes())
    code = NOT_STARTED
    try:
        code = _run(folder, about)
    finally:
        write_atomically(folder / "exit.json", json.dumps({"code": code}).encode())


def _run(folder: Path, about: dict[str, object]) -> int:
    words, variables = about["words"], about["variables"]
    assert isinstance(words, list) and isinstance(variables, dict)
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, *words],
            cwd=str(about["cwd"]),
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        (folder / "pid").write_text(str(process.pid))
        while True:
            (folder / "alive").touch()
            try:
                code = process.wait(TOUCH_EVERY)
            except subprocess.TimeoutExpired:
                continue
            return code if code >= 0 else 128 - code
