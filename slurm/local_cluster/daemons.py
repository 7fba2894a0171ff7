"""The cluster's daemons: what they are, and exact bookkeeping of which of them are ours and alive."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from local_cluster.clients import Clients
from local_cluster.configuration import Files, Layout
from local_cluster.errors import ClusterError
from local_cluster.machine import as_user, port_complaint, start_time, tail, wait_for


@dataclass(frozen=True)
class Service:
    """One daemon: how it is started, as whom, and why it does not answer (empty if it does)."""

    name: str
    argv: list[str]  # in the foreground, so that the child's pid is the daemon's
    log: Path
    complaint: Callable[[], str]
    user: str | None = None
    env: tuple[tuple[str, str], ...] = ()


def services(files: Files, layout: Layout, clients: Clients) -> list[Service]:
    """Every daemon, in the order in which they start."""
    munge = Service(
        "munge",
        [
            *["munged", "--foreground", f"--socket={files.munge_socket}"],
            *[f"--{kind}-file={files.munge_dir}/munged.{kind}" for kind in ("key", "pid", "seed", "log")],
        ],
        files.munge_dir / "munged.log",
        lambda: clients.complaint("munge", "--no-input", f"--socket={files.munge_socket}"),
        user="munge",
    )
    mariadb = Service(
        "mariadb",
        [
            # No TCP port at all: slurmdbd comes in by the socket, as root, without a password.
            *["mariadbd", "--no-defaults", "--skip-networking", f"--datadir={files.mysql_dir}/data"],
            *[f"--socket={files.mysql_socket}", f"--pid-file={files.mysql_dir}/mariadb.pid"],
            # slurmdbd wants these raised, and logs errors about the defaults.
            *["--innodb-buffer-pool-size=128M", "--innodb-lock-wait-timeout=900"],
        ],
        files.log_dir / "mariadb.out",
        lambda: clients.complaint("mariadb-admin", "--no-defaults", f"--socket={files.mysql_socket}", "ping"),
        user="mysql",
    )
    slurmdbd = Service(
        "slurmdbd",
        ["slurmdbd", "-D"],
        files.log_dir / "slurmdbd.log",
        lambda: clients.complaint("sacctmgr", "--noheader", "list", "cluster"),
        # libmariadb takes the socket of "localhost" from here; slurmdbd.conf has no key for it.
        env=(("MYSQL_UNIX_PORT", str(files.mysql_socket)),),
    )
    slurmctld = Service(
        "slurmctld",
        ["slurmctld", "-D"],
        files.log_dir / "slurmctld.log",
        clients.controller_complaint,
    )
    slurmds = [
        Service(
            name,
            ["slurmd", "-D", "-N", name],
            files.log_dir / f"slurmd-{name}.log",
            partial(port_complaint, layout.slurmd_port(name)),
        )
        for name in layout.node_names
    ]
    return [munge, *([mariadb, slurmdbd] if layout.accounting else []), slurmctld, *slurmds]


class Daemons:
    """Starts and stops services; knows each by pid and start time, as a pid alone may be another's by now."""

    def __init__(self, files: Files, clients: Clients) -> None:
        self.files = files
        self.clients = clients

    def pid(self, name: str) -> int | None:
        """The pid of a daemon that we started and that still lives, else None."""
        try:
            pid, started = self._record(name).read_text().split()
        except (FileNotFoundError, ValueError):
            return None
        return int(pid) if start_time(int(pid)) == started else None

    def start(self, service: Service, timeout: float = 120) -> None:
        """Starts a daemon unless it runs, and returns once it answers."""
        out = self.files.log_dir / f"{service.name}.out"
        if self.pid(service.name) is None:
            with out.open("ab") as sink:
                process = subprocess.Popen(
                    service.argv,
                    env=self.clients.env() | dict(service.env),
                    cwd=self.files.root,
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=sink,
                    start_new_session=True,  # a Ctrl-C at the terminal is not for the daemons
                    **as_user(service.user),
                )
            self._record(service.name).write_text(f"{process.pid} {start_time(process.pid)}\n")
        came_up = wait_for(lambda: self.pid(service.name) is None or not service.complaint(), timeout)
        if self.pid(service.name) is None:
            # A daemon that dislikes its configuration says so before it opens its log.
            raise ClusterError(f"{service.name} ended at once\n{tail(out)}\n{tail(service.log)}")
        if not came_up:
            why = service.complaint()
            raise ClusterError(f"{service.name} did not answer in {timeout:.0f} s: {why}\n{tail(service.log)}")

    def stop(self, name: str, grace: float = 20) -> None:
        """TERM, and KILL after `grace` seconds; nothing to do if it does not run."""
        for sig, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, 5)):
            pid = self.pid(name)
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sig)
                wait_for(lambda: self.pid(name) is None, patience)
        self._record(name).unlink(missing_ok=True)

    def _record(self, name: str) -> Path:
        return self.files.run_dir / f"{name}.started"


def job_processes(files: Files) -> list[int]:
    """Processes of this cluster's jobs: slurmstepds, scripts, tasks and their children, escaped ones too.

    Slurm sets SLURMD_NODENAME for a job's processes only; a user's shell may have SLURM_CONF, never both.
    (`proctrack/linuxproc` follows parents, so a daemonized process outlives its job's cancellation.)
    """
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            variables = (entry / "environ").read_bytes().split(b"\0")
            of_a_job = any(variable.startswith(b"SLURMD_NODENAME=") for variable in variables)
            of_slurm = (entry / "comm").read_text().strip() == "slurmstepd"
            if (of_a_job or of_slurm) and f"SLURM_CONF={files.slurm_conf}".encode() in variables:
                found.append(int(entry.name))
    return found
