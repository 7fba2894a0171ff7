"""The connection to another machine's detrun: made anew where it is cut, one verb of the far end a call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from detrun import __version__
from detrun.errors import ArchiveError, ClusterError, DetrunError, UsageError
from detrun.launch.ssh.address import Address
from detrun.launch.ssh.client import Channel, Client, CutError, RefusedError, far_program
from detrun.launch.ssh.wire import EndedError, Wire, read_greeting
from detrun.records.files import one_line

PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 30.0, 30.0)
"""Seconds between attempts to connect anew: two minutes in all, counted from when something last came through."""
_MAX_LINE = 8 * 1024 * 1024
_INSTALL = f"pip install detrun=={__version__} there"
T = TypeVar("T")


class Screen(Protocol):
    """Where a command's output goes, and what is said of it."""

    def out(self, text: str) -> None: ...
    def err(self, text: str) -> None: ...
    def say(self, text: str) -> None: ...


@dataclass(frozen=True)
class Login:
    """How to get there. way: paramiko or openssh; program: what `--remote-python` named."""

    address: Address
    way: str = "paramiko"
    program: str | None = None
    ask_password: bool = False

    @property
    def options(self) -> str:
        """What a later command has to be given, as a person types it."""
        return f"--host {self.address}{' --ssh openssh' if self.way == 'openssh' else ''}"


class Remote:
    """One machine: a connection that is made anew where it is cut."""

    def __init__(self, login: Login, screen: Screen) -> None:
        self.login, self._screen = login, screen
        self._client: Client | None = None
        self._program = far_program(login.program)
        self._passwords: dict[str, str] = {}
        self.answered = False
        self._heard = 0

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    def drop(self) -> None:
        """Closes the connection if there is one."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def lasting(self, action: Callable[[], T]) -> T:
        """Does something that may be begun anew, again after every cut, until two minutes brought nothing.

        A machine that never answered is not waited for.
        """
        tries = heard = 0
        while True:
            try:
                return action()
            except CutError as error:
                self.drop()
                if self._heard > heard:
                    tries, heard = 0, self._heard
                if not self.answered or tries >= len(PAUSES):
                    raise
                pause = PAUSES[tries]
                tries += 1
                self._screen.say(f"{self.login.address}: {error.what}; trying again in {pause:g} s")
                time.sleep(pause)

    @contextmanager
    def call(self, verb: str, request: dict[str, Any]) -> Iterator[Conversation]:
        """One verb at the far end. CutError where the connection is; whatever error the far end answers with."""
        if self._client is None:
            self._client = self._connect()
        channel = self._client.run([*self._program, "far", verb])
        try:
            talk = Conversation(channel, self._name)
            self._check_version(talk, channel)
            self.answered = True
            talk.write(request)
            yield talk
        finally:
            self._heard += talk.heard
            channel.end()

    @property
    def _name(self) -> str:
        return str(self.login.address)

    def _connect(self) -> Client:
        if self.login.way == "openssh":
            from detrun.launch.ssh.openssh_client import OpenSshClient

            return OpenSshClient(self.login.address)
        from detrun.launch.ssh.paramiko_client import ParamikoClient, ask_anyhow, ask_on_terminal

        always = self.login.ask_password
        return ParamikoClient(self.login.address, ask_anyhow if always else ask_on_terminal, always, self._passwords)

    def _check_version(self, talk: Conversation, channel: Channel) -> None:
        host = self._name
        try:
            version, _ = read_greeting(talk.wire)
        except EndedError as ended:
            code, complaints = channel.end()
            raise _no_detrun(host, self._program, code, f"{ended.what}\n{complaints}".strip()) from None
        if version != __version__:
            there = f"version {one_line(version, 40)}" if version else "another version"
            raise RefusedError(
                f"detrun on {host} is {there}, here it is {__version__}", hint=f"{_INSTALL}, or use that version here"
            )


class Conversation:
    """What is said within one call; beats are not heard, and an error of the far end is raised here."""

    def __init__(self, channel: Channel, host: str) -> None:
        self._host = host
        self.heard = 0
        self.wire = Wire(channel.receive, channel.send, _MAX_LINE)

    def write(self, message: dict[str, Any], data: bytes = b"") -> None:
        try:
            self.wire.write(message, data)
        except CutError:
            # The far end may have closed it, and said why.
            while True:
                try:
                    self.read()
                except CutError:
                    break
            raise
        self.heard += bool(data)

    def read(self) -> tuple[dict[str, Any], bytes]:
        while True:
            try:
                message, data = self.wire.read()
            except EndedError:
                raise CutError("the connection was cut") from None
            if "error" in message:
                raise _error_there(self._host, message["error"])
            if not message.get("beat"):
                self.heard += 1
                return message, data


def _no_detrun(host: str, program: list[str], code: int | None, said: str) -> DetrunError:
    lines = [one_line(line) for line in said.splitlines() if line.strip()][-8:]
    if code is None:
        return CutError("the connection was cut before detrun answered")
    if code in (126, 127):
        return RefusedError(
            f"there is no {program[0]} on {host}",
            excerpt=lines,
            hint=f"{_INSTALL}; --remote-python PATH (or DETRUN_REMOTE) names the Python that has it",
        )
    if "far is not a command" in said or "No module named" in said:
        return RefusedError(f"there is no detrun {__version__} on {host}", excerpt=lines, hint=_INSTALL)
    return RefusedError(f"detrun on {host} does not start (exit code {code})", excerpt=lines, hint=_INSTALL)


def _error_there(host: str, error: Any) -> DetrunError:
    """What the far end raised, as an error of the same exit code here."""
    told = error if isinstance(error, dict) else {}

    def text(key: str, limit: int = 2000) -> str | None:
        return one_line(str(told[key]), limit) if told.get(key) else None

    kinds: dict[int, type[DetrunError]] = {2: UsageError, 4: ArchiveError}
    code = told.get("code")
    kind = kinds.get(code, ClusterError) if isinstance(code, int) else ClusterError
    lines = [one_line(str(line)) for line in told.get("excerpt") or ()][:20]
    where = f"{host}: {text('where')}" if text("where") else host
    return kind(text("what") or "failed without a word", where=where, hint=text("hint"), excerpt=lines)
