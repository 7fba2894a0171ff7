"""Runs inside doctor's job: looks at the node it is on, and notes which signals reach whom.

A script, run by path: `python probe.py look|batch|listen FOLDER`, with what to look at in FOLDER/probe.json and all
answers below FOLDER. It may run under any Python from 3.8 on (a container's), so it imports the standard library alone
and is never imported by the rest of detrun at run time. Whatever hangs on a node hangs in a thread that is given up.
"""

from __future__ import annotations

import ctypes.util
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

LISTENED = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGCONT", "SIGINT", "SIGHUP")
LOOK_PATIENCE = 150.0
SHORT_PATIENCE = 20.0
EXCLUSIVE_TRIES = 20
LIFETIME = 270.0

TORCH = """
import json, sys, time
began = time.time()
try:
    import torch
    found = {"version": str(torch.__version__), "seconds": time.time() - began, "cuda": torch.version.cuda,
             "devices": torch.cuda.device_count()}
except BaseException as error:
    found = {"error": f"{type(error).__name__}: {error}"[:300]}
json.dump({"python": sys.version.split()[0], "executable": sys.executable, "torch": found}, sys.stdout)
"""


def main(mode: str, folder: Path) -> int:
    asked = json.loads((folder / "probe.json").read_text(encoding="utf-8"))
    return {"look": look, "batch": batch, "listen": listen}[mode](folder, asked)


def node_name() -> str:
    """As Slurm calls it: several nodes may share one host in a test."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def write_json(path: Path, data: Any) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(data) + "\n", encoding="utf-8")
    temporary.replace(path)


def wait_for(path: Path, patience: float) -> bool:
    """Whether the file can be opened within `patience` seconds; opening asks a network file system anew."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        with suppress(OSError):
            path.open("rb").close()
            return True
        time.sleep(0.01)
    return False


# --- look: one task a node


def look(folder: Path, asked: dict[str, Any]) -> int:
    """Measures all there is to measure, each with a time limit, and writes nodes/<name>.json."""
    names = json.loads((folder / "names.json").read_text(encoding="utf-8"))
    seen: dict[str, Any] = {"node": node_name(), "host": socket.gethostname(), "index": _index(names)}
    tasks: list[tuple[str, float, Callable[[], Any]]] = [
        ("pings", 60.0, lambda: answer_pings(folder, int(asked["pings"]))),
        ("exclusive", SHORT_PATIENCE, lambda: claim(folder)),
        ("rename", SHORT_PATIENCE, lambda: renames(folder)),
        ("boot", 5.0, lambda: Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()),
        ("python", 5.0, lambda: {"version": platform.python_version(), "executable": sys.executable}),
        ("resolve", 90.0, lambda: {name: resolve(name) for name in names}),
        ("tcp", 40.0, lambda: reach(folder, names)),
        ("command", SHORT_PATIENCE, lambda: {name: found(name, asked) for name in asked["commands"]}),
        (
            "files",
            SHORT_PATIENCE,
            lambda: {name: Path(asked["workdir"] or ".", name).is_file() for name in asked["files"]},
        ),
        ("workdir", SHORT_PATIENCE, lambda: asked["workdir"] is None or Path(asked["workdir"]).is_dir()),
        ("shm", 5.0, lambda: space("/dev/shm")),  # noqa: S108
        ("tmp", 5.0, lambda: space(os.environ.get("TMPDIR") or "/tmp")),  # noqa: S108
        ("cores", 5.0, cores),
        ("gpus", 60.0, gpus),
        ("git", SHORT_PATIENCE, lambda: said(["git", "--version"])),
        ("program", LOOK_PATIENCE, lambda: program(asked)),
    ]
    for name, patience, measure in tasks:
        seen[name] = within(patience, measure)
    write_json(folder / "nodes" / f"{node_name()}.json", seen)
    if _index(names) == 0:  # it listens for the others
        for name in names[1:]:
            wait_for(folder / "tcp" / name, SHORT_PATIENCE)
    sys.stdout.flush()
    os._exit(0)  # a thread that hangs holds up nobody


def within(patience: float, measure: Callable[[], Any]) -> Any:
    """What `measure` returns; {"error": why} where it fails or takes longer than `patience` seconds."""
    kept: list[Any] = []

    def run() -> None:
        try:
            kept.append(measure())
        except Exception as error:  # noqa: BLE001  a node may be odd in any way; it is told
            kept.append({"error": f"{type(error).__name__}: {error}"[:300]})

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(patience)
    return kept[0] if kept else {"error": f"no answer within {patience:.0f} s"}


def answer_pings(folder: Path, rounds: int) -> dict[str, Any]:
    """Writes pong-<node>-<i>, with this clock's time, as soon as ping-<node>-<i> can be seen."""
    answered = 0
    for number in range(rounds):
        if not wait_for(folder / "ping" / f"ping-{node_name()}-{number}", 40.0):
            break
        # In one write, so that whoever sees it sees all of it.
        write_json(folder / "ping" / f"pong-{node_name()}-{number}", {"time": time.time()})
        answered += 1
    return {"answered": answered}


