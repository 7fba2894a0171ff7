"""The cluster under one root folder, and what can be done with it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import sys
from dataclasses import asdict
from pathlib import Path

from local_cluster import configuration
from local_cluster.clients import Clients
from local_cluster.configuration import KILL_WAIT, Files, Layout
from local_cluster.daemons import Daemons, Service, job_processes, services
from local_cluster.errors import ClusterError, UsageError
from local_cluster.machine import (
    add_host_names,
    ensure_packages,
    free_ports,
    only_one_on_this_machine,
    remove_host_names,
    say,
    tail,
    wait_for,
)

# A unix socket's path may have 107 bytes; the longest of ours adds about 20.
LONGEST_ROOT = 80


class Cluster:
    """One method a verb of the command line."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = Files(root)
        self.clients = Clients(self.files)
        self.daemons = Daemons(self.files, self.clients)

    def exists(self) -> bool:
        return self.files.record.is_file()

    def layout(self) -> Layout:
        if not self.exists():
            raise ClusterError(f"no cluster under {self.root}\n\nhint: {sys.argv[0]} up --root {self.root}")
        return Layout(**json.loads(self.files.record.read_text()))

    def services(self) -> list[Service]:
        return services(self.files, self.layout(), self.clients)

    def service(self, name: str) -> Service:
        named = {service.name: service for service in self.services()}
        if name not in named:
            raise UsageError(f"no daemon {name!r} in this cluster; there are: {', '.join(named)}")
        return named[name]

    def up(self, nodes: int | None, cpus: int | None, accounting: bool | None) -> None:
        """Makes the cluster, or starts what is missing of it; None asks for nothing in particular."""
        if self.exists():
            self._refuse_another_shape(nodes=nodes, cpus=cpus, accounting=accounting)
            say(f"a cluster is there: {self.root}")
        else:
            ensure_packages(accounting is not False)
        with only_one_on_this_machine():
            if not self.exists():
                count = nodes or 4
                self._make_root(Layout(count, cpus or 4, accounting is not False, free_ports(count + 2)))
            add_host_names(self.root, self.layout().node_names)
            try:
                self._start_all()
            except ClusterError as error:
                error.add(f"hint: what was started still runs; {sys.argv[0]} down --root {self.root} ends it")
                raise
        say(f'up; use it with: eval "$({sys.argv[0]} env --root {self.root})"')

    def _start_all(self) -> None:
        missing = [service.name for service in self.services() if self.daemons.pid(service.name) is None]
        for service in self.services():
            if service.name in missing:
                say(f"starting {service.name}")
            self.daemons.start(service)
            if service.name == "slurmdbd":
                self._register()
        nodes = self.layout().node_names
        for name in nodes:
            self.node_up(name)
        if missing and not self.clients.jobs():
            width = min(2, len(nodes))
            self.clients.must("srun", f"--nodes={width}", f"--ntasks={width}", "hostname")

    def down(self, keep: bool) -> None:
        if not self.exists():
            say(f"no cluster under {self.root}")
            return
        if self.daemons.pid("slurmctld") is not None and (jobs := self.clients.jobs()):
            say(f"cancelling {len(jobs)} jobs")
            self.clients.run("scancel", *jobs)
            wait_for(lambda: not self.clients.jobs(), KILL_WAIT + 5)
        for service in reversed(self.services()):
            self.daemons.stop(service.name)
        # With its slurmd gone, nothing else ends a job's process that outlived the cancel.
        for pid in job_processes(self.files):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        remove_host_names(self.root)
        if not keep:
            shutil.rmtree(self.root)
        say(f"down: {self.root}" + (" (files kept)" if keep else ""))

    def status(self) -> tuple[str, bool]:
        """What runs, as text, and whether that is everything."""
        layout = self.layout()
        pids = {service.name: self.daemons.pid(service.name) for service in self.services()}
        lines = [f"{name:<10} {f'pid {pid}' if pid else 'not running'}" for name, pid in pids.items()]
        if pids["slurmctld"] is not None:
            lines.append(self.clients.run("sinfo", "-N", "-o", "%10N %10P %10T %4c %E").stdout.rstrip())
        lines.append(f"accounting: {'yes' if layout.accounting else 'no'}")
        return "\n".join([*lines, self.environment()]), all(pids.values())

    def environment(self) -> str:
        """The line a shell needs to use the cluster."""
        self.layout()
        return f"export SLURM_CONF={self.files.slurm_conf}"

    def start(self, name: str) -> None:
        self.daemons.start(self.service(name))

    def stop(self, name: str) -> None:
        self.daemons.stop(self.service(name).name)

    def node_down(self, name: str) -> None:
        """What a health check does to a failed node: its jobs end as NODE_FAIL or are requeued."""
        self._check_node(name)
        reason = "Reason=local-cluster node-down"
        self.clients.must("scontrol", "update", f"NodeName={name}", "State=DOWN", reason)

    def node_up(self, name: str, timeout: float = 60) -> None:
        """Starts the node's slurmd, resumes the node, and waits until it takes jobs or has some."""
        self._check_node(name)
        self.daemons.start(self.service(name))
        if self.clients.node_state(name).startswith(("down", "drain", "fail")):
            self.clients.must("scontrol", "update", f"NodeName={name}", "State=RESUME")
        usable = {"idle", "allocated", "mixed", "completing"}  # a `*` after it: the node does not answer
        if not wait_for(lambda: self.clients.node_state(name) in usable, timeout):
            state = self.clients.node_state(name) or "unknown to slurmctld"
            raise ClusterError(f"{name} is {state} after {timeout:.0f} s\n{tail(self.service(name).log)}")

    def _check_node(self, name: str) -> None:
        names = self.layout().node_names
        if name not in names:
            raise UsageError(f"no node {name!r} in this cluster; there are: {', '.join(names)}")

    def _refuse_another_shape(self, **asked: int | bool | None) -> None:
        have = asdict(self.layout())
        differs = [f"{k}={have[k]}" for k, v in asked.items() if v not in (None, have[k])]
        if differs:
            hint = "hint: `down` first, or another --root"
            raise UsageError(f"the cluster under {self.root} has {', '.join(differs)}\n\n{hint}")

    def _make_root(self, layout: Layout) -> None:
        if len(str(self.root)) > LONGEST_ROOT:
            raise UsageError(f"{self.root} is too long for the sockets in it: at most {LONGEST_ROOT} characters")
        if self.root.is_symlink() or (self.root.exists() and any(self.root.iterdir())):
            raise UsageError(f"{self.root} exists and is no cluster of ours\n\nhint: choose another --root")
        closed = [p for p in self.root.parents if p.exists() and not p.stat().st_mode & stat.S_IXOTH]
        if closed:
            raise UsageError(f"{closed[-1]} is closed to the users munge and mysql\n\nhint: choose another --root")
        try:
            self._write_files(layout)
        except BaseException:  # a half-made folder would be in the way of the next try
            shutil.rmtree(self.root, ignore_errors=True)
            raise
        self.files.record.write_text(json.dumps(asdict(layout), indent=2) + "\n")

    def _write_files(self, layout: Layout) -> None:
        files = self.files
        for folder in ("etc", "log", "run", "spool", "state", "munge"):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        shutil.chown(self.root, "root", "root")
        self.root.chmod(0o755)  # every user's clients read etc/ and the munge socket
        files.slurm_conf.write_text(configuration.slurm_conf(files, layout))
        files.cgroup_conf.touch()  # slurmd wants the file, even with no cgroup plugin in use
        # munged refuses a key that others can read, and a folder that it does not own.
        files.munge_key.touch(mode=0o400)
        files.munge_key.write_bytes(os.urandom(1024))
        for path in (files.munge_dir, files.munge_key):
            shutil.chown(path, "munge", "munge")
        if layout.accounting:
            files.slurmdbd_conf.touch(mode=0o600)  # slurmdbd refuses to start if others can read it
            files.slurmdbd_conf.write_text(configuration.slurmdbd_conf(files, layout))
            files.mysql_dir.mkdir()
            shutil.chown(files.mysql_dir, "mysql", "mysql")
            say("creating the accounting database's files")
            install = ["mariadb-install-db", "--no-defaults", "--user=mysql", "--skip-test-db"]
            install += ["--auth-root-authentication-method=socket", f"--datadir={files.mysql_dir}/data"]
            self.clients.must(*install)

    def _register(self) -> None:
        """slurmctld can send its records only once the database knows the cluster's name."""
        if not self.clients.must("sacctmgr", "--noheader", "list", "cluster", "format=cluster").strip():
            self.clients.must("sacctmgr", "--immediate", "add", "cluster", "local")
