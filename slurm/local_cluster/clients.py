"""Running Slurm's clients against this cluster."""

from __future__ import annotations

import os
import subprocess

from local_cluster.configuration import Files
from local_cluster.errors import ClusterError
from local_cluster.machine import PATH


class Clients:
    """Commands in an environment that names this cluster alone."""

    def __init__(self, files: Files) -> None:
        self.files = files

    def env(self) -> dict[str, str]:
        """For daemons and clients: no SLURM_* of a job or of another cluster leaks into it."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "MYSQL"))}
        return clean | {"PATH": PATH, "SLURM_CONF": str(self.files.slurm_conf)}

    def run(self, *argv: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Runs to its end; a client that hangs or is not there counts as one that failed."""
        try:
            return subprocess.run(argv, env=self.env(), capture_output=True, text=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(argv, 124, "", f"no answer in {timeout:.0f} s")
        except FileNotFoundError:
            return subprocess.CompletedProcess(argv, 127, "", "not on PATH")

    def complaint(self, *argv: str) -> str:
        """What the command says against its daemon; empty if it succeeds."""
        done = self.run(*argv)
        return "" if done.returncode == 0 else done.stderr.strip() or f"`{argv[0]}` exited {done.returncode}"

    def controller_complaint(self) -> str:
        said = self.run("scontrol", "ping")
        return "" if said.stdout.strip().endswith("is UP") else (said.stderr or said.stdout).strip()

    def must(self, *argv: str) -> str:
        """The command's output, or ClusterError with what it said."""
        done = self.run(*argv)
        if done.returncode:
            raise ClusterError(f"`{' '.join(argv)}` exited {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def jobs(self) -> list[str]:
        return self.run("squeue", "--noheader", "--format=%A").stdout.split()

    def node_state(self, name: str) -> str:
        """Slurm's word for it, as `idle` or `down*`; empty if slurmctld does not answer."""
        # A line a partition, all with the same state.
        return self.run("sinfo", "--noheader", f"--nodes={name}", "--format=%T").stdout.partition("\n")[0]
