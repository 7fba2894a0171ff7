"""`[user@]host[:port]`, as a person writes it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from detrun.errors import UsageError

_HOST = r"\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_][A-Za-z0-9_.-]*"
_ADDRESS = re.compile(rf"(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.$-]*)@)?(?P<host>{_HOST})(?::(?P<port>[0-9]{{1,5}}))?")


@dataclass(frozen=True)
class Address:
    """Where to log in. host may be an alias of ssh's configuration; None is what that, or the default, says."""

    host: str
    user: str | None = None
    port: int | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.user + '@' if self.user else ''}{host}{f':{self.port}' if self.port else ''}"


def parse_address(text: str, what: str = "--host") -> Address:
    """UsageError where the text is no address; a host never begins with a dash, which ssh would read as an option."""
    found = _ADDRESS.fullmatch(text)
    port = int(found["port"]) if found and found["port"] else None
    if found is None or (port is not None and not 0 < port < 65536):
        raise UsageError(f"{what}: {text[:100]!r} is no login", hint="[user@]host[:port]")
    return Address(found["host"].strip("[]"), found["user"], port)