def claim(folder: Path) -> list[int]:
    """Which of the files that every node tries to create at the same time are this node's."""
    won = []
    for number in range(EXCLUSIVE_TRIES):
        try:
            os.close(os.open(str(folder / "exclusive" / str(number)), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            continue
        won.append(number)
    return won


def renames(folder: Path) -> bool:
    """Whether a file can be replaced by another by renaming, seen from this node."""
    path = folder / "nodes" / f"rename-{node_name()}"
    for text in ("old", "new"):
        write_json(path, text)
    same: bool = json.loads(path.read_text(encoding="utf-8")) == "new"
    path.unlink()
    return same


def resolve(name: str) -> dict[str, Any]:
    began = time.monotonic()
    try:
        answers = socket.getaddrinfo(name, 29500, type=socket.SOCK_STREAM)
    except OSError as error:
        return {"error": str(error.strerror or error), "seconds": time.monotonic() - began}
    return {"addresses": sorted({str(a[4][0]) for a in answers}), "seconds": time.monotonic() - began}


def reach(folder: Path, names: list[str]) -> dict[str, Any]:
    """The first node listens on a free port, as a rendezvous does; every other one connects to it by name."""
    place = folder / "tcp" / "port.json"
    if _index(names) == 0:
        server = socket.socket()
        server.bind(("", 0))
        server.listen(64)
        write_json(place, {"port": server.getsockname()[1]})
        threading.Thread(target=_greet, args=(server,), daemon=True).start()
        return {"listened": server.getsockname()[1]}
    try:
        if not wait_for(place, 20.0):
            return {"error": f"{names[0]} opened no port within 20 s"}
        port = int(json.loads(place.read_text(encoding="utf-8"))["port"])
        began = time.monotonic()
        try:
            with socket.create_connection((names[0], port), timeout=10) as connection:
                connection.settimeout(10)
                greeting = connection.recv(16)
        except OSError as error:
            return {"error": str(error.strerror or error), "port": port}
        return {"port": port, "seconds": time.monotonic() - began, "greeted": greeting == b"detrun"}
    finally:
        (folder / "tcp" / node_name()).touch()


def _greet(server: socket.socket) -> None:
    while True:
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"detrun")


def found(name: str, asked: dict[str, Any]) -> str | None:
    """Where a program is, from the working directory and on PATH as the trainer will have them."""
    if os.sep in name:
        path = Path(asked["workdir"] or ".") / name
        return str(path) if path.is_file() and os.access(str(path), os.X_OK) else None
    return shutil.which(name, path=trainer_path(asked))


def trainer_path(asked: dict[str, Any]) -> str:
    own = asked["env"].get("PATH") or os.environ.get("PATH", os.defpath)
    return os.pathsep.join([asked["prepend"], own]) if asked["prepend"] else str(own)


def program(asked: dict[str, Any]) -> Any:
    """Python and torch as the trainer will have them; None where its command names no Python."""
    if asked["program"] is None:
        return None
    env = {**os.environ, **asked["env"], "PATH": trainer_path(asked)}
    where = asked["workdir"] if asked["workdir"] and Path(asked["workdir"]).is_dir() else None
    python = found(asked["program"], asked)
    if python is None:
        return {"error": "there is no {}".format(asked["program"])}
    done = subprocess.run(
        [python, "-c", TORCH], env=env, cwd=where, stdin=subprocess.DEVNULL, capture_output=True,
        timeout=LOOK_PATIENCE - 5, check=False,
    )  # fmt: skip
    try:
        return json.loads(done.stdout.decode("utf-8", "replace").splitlines()[-1])
    except (ValueError, IndexError):
        words = done.stderr.decode("utf-8", "replace").splitlines()[-1:] or [f"exit code {done.returncode}"]
        return {"error": f"{python}: {words[0][:300]}"}


def space(folder: str) -> dict[str, Any]:
    usage = shutil.disk_usage(folder)
    return {"path": folder, "total": usage.total, "free": usage.free}


def cores() -> dict[str, Any]:
    """Cores by affinity, by Slurm's word, and by the cgroup's quota (None: no quota, or it cannot be seen)."""
    on_node = os.environ.get("SLURM_CPUS_ON_NODE", "")
    return {
        "affinity": len(os.sched_getaffinity(0)),
        "slurm": int(on_node) if on_node.isdigit() else None,
        "cgroup": _quota(),
    }


def _quota() -> float | None:
    """CPUs by cgroup v2's cpu.max of this process's group or any above it, else by cgroup v1's quota."""
    best: float | None = None
    with suppress(OSError, ValueError):
        own = next(line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        place = Path("/sys/fs/cgroup" + own)
        for folder in [place, *place.parents]:
            with suppress(OSError, ValueError):
                quota, period = (folder / "cpu.max").read_text().split()[:2]
                if quota != "max":
                    best = min(best or 1e9, int(quota) / int(period))
    with suppress(OSError, ValueError, StopIteration):
        base = Path("/sys/fs/cgroup/cpu")
        quota_us = int((base / "cpu.cfs_quota_us").read_text())
        if quota_us > 0:
            best = min(best or 1e9, quota_us / int((base / "cpu.cfs_period_us").read_text()))
    return best


def gpus() -> dict[str, Any]:
    """Driver and devices by nvidia-smi; without it, whether the driver's library is there."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shutil.which("nvidia-smi") is None:
        library = ctypes.util.find_library("cuda")
        return {"driver": None, "names": [], "library": library, "visible": visible}
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=50, check=False,
    )  # fmt: skip
    lines = [line.strip() for line in done.stdout.decode("utf-8", "replace").splitlines() if line.strip()]
    if done.returncode != 0:
        return {"error": "nvidia-smi: {}".format((lines or [f"exit code {done.returncode}"])[-1][:200])}
    rows = [line.split(", ", 1) for line in lines]
    return {"driver": rows[0][0] if rows else None, "names": [row[-1] for row in rows], "visible": visible}


def said(argv: list[str]) -> str | None:
    """The first line of what a command prints; None where it is not there."""
    if shutil.which(argv[0]) is None:
        return None
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=15, check=False)
    return (done.stdout.decode("utf-8", "replace").splitlines() or [""])[0][:200]


def _index(names: list[str]) -> int:
    return names.index(node_name()) if node_name() in names else 0


# --- batch: in place of a driver; listen: in place of a trainer


def batch(folder: Path, asked: dict[str, Any]) -> int:
    """Looks, then starts listening steps one after the other until the job is ended. Notes each moment."""
    start = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    note_signals(folder / "signals" / f"batch-{start}.log")
    until = time.monotonic() + LIFETIME
    names = job_nodes()
    write_json(folder / "names.json", names)
    event(folder, "start", restart=start, nodes=names)
    step = 0
    if start == 0:
        event(folder, "step", number=step, code=_step(asked["look"], step, until))
        step += 1
    while asked["signals"] and time.monotonic() < until and step < 8:
        code = _step(asked["listen"], step, until)
        event(folder, "step", number=step, code=code)
        step += 1
        if ended(folder):
            break
    event(folder, "end")
    return 0


def job_nodes() -> list[str]:
    """The names of the job's nodes; this one's where Slurm does not answer."""
    asked = ["scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")]
    with suppress(OSError, subprocess.TimeoutExpired):
        listed = subprocess.run(asked, stdout=subprocess.PIPE, timeout=60, check=False)
        if names := listed.stdout.decode("utf-8", "replace").split():
            return names
    return [node_name()]


def _step(argv: list[str], number: int, until: float) -> int:
    env = {name: value for name, value in os.environ.items() if name not in STEP_VARIABLES}
    env["DETRUN_PROBE_STEP"] = str(number)
    process = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
    while time.monotonic() < until:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout=0.1)
            return code if code >= 0 else 128 - code
    process.kill()
    return process.wait()


def ended(folder: Path) -> bool:
    """Whether doctor has seen enough, or is gone with its folder."""
    return (folder / "end").exists() or not folder.is_dir()


# srun takes these for options of the step; the step says all of it itself.
STEP_VARIABLES = (
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
    "SLURM_CPUS_PER_TASK",
    "SLURM_DISTRIBUTION",
    "SLURM_OPEN_MODE",
)


def listen(folder: Path, _asked: dict[str, Any]) -> int:
    """Notes every signal, and ten times a second that it is still alive."""
    restart = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    name = "{}-{}-{}".format(restart, os.environ.get("DETRUN_PROBE_STEP", "0"), node_name())
    note_signals(folder / "signals" / f"step-{name}.log")
    (folder / "signals" / f"ready-{name}").touch()
    alive = os.open(str(folder / "signals" / f"alive-{name}"), os.O_CREAT | os.O_WRONLY, 0o644)
    until = time.monotonic() + LIFETIME
    while time.monotonic() < until and not ended(folder):
        os.pwrite(alive, f"{time.time():.3f}".encode(), 0)
        time.sleep(0.1)
    return 0


def note_signals(path: Path) -> None:
    """From here on a line `<time> <name>` for each signal that arrives, and none of them ends this process."""
    log = os.open(str(path), os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)

    def handler(number: int, _frame: Any) -> None:
        os.write(log, f"{time.time():.3f} {signal.Signals(number).name[3:]}\n".encode())

    for name in LISTENED:
        signal.signal(getattr(signal, name), handler)


def event(folder: Path, what: str, **more: Any) -> None:
    line = json.dumps({"time": time.time(), "event": what, **more}) + "\n"
    descriptor = os.open(str(folder / "events.jsonl"), os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
