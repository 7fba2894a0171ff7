"""What is brought back from over there: verdicts, reports, nights; a few named files and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from detrun.errors import DetrunError, RecordError
from detrun.launch.ssh.far_runs import find_archive, run_folder
from detrun.launch.ssh.wire import CHUNK, Wire
from detrun.records.archive import Archive
from detrun.records.files import read_plain
from detrun.records.layout import MARKER

OF_EXPERIMENT = ("experiment.json", "verdict.json", "report.html", "junit.xml")
OF_NIGHT = ("night.json", "junit.xml")
OF_ARCHIVE = ("history.html", "index.html")
ID = re.compile(r"[A-Za-z0-9._+-]{1,200}-[0-9]{8}T[0-9]{6}-[0-9a-f]{4}")
NIGHT = re.compile(r"[A-Za-z0-9_+:][A-Za-z0-9._+:-]{0,99}")
MAX_FILE = 256 * 1024 * 1024
MAX_PAGE = 16 * 1024 * 1024
MOST = 100
"""Experiments that one command brings at most."""
_SCANNED = 8 * 1024 * 1024


def bring(wire: Wire, request: dict[str, Any]) -> None:
    """Sends the files of the experiments that were asked for by id (`ids`), or that a run made or spoke of (`run`).

    `nights`: those of the run's as well. Each file is a message `file` with its folder (`of`), name
    and size, then its bytes; `done` comes last, with the ids that were found.
    """
    since = 0.0
    words = [str(id) for id in request.get("ids") or ()]
    if request.get("run"):
        folder = run_folder(str(request["run"]))
        about = json.loads((folder / "run.json").read_bytes())
        archive, since = Archive(about["archive"]), float(about["started"])
        printed = _printed(folder)
    else:
        archive, printed = find_archive(request, Path.home()), ""
    nights = list(_nights(archive, since)) if request.get("nights") else []
    for night in nights:
        printed += _text(night / "night.json")
    found = [archive.resolve(word).id for word in words]
    found += [id for id in ID.findall(printed) if (archive.root / id / MARKER).is_file()]
    ids = list(dict.fromkeys(found))[-MOST:]
    for id in ids:
        _send(wire, "experiment", id, archive.root / id, OF_EXPERIMENT)
    for night in nights:
        _send(wire, "night", night.name, night, OF_NIGHT)
    _send(wire, "archive", "", archive.root, OF_ARCHIVE, MAX_PAGE)
    wire.write({"done": True, "ids": ids, "nights": [night.name for night in nights], "archive": str(archive.root)})


def _printed(folder: Path) -> str:
    return _text(folder / "err") + _text(folder / "out")


def _text(path: Path) -> str:
    try:
        return read_plain(path, _SCANNED).decode("utf-8", "replace")
    except DetrunError:
        return ""


def _nights(archive: Archive, since: float) -> Iterator[Path]:
    """The nights that were written to since then; else the newest."""
    files = [file for file in (archive.root / "nights").glob("*/night.json") if NIGHT.fullmatch(file.parent.name)]
    newest = sorted(files, key=lambda file: file.stat().st_mtime)[-3:]
    during = [file for file in newest if file.stat().st_mtime >= since - 2]
    yield from (file.parent for file in during or newest[-1:])


def _send(wire: Wire, kind: str, of: str, folder: Path, names: tuple[str, ...], limit: int = MAX_FILE) -> None:
    for name in names:
        try:
            data = read_plain(folder / name, limit)
        except RecordError:
            continue
        wire.write({"file": name, "kind": kind, "of": of, "size": len(data)})
        for position in range(0, len(data), CHUNK):
            wire.write({"more": True}, data[position : position + CHUNK])
