"""Is this the machine that we know? Host keys against known_hosts files; a key that is not there is refused."""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from detrun.launch.ssh.client import RefusedError

if TYPE_CHECKING:
    from paramiko import PKey


@dataclass(frozen=True)
class Known:
    """One line of a known_hosts file that speaks of the host."""

    kind: str
    key: str
    place: str
    revoked: bool


def known_keys(name: str, files: Iterable[Path]) -> list[Known]:
    """What known_hosts files say about a host. Lines of certificate authorities are not understood, and say nothing."""
    return [known for file in files for patterns, known in _known_in(file) if _speaks_of(patterns, name)]


def _known_in(file: Path) -> Iterator[tuple[str, Known]]:
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for number, line in enumerate(lines, 1):
        fields = line.split()
        revoked = fields[:1] == ["@revoked"]
        if revoked:
            fields = fields[1:]
        if len(fields) >= 3 and not fields[0].startswith(("#", "@")):
            yield fields[0], Known(fields[1], fields[2], f"{file}, line {number}", revoked)


def _speaks_of(patterns: str, name: str) -> bool:
    """known_hosts' own rule: names by comma, hashed ones, `*` and `?`, and `!` for all but."""
    from paramiko import HostKeys

    met = False
    for pattern in patterns.split(","):
        if pattern.startswith("|1|"):
            try:
                met = met or HostKeys.hash_host(name, pattern) == pattern
            except ValueError:  # no salt that can be read
                continue
        elif pattern.startswith("!"):
            if fnmatch.fnmatchcase(name, _literal(pattern[1:])):
                return False
        else:
            met = met or fnmatch.fnmatchcase(name.lower(), _literal(pattern.lower()))
    return met


def _literal(pattern: str) -> str:
    return pattern.replace("[", "[[]")  # of a port; fnmatch would take it for a set


def fingerprint(key: bytes) -> str:
    """As ssh prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip("=")


def check_host_key(name: str, key: PKey, known: list[Known], accept_into: Path) -> None:
    """Nothing if the key is known for that host; else RefusedError. accept_into: the file that a new one goes to."""
    kind, text = key.get_name(), key.get_base64()
    same = [each for each in known if each.key == text]
    if revoked := [each for each in same if each.revoked]:
        raise RefusedError(
            f"{name} shows a host key that was revoked ({kind}, {fingerprint(key.asbytes())})",
            where=revoked[0].place,
            hint="do not connect; ask those who run that machine",
        )
    if same:
        return
    offered = f"{kind} {fingerprint(key.asbytes())}"
    others = [each for each in known if not each.revoked]
    if others:
        raise RefusedError(
            f"THE HOST KEY OF {name} HAS CHANGED: known is another one, now it shows {offered}",
            where=others[0].place,
            hint="either that machine was set up anew, or somebody is between it and you. Nothing was sent. Ask those"
            f" who run it for the fingerprint; only if it is the same: ssh-keygen -R {shlex.quote(name)}"
            f" -f {shlex.quote(others[0].place.rpartition(', line ')[0])}, then connect again",
        )
    line = shlex.quote(f"{name} {kind} {text}")
    raise RefusedError(
        f"the host key of {name} is not known: {offered}",
        hint="hold the fingerprint against the one that the site publishes; if it is the same, accept it with\n"
        f"  echo {line} >> {shlex.quote(str(accept_into))}",
    )
