"""A real sshd on loopback, with a port, keys and a home of its own, and a line to it that can be cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.packages import PATH, ensure_program


def ensure_sshd() -> str:
    """The path of sshd."""
    return ensure_program(["sshd"], "openssh-server")


def free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_key(path: Path, kind: str = "ed25519", passphrase: str = "") -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-f", str(path)], check=True)
    return path


@dataclass
class Sshd:
    """A running server. home: the HOME of whoever connects; variables: what sessions have in their environment."""

    root: Path
    port: int = field(default_factory=free_port)
    variables: dict[str, str] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def archive(self) -> Path:
        return self.root / "far-archive"

    @property
    def known_hosts(self) -> Path:
        return self.home / ".ssh" / "known_hosts"

    def set_up(self) -> None:
        """Keys of host and user, and a home whose ssh knows this host as `cluster`."""
        (self.home / ".ssh").mkdir(parents=True, mode=0o700)
        self.root.chmod(0o755)
        make_key(self.root / "host_key")
        make_key(self.home / ".ssh" / "key")
        shutil.copy(self.home / ".ssh" / "key.pub", self.root / "authorized_keys")
        self.know()
        self.write_client_config()

    def know(self, port: int | None = None) -> None:
        """The host's key is known, at that port too."""
        kind, key = (self.root / "host_key.pub").read_text().split()[:2]
        with self.known_hosts.open("a") as file:
            file.write(f"[127.0.0.1]:{port or self.port} {kind} {key}\n")

    def write_client_config(self, *more: str, port: int | None = None) -> Path:
        path = self.home / ".ssh" / "config"
        lines = [
            "Host cluster",
            "  HostName 127.0.0.1",
            f"  Port {port or self.port}",
            "  User root",
            f"  IdentityFile {self.home}/.ssh/key",
            "  IdentitiesOnly yes",
            f"  UserKnownHostsFile {self.known_hosts}",
            *(f"  {line}" for line in more),
        ]
        path.write_text("\n".join(lines) + "\n")
        return path

    def start(self) -> None:
        sshd = ensure_sshd()
        Path("/run/sshd").mkdir(exist_ok=True)
        variables = {
            "XDG_CACHE_HOME": str(self.cache),
            "DETRUN_ARCHIVE": str(self.archive),
            **self.variables,
        }
        config = self.root / "sshd_config"
        lines = [
            f"Port {self.port}",
            "ListenAddress 127.0.0.1",
            f"HostKey {self.root}/host_key",
            f"PidFile {self.root}/pid",
            f"AuthorizedKeysFile {self.root}/authorized_keys",
            "StrictModes no",
            "UsePAM no",
            "PermitRootLogin yes",
            "PasswordAuthentication yes",
            "MaxStartups 100",
            "SetEnv " + " ".join(f'"{name}={value}"' for name, value in variables.items()),
            *self.settings,
        ]
        config.write_text("\n".join(lines) + "\n")
        with (self.root / "log").open("ab") as log:
            self.process = subprocess.Popen([sshd, "-D", "-e", "-f", str(config)], stdout=log, stderr=log)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            assert self.process.poll() is None, (self.root / "log").read_text()
            time.sleep(0.05)
        pytest.fail(f"sshd does not answer: {(self.root / 'log').read_text()}")

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(10)
            self.process = None

    def ssh_on_path(self) -> str:
        """A PATH whose `ssh` reads this home's configuration; the real one asks the system for the home."""
        folder = self.root / "bin"
        folder.mkdir(exist_ok=True)
        script = folder / "ssh"
        script.write_text(f'#!/bin/sh\nexec {shutil.which("ssh", path=PATH)} -F {self.home}/.ssh/config "$@"\n')
        script.chmod(0o755)
        return f"{folder}{os.pathsep}{PATH}"

    def environment(self, **more: str) -> dict[str, str]:
        """Of a command that connects from here."""
        return {"HOME": str(self.home), "DETRUN_REMOTE": sys.executable, **more}


@contextlib.contextmanager
def running_sshd(root: Path, **options: object) -> Iterator[Sshd]:
    server = Sshd(root, **options)  # type: ignore[arg-type]
    server.set_up()
    server.start()
    try:
        yield server
    finally:
        server.stop()


class Line:
    """A TCP line to a server that passes bytes on until it is told to cut."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.cut_after: int | None = None
        """Bytes from the client after which the connection is cut, once; later ones are not, unless `dead`."""
        self.dead = False
        self.sent = 0
        self.connections = 0
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self) -> None:
        """Cuts what is connected now."""
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self) -> None:
        self.dead = True
        self._listener.close()
        self.cut()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self.dead:
                near.close()
                continue
            self.connections += 1
            far = socket.create_connection(("127.0.0.1", self._to))
            self._sockets += [near, far]
            threading.Thread(target=self._pass_on, args=(near, far, True), daemon=True).start()
            threading.Thread(target=self._pass_on, args=(far, near, False), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, outgoing: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
                if outgoing:
                    self.sent += len(data)
                    if self.cut_after is not None and self.sent >= self.cut_after:
                        self.cut_after = None
                        self.cut()
                        return
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)
