"""`detrun --host` against a real sshd: uploads that are cut, full disks, lost connections, what is brought back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from detrun.cli import main
from detrun.errors import AmbiguousExperimentError, ClusterError
from detrun.experiments.remote import connection
from detrun.experiments.remote.files import Landing, find_place
from detrun.records.archive import Archive
from tests.running import DETRUN, write_recipe
from tests.ssh_server import Line, Sshd, running_sshd

ID = "plain-pair-20261129T101502-3f9a"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with running_sshd(tmp_path_factory.mktemp("sshd")) as running:
        yield running


@pytest.fixture
def here(server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to call detrun in, as whoever may log in there."""
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("DETRUN_ARCHIVE", raising=False)
    server.write_client_config()
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def line(server: Sshd, here: Path) -> Iterator[Line]:
    """The way to the server, which can be cut."""
    cuttable = Line(server.port)
    server.know(cuttable.port)
    server.write_client_config(port=cuttable.port)
    yield cuttable
    cuttable.close()


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PAUSES", (0.2, 0.2))


def uploads(server: Sshd) -> list[Path]:
    return [path for path in (server.cache / "detrun" / "remote" / "code").glob("*") if path.is_dir()]


def runs(server: Sshd) -> list[Path]:
    return list((server.cache / "detrun" / "remote" / "runs").glob("*"))


def test_a_dry_run_is_the_clusters_own(here: Path, server: Sshd, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "recipes").mkdir()
    path = write_recipe(here / "recipes")
    before = len(uploads(server))
    assert main(["--host", "cluster", "pair", str(path), "--dry-run", "--set", "steps=4"]) == 0
    said = capfd.readouterr()
    assert "plain.py" in said.out and "uploading 1 of 1 files" in said.err
    assert len(uploads(server)) == before + 1
    assert main(["--host=cluster", "--ssh", "paramiko", "pair", "--dry-run", "recipes/plain.yaml"]) == 0
    assert "uploading" not in capfd.readouterr().err
    # Nobody needs the output any more.
    assert not runs(server)


def test_what_is_wrong_is_said_before_connecting(here: Path, server: Sshd, capfd: pytest.CaptureFixture[str]) -> None:
    server.write_client_config(port=1)
    (here / "wrong.yaml").write_text("name: x\nlaunchh: {}\n")
    for words, expected in [
        (["pair", "no-such.yaml"], "no-such.yaml is not here"),
        (["pair", "wrong.yaml"], "launchh"),
        (["pair"], "detrun.yaml is not here"),
        (["list", "--no-such"], "--no-such"),
        (["validate", "wrong.yaml"], "runs on this machine only"),
        (["lst"], "did you mean detrun list"),
    ]:
        assert main(["--host", "cluster", *words]) == 2
        assert expected in capfd.readouterr().err
    for words in (["--host", "-oProxyCommand=x"], ["--ssh", "openssh"], ["--host=h", "--ssh=x"]):
        assert main([*words, "list"]) == 2
    assert main(["--host", "cluster", "list"]) == 4
    said = capfd.readouterr().err
    assert "error: 127.0.0.1, port 1, cannot be reached" in said and "goes on" not in said
    assert main(["--host", "cluster", "pair", str(write_recipe(here)), "--dry-run"]) == 4
    said = capfd.readouterr().err
    assert "error: 127.0.0.1, port 1, cannot be reached" in said and "upload" not in said


def test_words_reach_the_command_there_as_they_are(here: Path, server: Sshd, capfd: pytest.CaptureFixture[str]) -> None:
    write_recipe(here)
    odd = "b.args=--note '$(touch pwned) `id` ü'"
    assert main(["--host", "cluster", "pair", "plain.yaml", "--dry-run", "--arm", odd]) == 0
    assert "$(touch pwned) `id` ü" in capfd.readouterr().out
    assert not list(server.cache.rglob("pwned"))


def big_recipe(here: Path) -> Path:
    """Of 8 MB: what the line and ssh hold in between when it is cut, some 2 MB, is sent again."""
    for number in range(20):
        (here / f"data{number}.bin").write_bytes(os.urandom(400_000))
    return write_recipe(here)


def test_an_upload_that_is_cut_goes_on_by_itself(
    here: Path, line: Line, patience: None, capfd: pytest.CaptureFixture[str]
) -> None:
    path = big_recipe(here)
    line.cut_after = 6_000_000
    assert main(["--host", "cluster", "pair", str(path), "--dry-run"]) == 0
    said = capfd.readouterr().err
    assert " of 21 files, 8 MB" in said and "trying again" in said
    assert line.connections == 2 and line.sent < 13_500_000


