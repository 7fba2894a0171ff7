"""Connections to a real sshd: keys, agent, passwords, hosts in between, and every way to be refused."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest

from detrun.experiments.remote.connection import Login, Remote
from detrun.launch.ssh.address import parse_address
from detrun.launch.ssh.client import Client, CutError, RefusedError
from detrun.launch.ssh.openssh_client import OpenSshClient
from detrun.launch.ssh.paramiko_client import ParamikoClient
from tests.ssh_server import Sshd, make_key, running_sshd


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with running_sshd(tmp_path_factory.mktemp("sshd")) as running:
        yield running


@pytest.fixture(autouse=True)
def home(server: Sshd, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of whoever connects; its configuration and known hosts are as they were at first."""
    monkeypatch.setenv("HOME", str(server.home))
    monkeypatch.setenv("PATH", server.ssh_on_path())
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    server.write_client_config()
    server.known_hosts.write_text("")
    server.know()
    return server.home


def nobody(prompt: str) -> None:
    return None


def connect(way: str = "paramiko", host: str = "cluster") -> Client:
    address = parse_address(host)
    return ParamikoClient(address, nobody) if way == "paramiko" else OpenSshClient(address)


def run(client: Client, *words: str, data: bytes = b"") -> tuple[bytes, int | None, str]:
    channel = client.run(words)
    if data:
        channel.send(data)
    received = b""
    while piece := channel.receive(65536):
        received += piece
        if data and len(received) >= len(data):
            break
    return received, *channel.end()


WAYS = pytest.mark.parametrize("way", ["paramiko", "openssh"])


@WAYS
def test_bytes_go_over_as_they_are(way: str) -> None:
    data = os.urandom(1 << 20)
    client = connect(way)
    try:
        assert run(client, "cat", data=data)[0] == data
        # Several programs, one after another; what they complain of is kept, however much it is.
        script = "import sys; sys.stderr.write('x' * 3000000 + 'the end'); print(sys.argv[1:]); sys.exit(7)"
        out, code, complaints = run(client, sys.executable, "-c", script, "a b", "$HOME", "'")
        assert out.decode().strip() == """['a b', '$HOME', "'"]"""
        assert code == 7 and complaints.endswith("the end") and len(complaints) < 100_000
    finally:
        client.close()


@WAYS
def test_an_unknown_host_key_is_refused(way: str, server: Sshd) -> None:
    server.known_hosts.write_text("")
    with pytest.raises(RefusedError) as raised:
        run(connect(way), "true")
    if way == "paramiko":
        fingerprint = subprocess.run(
            ["ssh-keygen", "-lf", str(server.root / "host_key.pub")], capture_output=True, text=True, check=True
        ).stdout.split()[1]
        assert fingerprint in raised.value.what and "is not known" in raised.value.what
        command = str(raised.value.hint).rpartition("\n")[2]
        subprocess.run(["sh", "-c", command], check=True)
        connect(way).close()
    else:
        assert "Host key verification failed" in raised.value.render()


@WAYS
def test_a_wrong_host_key_is_refused_in_stern_words(way: str, server: Sshd, tmp_path: Path) -> None:
    kind, key = make_key(tmp_path / "other").with_suffix(".pub").read_text().split()[:2]
    server.known_hosts.write_text(f"[127.0.0.1]:{server.port} {kind} {key}\n")
    with pytest.raises(RefusedError) as raised:
        run(connect(way), "true")
    assert "HAS CHANGED" in raised.value.render()


def test_a_host_of_which_another_kind_of_key_is_known(server: Sshd, tmp_path: Path) -> None:
    kind, key = make_key(tmp_path / "rsa", "rsa").with_suffix(".pub").read_text().split()[:2]
    server.known_hosts.write_text(f"[127.0.0.1]:{server.port} {kind} {key}\n")
    with pytest.raises(RefusedError, match="HAS CHANGED"):
        connect()
    server.know()
    connect().close()


def test_no_key_and_nobody_to_ask(server: Sshd) -> None:
    server.write_client_config("PubkeyAuthentication no")
    config = server.home / ".ssh" / "config"
    config.write_text(config.read_text().replace("/key", "/no-such-key"))
    with pytest.raises(RefusedError, match=r"root@127\.0\.0\.1 is refused") as raised:
        connect()
    assert "--ask-password" in str(raised.value.hint)
    asked: list[str] = []
    with pytest.raises(RefusedError, match="is refused"):
        ParamikoClient(parse_address("cluster"), lambda prompt: asked.append(prompt) or "wrong")
    assert len(asked) == 2


def test_openssh_without_a_key(server: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    server.write_client_config("PubkeyAuthentication no", "BatchMode yes")
    with pytest.raises(RefusedError) as raised:
        run(connect("openssh"), "true")
    assert "Permission denied" in raised.value.render()


def test_a_key_in_the_agent(server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = server.home / ".ssh" / "config"
    kept = [line for line in config.read_text().splitlines() if "Identit" not in line]
    config.write_text("\n".join(kept) + "\n")
    sock = tmp_path / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(sock)], stdout=subprocess.DEVNULL)
    try:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(sock))
        with pytest.raises(RefusedError):
            connect()
        subprocess.run(["ssh-add", "-q", str(server.home / ".ssh" / "key")], check=True)
        connect().close()
    finally:
        agent.terminate()
        agent.wait(10)


