"""What the cluster needs of the machine: packages, host names, ports, processes, a lock."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from local_cluster.errors import ClusterError, UnsuitableMachineError

HOSTS = Path("/etc/hosts")
# Below Linux's ephemeral range (32768 up): no outgoing connection may take a port while its daemon restarts.
FIRST_PORT, LAST_PORT = 26800, 32000
PACKAGES = {  # a program that must be there: the Debian package that has it
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "srun": "slurm-wlm",
    "munged": "munge",
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server",
}
ACCOUNTING_ONLY = {"slurmdbd", "mariadbd"}
# Debian keeps daemons in sbin folders, which a plain user's PATH may lack.
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])


def require_root() -> None:
    if os.geteuid() != 0:
        raise UnsuitableMachineError(
            "a Slurm cluster starts daemons of three users and names its nodes in /etc/hosts: that needs root"
            f"\n\nhint: sudo {' '.join(sys.argv)}"
        )


def ensure_packages(accounting: bool) -> None:
    """Installs what is missing with apt, and keeps the packages' scripts from starting services."""
    missing = {
        package
        for program, package in PACKAGES.items()
        if (accounting or program not in ACCOUNTING_ONLY) and shutil.which(program, path=PATH) is None
    }
    if not missing:
        return
    names = " ".join(sorted(missing))
    if shutil.which("apt-get") is None:
        raise UnsuitableMachineError(
            f"missing here, and this is no Debian or Ubuntu: {names}"
            "\n\nhint: install slurmctld, slurmd, slurmdbd, munge and MariaDB with the package manager"
            " (their services need not run), then run this again"
        )
    say(f"installing {names}")
    policy = Path("/usr/sbin/policy-rc.d")  # invoke-rc.d asks it; 101 means "do not start"
    ours = not policy.exists()
    if ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        install = ["install", "-qq", "-y", "--no-install-recommends", *sorted(missing)]
        for step in (["update", "-qq"], install):
            done = subprocess.run(["apt-get", *step], env=env, capture_output=True, text=True, check=False)
            if done.returncode:
                said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
                raise UnsuitableMachineError(f"`apt-get {' '.join(step)}` exited {done.returncode}:\n{said}")
    finally:
        if ours:
            policy.unlink(missing_ok=True)


def add_host_names(root: Path, names: list[str]) -> None:
    """Without them torch's rendezvous waits for minutes on a node name that does not resolve."""

    def add(lines: list[str]) -> list[str]:
        for line in lines:
            address, *rest = line.partition("#")[0].split() or [""]
            taken = sorted(set(rest) & set(names))
            if taken and not address.startswith(("127.", "::1")):
                raise UnsuitableMachineError(f"{HOSTS} gives {', '.join(taken)} to another machine, {address}")
        return [*_without_ours(lines, root), *(f"127.0.0.1 {name} {_mark(root)}" for name in names)]

    _edit_hosts(add)


def remove_host_names(root: Path) -> None:
    _edit_hosts(lambda lines: _without_ours(lines, root))


def _mark(root: Path) -> str:
    return f"# detrun local-cluster {root}"


def _without_ours(lines: list[str], root: Path) -> list[str]:
    return [line for line in lines if not line.endswith(_mark(root))]


def _edit_hosts(edit: Callable[[list[str]], list[str]]) -> None:
    # In place, never by rename: in a container /etc/hosts is a bind mount.
    with HOSTS.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # a cluster under another root may be at it
        before = file.read().splitlines()
        after = edit(before)
        if after != before:
            file.seek(0)
            file.write("".join(f"{line}\n" for line in after))
            file.truncate()


def free_ports(count: int) -> int:
    """The first of `count` consecutive ports that nobody listens on."""
    for first in range(FIRST_PORT, LAST_PORT, count):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("0.0.0.0", port))  # noqa: S104 -- slurmd binds all too
            return first
    raise ClusterError(f"no {count} consecutive free ports between {FIRST_PORT} and {LAST_PORT}")


def port_complaint(port: int) -> str:
    """Why nothing can be reached at this port of this machine; empty if it can."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError as error:
        return f"port {port}: {error}"
    return ""


def start_time(pid: int) -> str | None:
    """When the process started, in clock ticks since boot: with the pid it names one process for good.

    None if there is no such process, or only its zombie.
    """
    try:
        # The second field is the command in brackets, which may itself hold spaces and brackets.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def as_user(name: str | None) -> dict[str, object]:
    """Popen's arguments for running as another user, with that user's own groups alone."""
    if name is None:
        return {}
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise UnsuitableMachineError(f"no user {name!r} here, which its package should have made") from None
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


def wait_for(condition: Callable[[], bool], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return met


def tail(log: Path, lines: int = 15) -> str:
    if not log.exists():
        return f"log: {log} (was never written)"
    return "\n".join([*log.read_text(errors="replace").splitlines()[-lines:], f"log: {log}"])


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """One verb at a time on a root. The file lies beside the root, for `down` removes what is in it."""
    root.parent.mkdir(parents=True, exist_ok=True)
    with root.with_name(root.name + ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def only_one_on_this_machine() -> Iterator[None]:
    """Held from the choice of ports until daemons listen on them: another root's `up` could choose the same."""
    folder = os.open(HOSTS.parent, os.O_RDONLY)  # a lock on a folder needs no file of its own
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
