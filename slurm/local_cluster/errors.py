"""What can go wrong, with the exit codes of `slurm/local-cluster`."""

from __future__ import annotations


class ClusterError(Exception):
    """Says what happened, where, and what to do next; `code` is the exit code."""

    code = 4

    def add(self, hint: str) -> None:
        self.args = (f"{self}\n\n{hint}",)


class UsageError(ClusterError):
    code = 2


class UnsuitableMachineError(ClusterError):
    code = 5
