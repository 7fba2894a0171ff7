"""The user's ssh configuration, as far as paramiko's connection needs it."""

from __future__ import annotations

import glob
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detrun.errors import UsageError
from detrun.launch.ssh.address import Address, parse_address

USER_FILE = "~/.ssh/config"
SYSTEM_FILE = "/etc/ssh/ssh_config"
_DEFAULT_KNOWN = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
_DEFAULT_GLOBAL = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"
_DEEPEST = 8
_PATIENCE = 20.0


@dataclass(frozen=True)
class Settings:
    """What is known of one login. jumps: hosts to go through, in order. patience: seconds for the connection."""

    host: str
    port: int
    user: str | None
    key_files: tuple[str, ...]
    agent: bool
    known_hosts: tuple[Path, ...]
    key_name: str | None
    jumps: tuple[Address, ...]
    proxy_command: str | None
    patience: float

    @property
    def name(self) -> str:
        """The host as known_hosts files have it."""
        if self.key_name:
            return self.key_name
        return self.host if self.port == 22 else f"[{self.host}]:{self.port}"


def read_config(files: tuple[str, ...] = (USER_FILE, SYSTEM_FILE)) -> Any:
    """paramiko's SSHConfig of these files, `Include` lines followed; UsageError where one cannot be understood."""
    import paramiko

    lines: list[str] = []
    for name in files:
        path = Path(name).expanduser()
        lines += ["Host *", *_lines(path, path.parent, "Host *", 0)]
    try:
        return paramiko.SSHConfig.from_text("\n".join(lines))
    except (paramiko.SSHException, ValueError) as error:
        raise UsageError(
            f"ssh's configuration cannot be read: {error}", where=USER_FILE, hint="--ssh openssh leaves it to ssh"
        ) from None


def _lines(path: Path, folder: Path, block: str, depth: int) -> list[str]:
    """A file's lines. An included file's blocks end with it, so that the block around it is opened anew."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    found: list[str] = []
    for line in text.splitlines():
        key, _, value = line.strip().partition(" ")
        if key.lower() in ("host", "match"):
            block = line
        if key.lower() != "include" or depth >= _DEEPEST:
            found.append(line)
            continue
        for pattern in shlex.split(value, comments=True):
            whole = str(folder / Path(pattern).expanduser())
            for name in sorted(glob.glob(whole)):  # noqa: PTH207  the pattern is absolute
                found += [*_lines(Path(name), folder, block, depth + 1), block]
    return found


def settings_of(address: Address, config: Any) -> Settings:
    """Everything about a login; what the command line says wins over the configuration."""
    import paramiko

    try:
        found = config.lookup(address.host)
    except (paramiko.SSHException, ImportError, OSError) as error:
        raise UsageError(
            f"ssh's configuration cannot be applied to {address.host}: {error}",
            where=USER_FILE,
            hint="--ssh openssh leaves it to ssh",
        ) from None
    jump = found.get("proxyjump", "none")
    known = f"{found.get('userknownhostsfile', _DEFAULT_KNOWN)} {found.get('globalknownhostsfile', _DEFAULT_GLOBAL)}"
    return Settings(
        host=found.get("hostname", address.host),
        port=address.port or _port(found.get("port", "22")),
        user=address.user or found.get("user"),
        key_files=tuple(str(Path(name).expanduser()) for name in found.get("identityfile", ())),
        agent=found.get("identityagent", "").lower() != "none" and found.get("identitiesonly", "no").lower() != "yes",
        known_hosts=tuple(Path(name).expanduser() for name in shlex.split(known) if name.lower() != "none"),
        key_name=found.get("hostkeyalias"),
        jumps=() if jump.lower() == "none" else tuple(parse_address(j.strip(), "ProxyJump") for j in jump.split(",")),
        proxy_command=found.get("proxycommand"),
        patience=_patience(found.get("connecttimeout", "")),
    )


def _port(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise UsageError(f"Port {text!r} is no port", where=USER_FILE)
    return int(text)


def _patience(text: str) -> float:
    return float(text) if text.isdigit() and int(text) else _PATIENCE
