"""Where a cluster's files lie, what it consists of, and the text of its configuration files."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

KILL_WAIT = 5  # seconds from TERM to KILL


@dataclass(frozen=True)
class Layout:
    """What `up` was asked for; kept in cluster.json, so that every later verb acts on the same cluster."""

    nodes: int
    cpus: int
    accounting: bool
    port: int  # the first of nodes + 2 consecutive ports: slurmctld, slurmdbd, slurmd of node1, …

    @property
    def node_names(self) -> list[str]:
        return [f"node{i}" for i in range(1, self.nodes + 1)]

    @property
    def slurmctld_port(self) -> int:
        return self.port

    @property
    def slurmdbd_port(self) -> int:
        return self.port + 1

    def slurmd_port(self, node: str) -> int:
        return self.port + 2 + self.node_names.index(node)


class Files:
    """Every path of the cluster under one root folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.record = root / "cluster.json"
        self.run_dir = root / "run"
        self.log_dir = root / "log"
        self.slurm_conf = root / "etc" / "slurm.conf"
        self.slurmdbd_conf = root / "etc" / "slurmdbd.conf"
        self.cgroup_conf = root / "etc" / "cgroup.conf"
        self.munge_dir = root / "munge"
        self.munge_socket = self.munge_dir / "munge.socket"
        self.munge_key = self.munge_dir / "munged.key"
        self.mysql_dir = root / "mysql"
        self.mysql_socket = self.mysql_dir / "mysql.sock"


def slurm_conf(files: Files, layout: Layout) -> str:
    root, host = files.root, socket.gethostname().partition(".")[0]
    lines = f"""\
# Written by slurm/local-cluster; `down` removes it.
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={layout.slurmctld_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={files.munge_socket}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd-%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
MailProg=/bin/true
MpiDefault=none
# Containers and virtual machines often have no cgroups to delegate.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=2
# Nodes may claim more CPUs and memory than the one host has.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,defer_batch
KillWait={KILL_WAIT}
MinJobAge=300
JobRequeue=1
InactiveLimit=0
# A node that was set down stays down; one that merely did not answer comes back by itself.
ReturnToService=1
# A host whose cores are busy with training answers late; the defaults would then fail jobs and nodes.
MessageTimeout=30
BatchStartTimeout=60
SlurmctldTimeout=60
SlurmdTimeout=60
"""
    if layout.accounting:
        lines += "AccountingStorageType=accounting_storage/slurmdbd\n"
        lines += f"AccountingStorageHost=127.0.0.1\nAccountingStoragePort={layout.slurmdbd_port}\n"
        # Clients of slurmdbd take their munge socket from here, not from AuthInfo.
        lines += f"AccountingStoragePass={files.munge_socket}\n"
    for name in layout.node_names:
        lines += f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={layout.slurmd_port(name)} "
        lines += f"CPUs={layout.cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={layout.cpus} "
        lines += "ThreadsPerCore=1 RealMemory=16000 State=UNKNOWN\n"
    every = f"node[1-{layout.nodes}]"
    lines += f"PartitionName=debug Nodes={every} Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO\n"
    lines += f"PartitionName=small Nodes={every} MaxTime=00:02:00 State=UP OverSubscribe=NO\n"
    return lines


def slurmdbd_conf(files: Files, layout: Layout) -> str:
    return f"""\
# Written by slurm/local-cluster; `down` removes it. slurmdbd looks for it beside SLURM_CONF.
AuthType=auth/munge
AuthInfo=socket={files.munge_socket}
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={layout.slurmdbd_port}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
LogFile={files.root}/log/slurmdbd.log
PidFile={files.root}/run/slurmdbd.pid
"""
