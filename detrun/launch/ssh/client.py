"""What a connection to another machine can do, whichever program makes it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Protocol

from detrun.errors import ClusterError, UsageError

SILENCE = 60.0
"""Seconds without a byte after which a connection counts as cut; the far end says something every BEAT."""
WAYS = ("paramiko", "openssh")
_LOGIN_SHELL = ("bash", "-lc", 'exec "$0" "$@"')
"""Modules, Slurm's commands and a site's variables come in with the login shell; ours are arguments to it, not text."""


class CutError(ClusterError):
    """The connection is gone, or nothing comes through it. What runs there goes on; connecting again may help."""


class RefusedError(ClusterError):
    """The other machine or we ourselves refuse to go on (host key, password, no detrun): trying again does not help."""


class Channel(Protocol):
    """One program that runs over there, with its input and output."""

    def send(self, data: bytes) -> None:
        """All of it, or CutError."""

    def receive(self, limit: int) -> bytes:
        """What has come, at most `limit` bytes; nothing at the end. CutError after SILENCE seconds without anything."""

    def end(self) -> tuple[int | None, str]:
        """Closes the channel: the program's exit code if it is known, and the end of what it complained about."""


class Client(Protocol):
    """One connection that carries any number of channels, one after another."""

    def run(self, words: Sequence[str]) -> Channel:
        """Starts a program there. CutError where the connection is gone, RefusedError where it is refused."""

    def close(self) -> None: ...


def command_line(words: Sequence[str]) -> str:
    """The one string that SSH carries: each word quoted, within a login shell that runs them as they are."""
    return shlex.join([*_LOGIN_SHELL, *words])


def far_program(given: str | None) -> list[str]:
    """How detrun is called there. given: a Python that has it, or detrun itself; None is `detrun` on PATH."""
    if given is None:
        return ["detrun"]
    if not given.strip() or given.startswith("-") or not given.isprintable():
        raise UsageError("--remote-python names no program", hint="the path of a Python that detrun is installed for")
    return [given, "-m", "detrun"] if PurePosixPath(given).name.startswith(("python", "pypy")) else [given]
