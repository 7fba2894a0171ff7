"""A connection by paramiko: keys, agent, passwords, ssh's configuration, hosts to jump through."""

from __future__ import annotations

import getpass
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from detrun.launch.ssh.address import Address
from detrun.launch.ssh.client import SILENCE, Channel, CutError, RefusedError, command_line
from detrun.launch.ssh.host_keys import check_host_key, known_keys
from detrun.launch.ssh.ssh_config import Settings, read_config, settings_of

if TYPE_CHECKING:
    import paramiko

KEEPALIVE = 15
TRIES = 3
EXIT_PATIENCE = 2.0
COMPLAINTS = 16 * 1024
Ask = Callable[[str], str | None]
"""Asks a person for a password; None where there is nobody to be asked, or they gave none."""


class ParamikoClient:
    """One connection, with those to the hosts it goes through."""

    def __init__(
        self, address: Address, ask: Ask, always_ask: bool = False, passwords: dict[str, str] | None = None
    ) -> None:
        """Connects. ask: for a password or passphrase, where keys and the agent did not do. passwords: those that did,
        by login; a later connection is given the same.

        Raises CutError where the host cannot be reached, RefusedError where it or we refuse.
        """
        # It logs tracebacks of what it raises too, and Python prints what nobody handles.
        logging.getLogger("paramiko").addHandler(logging.NullHandler())
        config = read_config()
        self._passwords = {} if passwords is None else passwords
        self._clients: list[paramiko.SSHClient] = []
        settings = settings_of(address, config)
        try:
            for jump in settings.jumps:
                self._connect(settings_of(jump, config), ask, always_ask=False)
            self._connect(settings, ask, always_ask)
        except BaseException:
            self.close()
            raise

    def run(self, words: Sequence[str]) -> Channel:

        transport = self._clients[-1].get_transport() if self._clients else None
        if transport is None or not transport.is_active():
            raise CutError("the connection is gone")
        try:
            channel = transport.open_session(timeout=SILENCE)
            channel.exec_command(command_line(words))
        except _gone() as error:
            raise CutError(f"the connection is gone: {_reason(error)}") from None
        return ParamikoChannel(channel)

    def close(self) -> None:
        for client in reversed(self._clients):
            with suppress(Exception):
                client.close()
        self._clients.clear()

    def _connect(self, settings: Settings, ask: Ask, always_ask: bool) -> None:
        import paramiko

        try:
            user = settings.user or getpass.getuser()
        except (KeyError, OSError):
            raise RefusedError("nobody knows your name on this machine", hint="--host user@host") from None
        who = f"{user}@{settings.host}"
        password = self._passwords.get(who)
        if always_ask and password is None:
            password = ask(f"Password or passphrase for {who}: ")
        for attempt in range(TRIES):
            client = paramiko.SSHClient()
            self._clients.append(client)
            try:
                self._login(client, settings, user, password)
                if password is not None:
                    self._passwords[who] = password
                return
            except (paramiko.AuthenticationException, paramiko.PasswordRequiredException) as error:
                refusal = error
            self._clients.pop().close()
            password = ask(f"Password or passphrase for {who}: ") if attempt + 1 < TRIES else None
            if password is None:
                break
        raise RefusedError(_why_refused(who, settings, refusal), hint=_HINT_REFUSED) from None

    def _login(self, client: paramiko.SSHClient, settings: Settings, user: str, password: str | None) -> None:
        import paramiko

        known = known_keys(settings.name, settings.known_hosts)
        own_file = settings.known_hosts[0] if settings.known_hosts else Path("~/.ssh/known_hosts").expanduser()
        policy: Any = _KnownOnly(lambda key: check_host_key(settings.name, key, known, own_file))
        key_files: Any = [name for name in settings.key_files if Path(name).is_file()]
        client.set_missing_host_key_policy(policy)
        try:
            client.connect(
                settings.host,
                port=settings.port,
                username=user,
                password=password,
                key_filename=key_files,
                allow_agent=settings.agent,
                look_for_keys=not settings.key_files,
                timeout=settings.patience,
                banner_timeout=settings.patience,
                auth_timeout=settings.patience,
                channel_timeout=settings.patience,
                sock=self._way_to(settings),
                transport_factory=_transport_preferring([each.kind for each in known]),
            )
        except (paramiko.AuthenticationException, paramiko.PasswordRequiredException):
            raise
        except paramiko.SSHException as error:
            if "No authentication methods" in str(error):
                raise paramiko.AuthenticationException(str(error)) from None
            raise CutError(f"{settings.host}, port {settings.port}: {_reason(error)}") from None
        except (OSError, EOFError, ValueError) as error:
            raise CutError(
                f"{settings.host}, port {settings.port}, cannot be reached: {_reason(error)}",
                hint="is the name right, the VPN up, a ProxyJump missing from ~/.ssh/config?",
            ) from None
        transport = client.get_transport()
        if transport is not None:
            transport.set_keepalive(KEEPALIVE)

    def _way_to(self, settings: Settings) -> Any:
        """A channel through the last host connected to, a command of the user's own, or None for the plain way."""
        import paramiko

        if len(self._clients) > 1:
            transport = self._clients[-2].get_transport()
            if transport is None:
                raise CutError("the connection to the host in between is gone")
            try:
                return transport.open_channel("direct-tcpip", (settings.host, settings.port), ("127.0.0.1", 0))
            except _gone() as error:
                raise CutError(f"{settings.host} cannot be reached from the host in between: {error}") from None
        return paramiko.ProxyCommand(settings.proxy_command) if settings.proxy_command else None