def test_an_upload_that_is_cut_for_good_is_taken_up_by_the_next_call(
    here: Path, line: Line, server: Sshd, patience: None, capfd: pytest.CaptureFixture[str]
) -> None:
    path = big_recipe(here)
    line.cut_after = 6_000_000

    def die() -> None:
        while line.cut_after is not None:
            time.sleep(0.001)
        line.dead = True

    threading.Thread(target=die, daemon=True).start()
    assert main(["--host", "cluster", "pair", str(path), "--dry-run"]) == 4
    said = capfd.readouterr().err
    assert said.count("error:") == 1 and "the upload to cluster was cut" in said and "Traceback" not in said
    assert "what has arrived is not sent again" in said
    server.write_client_config()
    assert main(["--host", "cluster", "pair", str(path), "--dry-run"]) == 0
    files = int(capfd.readouterr().err.partition("uploading ")[2].split()[0])
    assert 0 < files < 20


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk is mounted")
def test_a_full_disk_there(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path_factory.mktemp("full")
    disk = root / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        (root / "sshd").mkdir()
        with running_sshd(root / "sshd", variables={"XDG_CACHE_HOME": str(disk)}) as server:
            env = {**os.environ, **server.environment()}
            here = root / "here"
            here.mkdir()
            path = big_recipe(here)
            ballast = disk / "ballast"
            ballast.write_bytes(b"x" * 10_000_000)
            command = [*DETRUN, "--host", "cluster", "pair", str(path), "--dry-run"]
            done = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, check=False)
            assert done.returncode == 4, done.stderr
            assert done.stderr.count("error:") == 1 and "no room for the code" in done.stderr
            assert "cluster" in done.stderr and "Traceback" not in done.stderr
            ballast.unlink()
            done = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, check=False)
            # The code has room now. What is left is little, and detrun there says the rest itself.
            assert "uploading" in done.stderr and done.returncode in (0, 4), done.stderr
    finally:
        subprocess.run(["umount", disk], check=False)


def fake_experiment(server: Sshd, id: str = ID, report: str = "<p>the page</p>") -> Path:
    folder = server.archive / id
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".detrun-experiment").touch()
    (folder / "experiment.json").write_text(json.dumps({"id": id}))
    (folder / "verdict.json").write_text(json.dumps({"id": id}))
    (folder / "report.html").write_text(report)
    (folder / "secret.txt").write_text("stays there")
    (folder / "junit.xml").unlink(missing_ok=True)
    (folder / "junit.xml").symlink_to("/etc/passwd")
    return folder


def test_fetch_brings_what_is_known_and_no_more(here: Path, server: Sshd, capfd: pytest.CaptureFixture[str]) -> None:
    from detrun.report.chart import plotly_script

    script = plotly_script()[0]
    fake_experiment(server, report=f'<script src="../assets/{script}" charset="utf-8"></script><p>the page</p>')
    assert main(["--host", "cluster", "fetch", "3f9a"]) == 0
    folder = here / ".detrun" / "remote" / "cluster" / ID
    said = capfd.readouterr()
    assert said.out.strip() == str(folder) and str(folder / "report.html") in said.err
    assert sorted(path.name for path in folder.iterdir()) == [
        "experiment.json",
        "report.html",
        "verdict.json",
        "where.json",
    ]
    page = (folder / "report.html").read_text()
    assert "src=" not in page.partition("the page")[0][:200] and len(page) > 1_000_000  # it stands alone
    # What was brought is no experiment of the archive here, and is found again without a host.
    assert Archive(here / ".detrun").list() == []
    (folder / "verdict.json").unlink()
    assert main(["fetch", "3f9a"]) == 0
    assert (folder / "verdict.json").exists()
    assert main(["fetch", "beef"]) == 2
    assert "nobody here knows" in capfd.readouterr().err
    assert main(["--host", "cluster", "fetch", "beef"]) == 2
    assert "no experiment is called" in capfd.readouterr().err
    assert main(["--host", "cluster", "fetch", "../../etc"]) == 2


