"""A process as other processes and machines can know it again: its number alone may be used anew."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def describe_process(pid: int) -> dict[str, str]:
    """What makes a process unmistakable: the machine, its boot, the start in it. Raises OSError where it is gone.

    Not a time of day: that moves with the clock.
    """
    return {"host": socket.gethostname(), "boot": boot_id(), "start": _fields(pid)[19]}


def boot_id() -> str:
    """This machine since it was switched on."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def pid_namespace() -> str:
    """Within which process numbers mean something; empty where the system does not tell."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def is_gone(pid: int, start: str) -> bool:
    """Whether the process of that number and start, of this boot and namespace, is certainly no more."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # it is another user's, whose /proc may be hidden
        return False
    try:
        fields = _fields(pid)
    except (OSError, IndexError):
        return False
    return fields[0] in ("Z", "X") or fields[19] != start


def _fields(pid: int) -> list[str]:
    """Of /proc/PID/stat, from the state on: a program's name may hold blanks and brackets."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
