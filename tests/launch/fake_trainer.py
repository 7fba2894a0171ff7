"""Plays what a trainer and its recorder leave in an attempt's folder: `fake_trainer.py SCRIPT CHECKPOINTS ARGUMENTS…`.

SCRIPT is JSON: for every attempt a list of actions. No torch; runs alone.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

script, checkpoints = json.loads(sys.argv[1]), Path(sys.argv[2])
attempt = Path(os.environ["DETRUN_ATTEMPT_DIR"])
rank = int(os.environ.get("RANK", "0"))
note = {"argv": sys.argv[3:], "env": {k: v for k, v in os.environ.items() if k.startswith("DETRUN_")}}
(attempt / f"seen-{rank}.json").write_text(json.dumps(note))


def append(folder: str, line: dict[str, object]) -> None:
    (attempt / folder).mkdir(exist_ok=True)
    with (attempt / folder / f"rank{rank:05d}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def save(name: str, step: int, log_name: str | None = None, microbatch: int = 0, ends: bool = True) -> None:
    path = checkpoints / (log_name or name)
    path.mkdir(parents=True, exist_ok=True)
    line = {"v": 1, "path": str(path), "writer": "torch.save", "step": step, "microbatch": microbatch}
    append("saves", {**line, "event": "begin", "time": time.time()})
    shutil.copyfile(os.environ["FAKE_CHECKPOINT"], path / "rank0.pt")
    os.utime(path / "rank0.pt")
    if ends:
        append("saves", {**line, "event": "end", "time": time.time()})
        path.rename(checkpoints / name)


for action, *rest in script[int(os.environ["DETRUN_ATTEMPT"])]:
    if action == "steps":
        done = int(os.environ.get("DETRUN_STEPS_DONE", "0"))
        for step in range(done + 1, rest[0] + 1):
            append("metrics", {"v": 1, "step": step, "metrics": {}, "microbatches": rest[1] if len(rest) > 1 else 1})
    elif action == "save":
        save(*rest)
    elif action == "cut-save":
        save(*rest, ends=False)
    elif action == "interrupted":
        kind, step, *detail = rest
        (attempt / "interrupt").mkdir(exist_ok=True)
        document = {"schema_version": 1, "kind": kind, "moment": "end", "step": step, "microbatch": 0, "time": 0.0}
        (attempt / "interrupt" / f"rank{rank:05d}.json").write_text(
            json.dumps({**document, "detail": detail[0] if detail else None})
        )
    elif action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "hang":
        time.sleep(300)
    elif action == "orphan":
        child = subprocess.Popen(["sleep", "300"], start_new_session=True, stdin=subprocess.DEVNULL)
        (checkpoints.parent / "orphan.pid").write_text(str(child.pid))
    elif action == "look-for-orphan":
        pid = (checkpoints.parent / "orphan.pid").read_text()
        (attempt / "alone").write_text(str(not Path(f"/proc/{pid}").exists()))
    elif action == "exit":
        sys.exit(rest[0])