def test_a_locked_key_and_its_passphrase(server: Sshd, tmp_path: Path) -> None:
    key = make_key(tmp_path / "locked", passphrase="open it")
    with (server.root / "authorized_keys").open("a") as file:
        file.write(key.with_suffix(".pub").read_text())
    config = server.home / ".ssh" / "config"
    config.write_text(config.read_text().replace(f"{server.home}/.ssh/key", str(key)))
    with pytest.raises(RefusedError):
        connect()
    passwords: dict[str, str] = {}
    ParamikoClient(parse_address("cluster"), lambda _: "open it", passwords=passwords).close()
    # A connection that is made anew asks nobody.
    ParamikoClient(parse_address("cluster"), nobody, passwords=passwords).close()


@WAYS
def test_through_a_host_in_between(way: str, server: Sshd) -> None:
    config = server.home / ".ssh" / "config"
    text = config.read_text()
    config.write_text(text + text.replace("Host cluster", "Host inside") + "  ProxyJump cluster\n")
    client = connect(way, "inside")
    try:
        out, _, _ = run(client, "sh", "-c", "echo $SSH_CONNECTION; pgrep -c sshd >/dev/null")
        assert out.startswith(b"127.0.0.1 ")
    finally:
        client.close()


def test_through_a_command_of_the_users_own(server: Sshd) -> None:
    script = server.root / "through.py"
    script.write_text(
        "import os, socket, sys, threading\n"
        f"line = socket.create_connection(('127.0.0.1', {server.port}))\n"
        "def up():\n"
        "    while data := os.read(0, 65536):\n        line.sendall(data)\n"
        "threading.Thread(target=up, daemon=True).start()\n"
        "while data := line.recv(65536):\n    os.write(1, data)\n"
    )
    server.write_client_config(f"ProxyCommand {sys.executable} {script}")
    client = connect()
    try:
        assert run(client, "echo", "there")[0] == b"there\n"
    finally:
        client.close()


@WAYS
def test_nobody_listens(way: str, server: Sshd) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        server.write_client_config(port=silent.getsockname()[1])
        with pytest.raises(CutError) as raised:
            run(connect(way), "true")
    assert "efused" in raised.value.what and raised.value.hint


class Password(paramiko.ServerInterface):
    def check_auth_password(self, username: str, password: str) -> int:
        return paramiko.AUTH_SUCCESSFUL if password == "right" else paramiko.AUTH_FAILED

    def get_allowed_auths(self, username: str) -> str:
        return "password"


def test_a_password_is_asked_for_until_it_is_right(server: Sshd) -> None:
    host_key = paramiko.Ed25519Key.from_private_key_file(str(server.root / "host_key"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        transports: list[paramiko.Transport] = []

        def serve() -> None:
            for _ in range(2):
                transport = paramiko.Transport(listener.accept()[0])
                transports.append(transport)
                transport.add_server_key(host_key)
                transport.start_server(server=Password())

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        server.write_client_config(port=port)
        server.know(port)
        answers = iter(["wrong", "right"])
        ParamikoClient(parse_address("cluster"), lambda _: next(answers), always_ask=True).close()
        thread.join(10)
        for transport in transports:
            transport.close()


class Quiet:
    def __init__(self) -> None:
        self.said: list[str] = []

    def out(self, text: str) -> None: ...

    def err(self, text: str) -> None: ...

    def say(self, text: str) -> None:
        self.said.append(text)


def hello(program: str | None) -> None:
    with Remote(Login(parse_address("cluster"), program=program), Quiet()) as remote, remote.call("hello", {}) as talk:
        assert talk.read()[0]["executable"] == sys.executable


def script(server: Sshd, text: str) -> str:
    path = server.root / f"detrun-{len(list(server.root.iterdir()))}"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_detrun_on_the_other_side(server: Sshd) -> None:
    hello(sys.executable)
    hello(script(server, f'exec {sys.executable} -m detrun "$@"'))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (None, "there is no /no/such/detrun"),
        ("printf '\\ndetrun-far-end 1 0.0.1\\n'; cat", r"is version 0\.0\.1, here it is"),
        ("printf '\\ndetrun-far-end 9 0.0.1\\n'; cat", "is another version"),
        ("echo 'error: far is not a command' >&2; exit 2", "there is no detrun"),
        ("echo 'out of order' >&2; exit 9", r"does not start \(exit code 9\)"),
    ],
)
def test_no_detrun_or_another_one_on_the_other_side(server: Sshd, text: str | None, what: str) -> None:
    program = "/no/such/detrun" if text is None else script(server, text)
    with pytest.raises(RefusedError, match=what) as raised:
        hello(program)
    assert "pip install detrun==" in str(raised.value.hint)
