"""A connection by the system's own `ssh`, with whatever the user's configuration makes of it."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from detrun.errors import UsageError
from detrun.launch.ssh.address import Address
from detrun.launch.ssh.client import SILENCE, Channel, CutError, RefusedError, command_line

FAILED = 255
"""ssh's own exit code for "no connection"."""
COMPLAINTS = 16 * 1024
_REFUSALS = ("Host key verification failed", "IDENTIFICATION HAS CHANGED", "Permission denied", "host key is known for")


class OpenSshClient:
    """`ssh`, called once a channel. Where the user does not multiplex, the calls share one connection of ours."""

    def __init__(self, address: Address) -> None:
        if shutil.which("ssh") is None:
            raise UsageError("--ssh openssh: there is no ssh on PATH", hint="install it, or leave --ssh out")
        self._target = f"{address.user}@{address.host}" if address.user else address.host
        port = ["-p", str(address.port)] if address.port else []
        self._options = [*port, "-o", "StrictHostKeyChecking=yes", "-T"]
        self._shared: Path | None = None
        if not self._multiplexes():
            # A socket's path may have 108 characters, and ssh adds some of its own.
            self._shared = Path(tempfile.mkdtemp(prefix="detrun-ssh-", dir="/tmp"))
            own = [f"ControlPath={self._shared}/%C", "ControlMaster=auto", "ControlPersist=300"]
            self._options += [word for option in own for word in ("-o", option)]

    def run(self, words: Sequence[str]) -> Channel:
        # A file and not a pipe: a connection that stays for later calls keeps its stderr open.
        complaints = tempfile.TemporaryFile()  # noqa: SIM115  the channel closes it
        try:
            process = subprocess.Popen(
                ["ssh", *self._options, "--", self._target, command_line(words)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                start_new_session=False,
            )
        except OSError as error:
            complaints.close()
            raise UsageError(f"ssh cannot be started: {error.strerror}") from None
        return OpenSshChannel(process, complaints)

    def close(self) -> None:
        if self._shared is None:
            return
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                ["ssh", *self._options, "-O", "exit", "--", self._target],
                capture_output=True,
                check=False,
                timeout=10,
            )
        shutil.rmtree(self._shared, ignore_errors=True)
        self._shared = None

    def _multiplexes(self) -> bool:
        """Whether the user's configuration shares connections itself."""
        try:
            told = subprocess.run(
                ["ssh", "-G", *self._options, "--", self._target],
                capture_output=True,
                text=True,
                check=False,
                timeout=20,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        words = dict(line.partition(" ")[::2] for line in told.stdout.splitlines())
        return words.get("controlmaster", "false") != "false" and words.get("controlpath", "none") != "none"


class OpenSshChannel:
    """One call of ssh."""

    def __init__(self, process: subprocess.Popen[bytes], complaints: IO[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._complaints = process, complaints
        self._in, self._out = process.stdin, process.stdout
        os.set_blocking(self._in.fileno(), False)

    def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            _, ready, _ = select.select([], [self._in], [], SILENCE)
            if not ready:
                raise CutError(f"nothing could be sent for {SILENCE:.0f} s")
            try:
                view = view[os.write(self._in.fileno(), view) :]
            except BlockingIOError:
                continue
            except OSError:
                raise self._failure() from None

    def receive(self, limit: int) -> bytes:
        ready, _, _ = select.select([self._out], [], [], SILENCE)
        if not ready:
            raise CutError(f"nothing was heard for {SILENCE:.0f} s")
        data = os.read(self._out.fileno(), limit)
        if not data and self._wait(5) == FAILED:
            raise self._failure()
        return data

    def end(self) -> tuple[int | None, str]:
        with suppress(OSError):
            self._in.close()
        code = self._wait(2)
        if code is None:
            self._process.terminate()
            self._wait(2)
        with suppress(OSError):
            self._out.close()
        text = self._said()
        self._complaints.close()
        return code, text

    def _failure(self) -> CutError | RefusedError:
        """Why ssh ended by itself. What it said is its own, and the best there is."""
        self._wait(5)
        text = self._said().strip()
        if any(word in text for word in _REFUSALS):
            lines = [line for line in text.splitlines() if line.strip() and not line.startswith("@@@")]
            return RefusedError(
                "ssh refused to log in",
                excerpt=lines[-20:],
                hint="`ssh HOST true` has to work here first; it also shows an unknown host key and accepts it",
            )
        last = text.splitlines()[-1] if text else f"ssh ended with exit code {self._process.poll()}"
        return CutError(f"the connection was cut: {last}", hint="`ssh HOST true` has to work here first")

    def _wait(self, patience: float) -> int | None:
        try:
            return self._process.wait(patience)
        except subprocess.TimeoutExpired:
            return None

    def _said(self) -> str:
        with suppress(OSError, ValueError):
            size = self._complaints.seek(0, os.SEEK_END)
            self._complaints.seek(max(0, size - COMPLAINTS))
            return self._complaints.read(COMPLAINTS).decode("utf-8", "replace")
        return ""
