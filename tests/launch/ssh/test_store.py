"""What is uploaded, and how the far end takes it: both ends in this process."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from detrun.errors import ArchiveError, ClusterError, DetrunError, RecipeError, UsageError
from detrun.launch.snapshot import snapshot_code
from detrun.launch.ssh import far_store, tree, wire
from detrun.launch.ssh.tree import Tree, snapshot
from detrun.launch.ssh.wire import EndedError, Wire, greeting, read_greeting


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "cache" / "detrun" / "remote" / "code"


def ends() -> tuple[Wire, Wire]:
    """Two ends of one line."""
    ways: tuple[Queue[bytes], Queue[bytes]] = (Queue(), Queue())
    return (
        Wire(lambda _: ways[0].get(timeout=20), ways[1].put),
        Wire(lambda _: ways[1].get(timeout=20), ways[0].put),
    )


def upload(sent: Tree, change: Callable[[dict[str, Any]], None] | None = None) -> list[str]:
    """Uploads a tree as experiments/remote does; the paths that were really sent, or the far end's error."""
    near, far = ends()
    failed: list[DetrunError] = []
    request: dict[str, Any] = {"digest": sent.digest, "items": sent.listed()}
    if change:
        change(request)

    def serve() -> None:
        try:
            far_store.receive(far, request)
        except DetrunError as error:
            failed.append(error)
            far.write({"failed": True})

    thread = threading.Thread(target=serve)
    thread.start()
    answer, _ = near.read()
    missing = answer.get("missing", [])
    for index in missing:
        data = sent.source(sent.items[index]).read_bytes()
        near.write({"item": index, "last": True}, data)
    if not answer.get("failed"):
        near.read()
    thread.join(20)
    if failed:
        raise failed[0]
    return [sent.items[index].path for index in missing]


def repository(folder: Path) -> Path:
    def git(*words: str) -> None:
        subprocess.run(
            ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@y", *words],
            check=True,
            capture_output=True,
        )

    (folder / "sub").mkdir(parents=True)
    (folder / "train.py").write_text("print(1)\n")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "sub" / "empty").write_text("")
    (folder / ".gitignore").write_text("data/\nlocal.yaml\n")
    (folder / "link").symlink_to("sub/empty")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "x")
    (folder / "data").mkdir()
    (folder / "data" / "big").write_text("not code")
    (folder / "local.yaml").write_text("name: ignored by git, and yet the recipe\n")
    (folder / "train.py").write_text("print(2)\n")
    (folder / "new.py").write_text("untracked\n")
    (folder / "out").symlink_to("/etc/passwd")
    return folder


def test_a_repository_is_what_git_does_not_ignore_and_the_recipe(tmp_path: Path, cache: Path) -> None:
    code = repository(tmp_path / "code")
    sent = snapshot([code / "sub"], tmp_path, [code / "local.yaml"])
    paths = [item.path for item in sent.items if not item.path.startswith(".detrun-code/")]
    assert paths == [".gitignore", "link", "local.yaml", "new.py", "run.sh", "sub/empty", "train.py"]
    assert sent.base == code and sent.left_out == ("out: a link to somewhere else",)
    upload(sent)
    there = cache / sent.digest
    assert (there / "train.py").read_text() == "print(2)\n"
    assert os.access(there / "run.sh", os.X_OK) and not os.access(there / "train.py", os.X_OK)
    assert (there / "link").is_symlink() and (there / "link").read_text() == ""
    # The copy is no repository, and its state is still known.
    told, here = (snapshot_code(folder, tmp_path / name) for folder, name in ((there / "sub", "x"), (code, "y")))
    assert told == here and told.dirty and told.commit
    assert (tmp_path / "x" / "diff.patch").read_bytes() == (tmp_path / "y" / "diff.patch").read_bytes()


def test_only_what_is_missing_is_sent(tmp_path: Path, cache: Path) -> None:
    code = repository(tmp_path / "code")
    first = snapshot([code], code)
    assert len(upload(first)) == len([item for item in first.items if item.link is None])
    assert upload(first) == []
    (code / "new.py").write_text("changed\n")
    second = snapshot([code], code)
    assert second.digest != first.digest
    assert set(upload(second)) <= {"new.py", ".detrun-code/diff.patch", ".detrun-code/status.txt"}
    # What a program has changed there is put right.
    (cache / second.digest / "train.py").write_text("changed by a run")
    upload(second)
    assert (cache / second.digest / "train.py").read_text() == "print(2)\n"


