"""Addresses, ssh's configuration, known_hosts, and the line that reaches the other machine's shell."""

from __future__ import annotations

import subprocess
from pathlib import Path

import paramiko
import pytest

from detrun.errors import UsageError
from detrun.launch.ssh.address import Address, parse_address
from detrun.launch.ssh.client import RefusedError, command_line, far_program
from detrun.launch.ssh.host_keys import check_host_key, known_keys
from detrun.launch.ssh.ssh_config import Settings, read_config, settings_of
from tests.ssh_server import make_key


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("login", Address("login")),
        ("me@login.cluster", Address("login.cluster", "me")),
        ("me@login:2222", Address("login", "me", 2222)),
        ("[::1]:22", Address("::1", None, 22)),
    ],
)
def test_an_address(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text", ["", "-oProxyCommand=touch x", "a b", "a;b", "$(x)", "h:0", "h:99999", "u@-h", "h:1:2"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_address(text)


@pytest.mark.parametrize("word", ["a b", "'", '"', "$(touch x)", "`x`", "a\nb", "", "-n", "\\", "*", "ü", "!x"])
def test_words_reach_a_program_as_they_are(word: str) -> None:
    line = command_line(["printf", "%s|", word, "end"])
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout.endswith(f"{word}|end|")


def test_how_detrun_is_called_there() -> None:
    assert far_program(None) == ["detrun"]
    assert far_program("/opt/venv/bin/python3.12") == ["/opt/venv/bin/python3.12", "-m", "detrun"]
    assert far_program("/opt/bin/detrun") == ["/opt/bin/detrun"]
    for wrong in ("", "-c", "a\nb"):
        with pytest.raises(UsageError):
            far_program(wrong)


def settings(folder: Path, text: str, host: str, address: Address | None = None) -> Settings:
    (folder / "config").write_text(text)
    return settings_of(address or Address(host), read_config((str(folder / "config"),)))


def test_what_the_configuration_says_of_a_host(tmp_path: Path) -> None:
    text = """
        Host big
          HostName login.example
          Port 2200
          User me
          IdentityFile ~/.ssh/work
          ProxyJump gate, you@second:2022
          UserKnownHostsFile /a/known /b/known
          HostKeyAlias the-big-one
          ConnectTimeout 7
    """
    found = settings(tmp_path, text, "big")
    assert (found.host, found.port, found.user, found.patience) == ("login.example", 2200, "me", 7.0)
    assert found.jumps == (Address("gate"), Address("second", "you", 2022))
    assert found.known_hosts[:2] == (Path("/a/known"), Path("/b/known"))
    assert found.name == "the-big-one"
    assert found.key_files == (str(Path("~/.ssh/work").expanduser()),)
    mine = settings(tmp_path, text, "big", Address("big", "other", 22))
    assert (mine.user, mine.port) == ("other", 22)


def test_included_files_are_read_and_end_where_they_end(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "one").write_text("Host big\n  User included\nHost other\n  User nobody\n")
    text = "Include more/*\nPort 2300\nHost big\n  HostName there\n"
    found = settings(tmp_path, text, "big")
    assert (found.user, found.host, found.port) == ("included", "there", 2300)


def test_a_file_that_includes_itself_ends(tmp_path: Path) -> None:
    assert settings(tmp_path, f"Include {tmp_path}/config\nPort 23\n", "x").port == 23


def test_a_configuration_that_cannot_be_read_is_the_users_to_mend(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="configuration"):
        settings(tmp_path, "nonsense\n", "x")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[paramiko.PKey, paramiko.PKey]:
    folder = tmp_path_factory.mktemp("keys")
    one, two = (paramiko.Ed25519Key.from_private_key_file(str(make_key(folder / name))) for name in ("one", "two"))
    return one, two


def known(folder: Path, *lines: str) -> Path:
    path = folder / "known_hosts"
    path.write_text("# a comment\nnonsense\n\n" + "\n".join(lines) + "\n")
    return path


def line_of(name: str, key: paramiko.PKey) -> str:
    return f"{name} {key.get_name()} {key.get_base64()} a comment"


def check(name: str, key: paramiko.PKey, path: Path) -> None:
    check_host_key(name, key, known_keys(name, [path]), path)


def test_a_key_that_is_known(tmp_path: Path, keys: tuple[paramiko.PKey, paramiko.PKey]) -> None:
    key, other = keys
    hashed = paramiko.HostKeys.hash_host("[host]:2222")
    for name, pattern in [
        ("host", "a,host"),
        ("[host]:2222", "[host]:2222"),
        ("[host]:2222", hashed),
        ("n7.site", "*.site,!n8.site"),
    ]:
        # A host may have several keys of one kind while they are being changed.
        check(name, key, known(tmp_path, line_of(pattern, other), line_of(pattern, key)))


def test_an_unknown_key_is_refused_with_the_command_that_accepts_it(
    tmp_path: Path, keys: tuple[paramiko.PKey, paramiko.PKey]
) -> None:
    key, other = keys
    path = known(tmp_path, line_of("host", other), line_of("*.site,!n8.site", key))
    for name in ("[host]:2222", "n8.site"):
        with pytest.raises(RefusedError, match="is not known") as raised:
            check(name, key, path)
        assert key.fingerprint in str(raised.value)
        command = str(raised.value.hint).rpartition("\n")[2].strip()
        subprocess.run(["sh", "-c", command], check=True)
        check(name, key, path)


def test_a_changed_key_and_a_revoked_one_say_so(tmp_path: Path, keys: tuple[paramiko.PKey, paramiko.PKey]) -> None:
    key, other = keys
    path = known(tmp_path, line_of("host", other))
    with pytest.raises(RefusedError, match="HAS CHANGED") as raised:
        check("host", key, path)
    assert "ssh-keygen -R host" in str(raised.value.hint) and "line 4" in str(raised.value.where)
    with pytest.raises(RefusedError, match="revoked"):
        check("host", key, known(tmp_path, line_of("host", key), f"@revoked {line_of('*', key)}"))


def test_what_a_certificate_authority_signs_is_not_known(
    tmp_path: Path, keys: tuple[paramiko.PKey, paramiko.PKey]
) -> None:
    with pytest.raises(RefusedError, match="is not known"):
        check("host", keys[0], known(tmp_path, f"@cert-authority {line_of('*', keys[0])}"))
