"""Runs around the trainer, once a task: starts it in a session of its own and says how it ended.

Its marker file, written by rename, is what decides the outcome of an attempt; schedulers fold exit
codes and lose states. A script, run by path: `python wrapper.py ATTEMPT_FOLDER`, with what to run in
ATTEMPT_FOLDER/launch.json. It may run under any Python from 3.8 on (a container's), so it imports the
standard library alone and is never imported by the rest of detrun at run time.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

# Of Slurm's variables a rank keeps what says where it is; those that describe the step's tasks would
# make frameworks believe that Slurm started the ranks when torchrun did.
KEPT_SLURM = {
    "SLURM_JOB_ID",
    "SLURM_JOBID",
    "SLURM_JOB_NODELIST",
    "SLURM_JOB_NUM_NODES",
    "SLURM_CONF",
    "SLURMD_NODENAME",
}

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
ORPHANED_GRACE = 10


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def write_json(path: Path, data: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def rank_environment(launch: dict[str, Any], task: int) -> dict[str, str]:
    """The environment of the trainer, or of torchrun, which numbers the ranks itself."""
    env = dict(os.environ)
    if not launch["ranks_are_tasks"]:
        for name in [n for n in env if n.startswith("SLURM_") and n not in KEPT_SLURM]:
            del env[name]
    for name in launch["unset"]:
        env.pop(name, None)
    env.update(launch["env"])
    for name, value in launch["prepend"].items():
        env[name] = os.pathsep.join([value, env[name]]) if env.get(name) else value
    if launch["ranks_are_tasks"]:
        env["RANK"] = str(task)
        env["LOCAL_RANK"] = os.environ.get("SLURM_LOCALID", "0")
    return env


def children() -> list[int]:
    """Process ids whose parent is this process (adopted orphans too), zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
        except (OSError, ValueError, IndexError):
            continue
        if parent == str(os.getpid()) and state != "Z":
            found.append(int(entry.name))
    return found


def kill_leftovers() -> None:
    """Whatever the trainer left behind goes with it, so that no two attempts share a folder."""
    for _ in range(20):
        rest = children()
        if not rest:
            return
        for pid in rest:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        time.sleep(0.05)


def ordinary_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    # Whoever submitted the job may have shielded it from a terminal's Ctrl-C and hang-up; an ignored
    # signal stays ignored across exec, and a trainer's own handling of them must work as usual.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def main() -> int:
    folder = Path(sys.argv[1])
    launch = json.loads((folder / "launch.json").read_text(encoding="utf-8"))
    task = int(os.environ.get("SLURM_PROCID", "0"))
    node = os.environ.get("SLURM_NODEID", "0")
    argv = [a.replace("@NODE@", node) for a in launch["argv"]]
    kind = "rank" if launch["ranks_are_tasks"] else "task"
    marker = folder / "marker" / f"task{task:05d}.json"
    record = {
        "schema_version": 1,
        "task": task,
        "host": os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
        "exit_code": None,
        "signal": None,
        "started": now(),
        "ended": None,
        "error": None,
    }
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    # Orphans (torchrun starts each rank in a session of its own) come to us, not to init.
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    parent = os.getppid()
    if "SLURM_PROCID" not in os.environ:
        # Slurm ends a step whose job is gone; on one machine nobody would, and ranks must not outlive the driver.
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    # Where Slurm does not track orphans, only the kernel ends a trainer whose wrapper was killed. torchrun ends its
    # ranks if it is asked to, and would leave them behind if it were killed.
    with_us = signal.SIGKILL if launch["ranks_are_tasks"] else signal.SIGTERM

    def prepare() -> None:
        ordinary_signals()
        prctl(PR_SET_PDEATHSIG, with_us, 0, 0, 0)

    # Held back until there is a child to pass them on to.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    with (folder / "log" / f"{kind}{task:05d}.log").open("ab") as log:
        try:
            child = subprocess.Popen(
                argv,
                cwd=launch["workdir"],
                env=rank_environment(launch, task),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=prepare,
            )
        except OSError as error:
            what = launch["workdir"] if error.filename == launch["workdir"] else argv[0]
            record.update(exit_code=127, ended=now(), error=f"could not start {what}: {error.strerror}")
            log.write(f"{record['error']}\n".encode())
            write_json(marker, record)
            return 127

    def pass_on(received: int, _frame: Any) -> None:
        child.send_signal(received)
        if os.getppid() != parent:  # the driver is gone, and nobody is left to insist
            signal.alarm(ORPHANED_GRACE)

    for number in FORWARDED:
        signal.signal(number, pass_on)
    signal.signal(signal.SIGALRM, lambda _number, _frame: child.kill())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    code = child.wait()
    signal.alarm(0)
    kill_leftovers()
    record.update(exit_code=code if code >= 0 else 128 - code, signal=-code if code < 0 else None, ended=now())
    write_json(marker, record)
    return int(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    sys.exit(main())