_HINT_REFUSED = (
    "ssh-add KEY gives a key to the agent, IdentityFile in ~/.ssh/config names one, --ask-password asks for a password,"
    " --ssh openssh logs in as ssh does"
)


def _why_refused(who: str, settings: Settings, error: Exception) -> str:
    allowed = getattr(error, "allowed_types", None)
    takes = f"; it takes {', '.join(str(kind) for kind in allowed)}" if allowed else ""
    tried = ", ".join(settings.key_files) or "the keys in ~/.ssh"
    return f"{who} is refused: {tried}{' and the agent' if settings.agent else ''} and passwords did not do{takes}"


class _KnownOnly:
    """paramiko's policy for hosts that it knows nothing of, and it is told of none: the check is ours."""

    def __init__(self, check: Callable[[paramiko.PKey], None]) -> None:
        self._check = check

    def missing_host_key(self, client: object, hostname: str, key: paramiko.PKey) -> None:  # noqa: ARG002
        self._check(key)


def _transport_preferring(kinds: Sequence[str]) -> Any:
    """Makes transports that ask first for keys of the kinds we know, which are the ones that can be checked."""
    import paramiko

    def make(sock: Any, **options: Any) -> paramiko.Transport:
        transport = paramiko.Transport(sock, **options)
        security = transport.get_security_options()
        wanted = {
            name for kind in kinds for name in (("rsa-sha2-512", "rsa-sha2-256") if kind == "ssh-rsa" else (kind,))
        }
        offered = tuple(security.key_types)
        security.key_types = tuple(sorted(offered, key=lambda kind: kind not in wanted))  # stable: else as before
        return transport

    return make


class ParamikoChannel:
    """One program over there."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel
        channel.settimeout(SILENCE)
        self._complaints = bytearray()
        # A program that fills its stderr would wait for us for ever.
        self._drain = threading.Thread(target=self._drain_stderr, daemon=True)
        self._drain.start()

    def send(self, data: bytes) -> None:
        try:
            self._channel.sendall(data)
        except _gone() as error:
            raise CutError(f"the connection was cut: {_reason(error)}") from None

    def receive(self, limit: int) -> bytes:
        try:
            data = self._channel.recv(limit)
        except _gone() as error:
            raise CutError(f"nothing was heard for {SILENCE:.0f} s ({_reason(error)})") from None
        transport = self._channel.get_transport()
        if not data and not self._channel.exit_status_ready() and not transport.is_active():
            raise CutError("the connection was cut")
        return data

    def end(self) -> tuple[int | None, str]:
        with suppress(*_gone()):
            self._channel.shutdown_write()
        # A program that ended sends its exit code a little after its last word; one that was cut off never will.
        if self._channel.get_transport().is_active():
            self._channel.status_event.wait(EXIT_PATIENCE)
        self._drain.join(EXIT_PATIENCE)
        code = self._channel.recv_exit_status() if self._channel.exit_status_ready() else None
        with suppress(*_gone()):
            self._channel.close()
        return code, bytes(self._complaints).decode("utf-8", "replace")

    def _drain_stderr(self) -> None:
        while True:
            try:
                data = self._channel.recv_stderr(4096)
            except TimeoutError:
                if self._channel.closed:
                    return
                continue
            except _gone():
                return
            if not data:
                return
            self._complaints += data
            del self._complaints[:-COMPLAINTS]


def _gone() -> tuple[type[Exception], ...]:
    """What paramiko raises where a connection is gone. EOFError is one of them, which typer takes for a Ctrl-D."""
    import paramiko

    return (OSError, EOFError, paramiko.SSHException)


def ask_on_terminal(prompt: str) -> str | None:
    """A person's password, where a person is there."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    try:
        return getpass.getpass(prompt) or None
    except (EOFError, OSError):
        return None


def ask_anyhow(prompt: str) -> str | None:
    """A password from the terminal, else a line of stdin, for whoever pipes one in."""
    if sys.stdin.isatty():
        return ask_on_terminal(prompt)
    return sys.stdin.readline().rstrip("\n") or None


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno and not getattr(error, "errors", None):
        return error.strerror or os.strerror(error.errno)
    inner = getattr(error, "errors", None)  # paramiko's: one of each address that was tried
    if isinstance(inner, dict) and inner:
        return _reason(next(iter(inner.values())))
    return str(error).splitlines()[0] if str(error) else type(error).__name__