def test_an_upload_that_was_cut_goes_on(tmp_path: Path, cache: Path) -> None:
    code = repository(tmp_path / "code")
    sent = snapshot([code], code)
    part = cache / f"{sent.digest}.part"
    part.mkdir(parents=True)
    (part / "new.py").write_text("untracked\n")
    (part / "train.py").write_text("half")
    (part / ".run.sh.77.part").write_text("of a process that is gone")
    paths = upload(sent)
    assert "new.py" not in paths and "train.py" in paths
    assert (cache / sent.digest / "train.py").read_text() == "print(2)\n" and not part.exists()


def test_a_full_disk_is_said_and_what_arrived_stays(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = repository(tmp_path / "code")
    sent = snapshot([code], code)
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(far_store.shutil, "disk_usage", lambda _: usage(1, 1, 10))
        with pytest.raises(ArchiveError, match="no room for the code"):
            upload(sent)
    real, written = Path.replace, []

    def replace(self: Path, target: Path) -> Path:
        if len(written) == 3:
            raise OSError(errno.EDQUOT, "Disk quota exceeded", str(self))
        written.append(target)
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        with pytest.raises(ArchiveError, match="quota") as raised:
            upload(sent)
    assert "the same command again" in str(raised.value.hint)
    again = upload(sent)
    assert len(again) == len([item for item in sent.items if item.link is None]) - 3


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "", "a//b", "a\0b", "./x"])
def test_nothing_is_written_outside_the_snapshot(tmp_path: Path, path: str) -> None:
    code = repository(tmp_path / "code")
    sent = snapshot([code], code)
    with pytest.raises(UsageError):
        upload(sent, lambda request: request["items"][0].update(path=path))


@pytest.mark.parametrize("link", ["/etc", "../../x", "sub/../../.."])
def test_no_link_leads_outside(tmp_path: Path, link: str) -> None:
    code = repository(tmp_path / "code")
    sent = snapshot([code], code)
    with pytest.raises(UsageError):
        upload(sent, lambda request: request["items"][0].update(link=link))


def test_a_folder_without_git_leaves_out_what_is_no_code(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    for name in ("a.py", "pkg/b.py", "__pycache__/c.pyc", ".detrun/x/verdict.json", "venv/pyvenv.cfg", "venv/lib.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    assert [item.path for item in snapshot([folder], folder).items] == ["a.py", "pkg/b.py"]


def test_two_folders_keep_their_places(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "r.yaml").write_text("x")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("x")
    sent = snapshot([tmp_path / "recipes", tmp_path / "code"], tmp_path / "recipes")
    assert sent.base == tmp_path
    assert [item.path for item in sent.items] == ["code/train.py", "recipes/r.yaml"]


def test_more_than_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "MAX_BYTES", 100)
    (tmp_path / "weights").write_bytes(b"x" * 200)
    with pytest.raises(RecipeError, match="more than"):
        snapshot([tmp_path], tmp_path)


def test_messages_come_over_in_any_pieces() -> None:
    sent = bytearray()
    writer = Wire(lambda _: b"", sent.extend)
    writer.write({"a": "ü\n"}, b"\n{}\n" * 3)
    writer.write({"b": 2})
    pieces = iter([*(bytes([byte]) for byte in sent), b""])
    reader = Wire(lambda _: next(pieces), lambda _: None)
    assert reader.read() == ({"a": "ü\n", "bytes": 12}, b"\n{}\n" * 3)
    assert reader.read() == ({"b": 2}, b"")
    with pytest.raises(EndedError):
        reader.read()


@pytest.mark.parametrize("line", [b"nonsense", b"[]", b'{"bytes": -1}', b'{"bytes": 99999999999}', b'{"bytes": "1"}'])
def test_what_is_no_message_is_refused(line: bytes) -> None:
    pieces = iter([line + b"\n", b""])
    with pytest.raises(ClusterError):
        Wire(lambda _: next(pieces), lambda _: None).read()


def test_a_login_shell_may_say_things_first() -> None:
    pieces = iter([b"Welcome!\nlast login", greeting("1.2"), b""])
    assert read_greeting(Wire(lambda _: next(pieces), lambda _: None)) == ("1.2", "Welcome!\nlast login")
    pieces = iter([b"bash: detrun: not found\n", b""])
    with pytest.raises(EndedError, match="not found"):
        read_greeting(Wire(lambda _: next(pieces), lambda _: None))
    with pytest.raises(ClusterError, match="too long"):
        read_greeting(Wire(lambda _: b"x" * wire.CHUNK, lambda _: None))