def test_a_lost_connection_says_how_to_go_on(
    here: Path, server: Sshd, line: Line, patience: None, capfd: pytest.CaptureFixture[str]
) -> None:
    fake_experiment(server)
    # `logs -f` of an arm that has not ended goes on for ever.
    log = server.archive / ID / "arms" / "a" / "attempt-0" / "log" / "rank00000.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("one\n\x1b[31mtwo ü\n")
    codes: list[int] = []
    words = ["--host", "cluster", "logs", ID, "-f"]
    thread = threading.Thread(target=lambda: codes.append(main(words)))
    thread.start()
    seen = ""

    def wait_for(text: str) -> None:
        nonlocal seen
        deadline = time.monotonic() + 60
        while text not in seen:
            assert time.monotonic() < deadline, seen
            time.sleep(0.05)
            seen += "".join(capfd.readouterr())

    try:
        wait_for("two ü\n")
        assert "\\x1b[31mtwo" in seen and "\x1b" not in seen
        line.cut()
        wait_for("trying again")
        with log.open("a") as file:
            file.write("three\n")
        wait_for("three\n")
        assert seen.count("one\n") == 1 and seen.count("two ü\n") == 1
        line.dead = True
        line.cut()
        wait_for("is lost")
    finally:
        line.dead = True
        line.cut()
        thread.join(60)
        end_runs(server)
    assert codes == [4]
    assert seen.count("error:") == 1


def end_runs(server: Sshd) -> None:
    for folder in runs(server):
        try:
            os.killpg(int((folder / "pid").read_text()), 9)
        except (OSError, ValueError):
            continue


def test_ctrl_c_ends_what_only_looks(here: Path, server: Sshd) -> None:
    fake_experiment(server)
    log = server.archive / ID / "arms" / "a" / "attempt-0" / "log" / "rank00000.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("one\n")
    end_runs(server)
    before = set(runs(server))
    command = [*DETRUN, "--host", "cluster", "logs", ID, "-f"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        while "one" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(2)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.communicate()
    run = next(iter(set(runs(server)) - before))
    deadline = time.monotonic() + 30
    while not (run / "exit.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert json.loads((run / "exit.json").read_text()) == {"code": 130}


@pytest.mark.parametrize(
    ("kind", "of", "name"),
    [
        ("experiment", "../../evil", "verdict.json"),
        ("experiment", ID, "../verdict.json"),
        ("experiment", ID, ".bashrc"),
        ("experiment", f"{ID}/..", "verdict.json"),
        ("night", "..", "night.json"),
        ("night", "a/b", "night.json"),
        ("archive", "", "verdict.json"),
        ("else", ID, "verdict.json"),
        (None, None, None),
    ],
)
def test_another_machine_cannot_choose_where_it_writes(tmp_path: Path, kind: Any, of: Any, name: Any) -> None:
    landing = Landing(Archive(tmp_path / "archive"), "../..")
    with pytest.raises(ClusterError):
        landing.take({"kind": kind, "of": of, "file": name, "size": 1}, lambda: b"x")
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize("size", [-1, 1 << 60, "1", None, True])
def test_another_machine_cannot_send_without_end(tmp_path: Path, size: Any) -> None:
    landing = Landing(Archive(tmp_path), "host")
    with pytest.raises(ClusterError):
        landing.take({"kind": "experiment", "of": ID, "file": "verdict.json", "size": size}, lambda: b"xx")


def test_where_an_experiment_is_is_remembered(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "archive")
    Landing(archive, "me@one").remember(ID, "me@one", "openssh", None, "/scratch/archive")
    Landing(archive, "two").remember("plain-pair-20261130T101502-3f9a", "two", "paramiko", "/opt/python", "/a")
    place = find_place(archive, ID)
    assert place is not None and (place.host, place.way, place.archive) == ("me@one", "openssh", "/scratch/archive")
    latest = find_place(archive, "@latest")
    assert latest is not None and latest.host == "two" and latest.program == "/opt/python"
    assert find_place(archive, "beef") is None
    with pytest.raises(AmbiguousExperimentError):
        find_place(archive, "3f9a")
    only = find_place(archive, "3f9a", "two")
    assert only is not None and only.host == "two"


def test_the_far_end_is_no_command_of_a_persons(capfd: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run([*DETRUN, "far", "nonsense"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    done = subprocess.run([*DETRUN, "--help"], capture_output=True, text=True, check=True)
    assert " far " not in done.stdout and "--host" in done.stdout
    # Whatever comes instead of a request, there is an answer and no traceback.
    serve = "import sys; from detrun.launch.ssh.far import serve; sys.exit(serve(sys.argv[1]))"
    for request in (b"", b'{"words": 3, "run": "../..", "digest": "..", "ids": 7}\n', b"\xff\xfe\n"):
        for verb in ("start", "follow", "receive", "bring"):
            done = subprocess.run([sys.executable, "-c", serve, verb], input=request, capture_output=True, check=False)
            assert done.returncode in (2, 4) and b"Traceback" not in done.stderr, (verb, request, done)
