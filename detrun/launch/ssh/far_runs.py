"""Commands that the far end runs detached from any connection, below `~/.cache/detrun/remote/runs`.

runs/<id>/run.json    what is run, and where
          out err     what it prints
          alive       touched every few seconds by the process that waits for it
          exit.json   its exit code, written last and by rename
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from detrun.errors import ArchiveError, UsageError
from detrun.launch.ssh.far_store import cache_folder, code_folder
from detrun.launch.ssh.wire import CHUNK, Beat, Wire
from detrun.records.archive import Archive
from detrun.records.files import write_atomically

RUN = re.compile(r"[0-9]{8}T[0-9]{6}-[0-9a-f]{8}")
DEFAULT_ARCHIVE = "~/.detrun"
"""Where experiments are kept over there if nobody says where: not beside the code, which changes its folder."""
KEPT_DAYS = 14
_STALE = 120.0
_POLL = 0.2
# Without the current folder on Python's path, where the program's own modules could stand in for ours.
_WAITER = "import sys; sys.path[:] = [p for p in sys.path if p]; from detrun.launch.ssh.detached import main; main()"


def new_run() -> str:
    """An id for a run that is to be started."""
    return f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"


def start(wire: Wire, request: dict[str, Any]) -> None:
    """Starts a detrun command, unless it was started already: an answer may have been lost on its way.

    request: `run` its id, made by who asks; `words` of the command; `paths` {index of a word: path below the snapshot};
    `snapshot` its digest or None; `at` the folder in it to run in; `archive_option`, `recipe_archive`; `columns` of the
    terminal.
    """
    id, words = str(request["run"]), [str(word) for word in request["words"]]
    if not RUN.fullmatch(id):
        raise UsageError("that is no run's id")
    if request.get("snapshot"):
        code = code_folder(str(request["snapshot"]))
        if not code.is_dir():
            raise UsageError("the code is not here any more", hint="give the command again")
        os.utime(code)
        cwd = code / str(request.get("at") or ".")
        for index, path in dict(request.get("paths") or {}).items():
            words[int(index)] = str(code / path)
    else:
        cwd = Path.home()
    archive = find_archive(request, cwd)
    runs = cache_folder() / "runs"
    folder = runs / id
    variables = {"COLUMNS": str(int(request.get("columns") or 80))}
    if not request.get("archive_option"):
        variables["DETRUN_ARCHIVE"] = str(archive.root)
    about = {
        "words": words,
        "cwd": str(cwd),
        "variables": variables,
        "archive": str(archive.root),
        "host": socket.gethostname(),
        "started": time.time(),
    }
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            wire.write({"archive": str(archive.root)})
            return
        write_atomically(folder / "run.json", json.dumps(about).encode())
        with (folder / "waiter").open("wb") as log:
            subprocess.Popen(
                [sys.executable, "-c", _WAITER, str(folder)],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise ArchiveError(
            f"nothing can be started: {error.strerror}", where=str(folder), hint="is the disk full there?"
        ) from None
    wire.write({"archive": str(archive.root)})
    _forget_old(runs)


def find_archive(request: dict[str, Any], cwd: Path) -> Archive:
    """The archive in force there: the option, DETRUN_ARCHIVE, the recipe's if it is absolute, else `~/.detrun`."""
    option, recipe = request.get("archive_option"), request.get("recipe_archive")
    return Archive.find(option, recipe or DEFAULT_ARCHIVE, cwd=cwd)


def run_folder(id: str) -> Path:
    """A run's folder; UsageError where there is no such run."""
    folder = cache_folder() / "runs" / id
    if not RUN.fullmatch(id) or not folder.is_dir():
        raise UsageError("that command's run is not known there any more", hint="detrun --host HOST list")
    return folder


def follow(wire: Wire, request: dict[str, Any]) -> None:
    """Sends what a run prints, from the given positions on, until it has ended; then its exit code.

    The run is removed once its end was heard of, if it is not needed any more (`forget`).
    """
    folder = run_folder(str(request["run"]))
    positions = {"err": int(request.get("err", 0)), "out": int(request.get("out", 0))}
    beat = Beat(wire)
    while True:
        code = exit_code(folder)  # before the last look, so that nothing printed before it is missed
        sent = False
        for stream in positions:
            if data := _added(folder / stream, positions[stream], whole_lines=code is None):
                wire.write({"stream": stream, "at": positions[stream]}, data)
                positions[stream] += len(data)
                sent = True
        beat.if_due(sent)
        if sent:
            continue
        if code is not None:
            wire.write({"exit": code})
            heard, _ = wire.read()
            if heard.get("forget"):
                shutil.rmtree(folder, ignore_errors=True)
            return
        if is_lost(folder):
            wire.write({"lost": True})
            return
        time.sleep(_POLL)


def _added(path: Path, position: int, whole_lines: bool) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(position)
            data = file.read(CHUNK)
    except FileNotFoundError:
        return b""
    if not whole_lines or len(data) == CHUNK:
        return data
    return data[: data.rfind(b"\n") + 1]


def exit_code(folder: Path) -> int | None:
    """A run's exit code, or None while it has none."""
    try:
        return int(json.loads((folder / "exit.json").read_bytes())["code"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_lost(folder: Path) -> bool:
    """Whether nobody waits for the run any more: not for long now, by the clock of the file system itself."""
    alive = folder / "alive"
    try:
        touched = (alive if alive.exists() else folder / "run.json").stat().st_mtime
        probe = folder / f"probe.{os.getpid()}"
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
    except OSError:
        return False
    return now - touched > _STALE


def end(wire: Wire, request: dict[str, Any]) -> None:
    """Interrupts a run as Ctrl-C would; its jobs go on. Only on the machine that it runs on."""
    folder = run_folder(str(request["run"]))
    about = json.loads((folder / "run.json").read_bytes())
    ended = False
    if about["host"] == socket.gethostname() and exit_code(folder) is None:
        with suppress(OSError, ValueError):
            os.killpg(int((folder / "pid").read_text()), signal.SIGINT)
            ended = True
    wire.write({"ended": ended})


def forget(wire: Wire, request: dict[str, Any]) -> None:
    """Removes a run that has ended and whose end was heard of."""
    folder = run_folder(str(request["run"]))
    if exit_code(folder) is not None:
        shutil.rmtree(folder, ignore_errors=True)
    wire.write({"done": True})


def _forget_old(runs: Path) -> None:
    limit = time.time() - KEPT_DAYS * 86400
    with suppress(OSError):
        for folder in runs.iterdir():
            with suppress(OSError):
                over = exit_code(folder) is not None or is_lost(folder)
                if RUN.fullmatch(folder.name) and folder.stat().st_mtime < limit and over:
                    shutil.rmtree(folder, ignore_errors=True)
