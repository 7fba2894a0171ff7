"""A real Slurm cluster for the tests in this folder, brought up once a pytest process and taken down at its end.

Each process has a cluster of its own (a few seconds, some 500 MB), pytest-xdist's workers too: these tests break nodes
and daemons and cancel every job, so sharing one would break the others. (xdist_group could serialize them, but xdist
3.8 ignores it under pytest 9.2.) `DETRUN_SLURM_ROOT=FOLDER` names a cluster of yours, used without `-n` and left up.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

LOCAL_CLUSTER = Path(__file__).parents[2] / "slurm" / "local-cluster"
OURS = "detrun-slurm-tests-"  # how the folders of these clusters begin
UNSUITABLE_MACHINE = 5  # local-cluster's exit code for "not root" and "cannot be installed"


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.cluster)


class SlurmCluster:
    """The running cluster, and the faults that a test may put into it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.nodes = [f"node{i}" for i in range(1, 5)]

    def local_cluster(self, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs `slurm/local-cluster` on this cluster's root."""
        command = [sys.executable, str(LOCAL_CLUSTER), *args, "--root", str(self.root)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0 or not check, f"{' '.join(args)}: {done.stderr}"
        return done

    def run_slurm(self, *args: str, check: bool = True) -> str:
        """Runs a Slurm command, as `run_slurm("squeue", "-h")`, and returns what it printed."""
        done = subprocess.run(args, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0 or not check, f"{' '.join(args)}: {done.stderr}"
        return done.stdout

    def node_down(self, name: str) -> None:
        self.local_cluster("node-down", name)

    def node_up(self, name: str) -> None:
        self.local_cluster("node-up", name)

    def restart_controller(self) -> None:
        self.local_cluster("restart", "slurmctld")

    def stop_accounting(self) -> None:
        self.local_cluster("stop", "slurmdbd")

    def start_accounting(self) -> None:
        self.local_cluster("start", "slurmdbd")

    def jobs(self) -> dict[str, str]:
        """Job ids in the queue, each with squeue's word for its state."""
        lines = self.run_slurm("squeue", "--noheader", "--format=%A %T").splitlines()
        return dict(line.split() for line in lines)

    def state(self, job: str) -> str:
        """sacct's word for the job's last attempt, as `COMPLETED` or `CANCELLED by 0`; empty if it has none yet."""
        words = self.run_slurm("sacct", "-X", "-n", "-P", "-j", job, "-o", "State").split("\n")
        return [word for word in words if word][-1] if any(words) else ""

    def wait_until(self, condition: Callable[[], object], timeout: float = 60) -> None:
        """Polls until the condition holds; fails the test if it does not in `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout:.0f} s; queue: {self.jobs()}"
            time.sleep(0.2)

    def wait_for_state(self, job: str, word: str, timeout: float = 120) -> None:
        """sacct lags squeue by a second or so, and is silent while slurmdbd is down."""
        self.wait_until(lambda: self.state(job).startswith(word), timeout)

    def mend(self) -> None:
        """Cancels what is queued, and brings back whatever a test took down."""
        self.local_cluster("up")
        if jobs := self.jobs():
            self.run_slurm("scancel", *jobs, check=False)
            self.wait_until(lambda: not self.jobs(), 30)


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """The cluster, with SLURM_CONF set for this process and its children."""
    chosen = os.environ.get("DETRUN_SLURM_ROOT")
    if chosen:
        with running(SlurmCluster(Path(chosen))) as cluster:
            yield cluster
        return
    end_abandoned_clusters()
    root = Path(tempfile.gettempdir()) / f"{OURS}{os.getpid()}"
    owner = root.with_suffix(".owner")
    with owner.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel gives it back if this process dies
        with running(SlurmCluster(root)) as cluster:
            yield cluster
        end(owner)


@contextlib.contextmanager
def running(cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    up = cluster.local_cluster("up", check=False)
    if up.returncode == UNSUITABLE_MACHINE and "CI" not in os.environ:
        pytest.skip(f"no Slurm cluster here: {up.stderr.strip()}")
    if up.returncode:
        pytest.fail(f"local-cluster up exited {up.returncode}:\n{up.stderr}", pytrace=False)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_", "SRUN_"))]:
            patch.delenv(name)
        patch.setenv("SLURM_CONF", str(cluster.root / "etc" / "slurm.conf"))
        yield cluster


def end(owner: Path) -> None:
    """Takes a process's cluster down, with the lock files beside it."""
    SlurmCluster(owner.with_suffix("")).local_cluster("down", check=False)
    owner.with_suffix(".lock").unlink(missing_ok=True)
    owner.unlink(missing_ok=True)


def end_abandoned_clusters() -> None:
    """Takes down what processes that were killed left up."""
    for owner in Path(tempfile.gettempdir()).glob(f"{OURS}*.owner"):
        with contextlib.suppress(FileNotFoundError, BlockingIOError), owner.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            end(owner)


@pytest.fixture
def mended_cluster(slurm_cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """For a test that breaks something or leaves jobs behind: the cluster is whole and empty again afterwards."""
    yield slurm_cluster
    slurm_cluster.mend()
